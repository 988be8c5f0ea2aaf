"""Fields of request bodies → what the engine takes, or a 400 that names the field.

Unknown keys are ignored (routers add about ten, facts/router §2). A known parameter that is not supported and would
change the answer is refused, never ignored; its neutral value passes. Nothing here is coerced: a room as 1e3 is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdjax.serve.errors import bad
from pdjax.serve.limits import HttpLimits

ROOM_MAX = (1 << 63) - 1
UINT64 = (1 << 64) - 1
LARGE = 1e30  # bound of numbers that have no natural one: a float32 holds it

# Values that mean "not used": they pass. Anything else would change the answer and is refused with the name.
NEUTRAL_ANYWHERE: Mapping[str, Sequence[Any]] = {
    "stop_regex": ("", []),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "custom_params": ({},),
    "lora_path": ("", []),
    "return_hidden_states": (False,),
    "return_entropy": (False,),
    "custom_logit_processor": ("",),
}
NEUTRAL_GENERATE: Mapping[str, Sequence[Any]] = {
    **NEUTRAL_ANYWHERE,
    "token_ids_logprob": ([],),
    "input_embeds": ([],),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "return_bytes": (False,),
    "background": (False,),
}
NEUTRAL_OPENAI: Mapping[str, Sequence[Any]] = {
    **NEUTRAL_ANYWHERE,
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
}


def refuse_unsupported(
    body: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]], where: str = ""
) -> None:
    """Raises a 400 for the first parameter whose value would change the answer. null always passes."""
    for name, allowed in neutral.items():
        value = body.get(name)
        if value is None or any(_same(value, ok) for ok in allowed):
            continue
        shown = " or ".join(repr(ok) for ok in allowed)
        raise bad(
            f"{where}{name}", f"this value is not supported by this server; leave it out or send {shown}"
        )


def _same(value: Any, ok: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, true and 1 are not."""
    return value == ok and isinstance(value, bool) == isinstance(ok, bool)


def integer(body: Mapping[str, Any], name: str, low: int, high: int, where: str = "") -> int | None:
    """An exact integer or None when absent or null. Floats and bools are refused."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise bad(f"{where}{name}", f"must be an integer in [{low}, {high}]")
    return value


def boolean(body: Mapping[str, Any], name: str, where: str = "", default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad(f"{where}{name}", "must be true or false")
    return value


def number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    low: float,
    high: float,
    where: str = "",
    *,
    above: bool = False,
) -> float:
    """A number in [low, high], or in (low, high] with above; default when absent or null. Booleans are refused."""
    value = body.get(name)
    if value is None:
        return default
    # Compared, not converted: an integer of 400 digits is no float.
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (known and low <= value <= high) or (above and value == low):
        raise bad(f"{where}{name}", f"must be a number in {'(' if above else '['}{low:g}, {high:g}]")
    return float(value)


def check_prompt(ids: Any, vocab_size: int, context_length: int | None, param: str) -> list[int]:
    """Token ids that the engine can take, or a 400 before anything is taken. context_length None: not looked at."""
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise bad(param, "must be a list of token ids (integers)")
    if not ids:
        raise bad(param, "the prompt is empty: it has no tokens")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise bad(param, f"token ids must be in [0, {vocab_size - 1}]")
    if context_length is not None and len(ids) >= context_length:
        raise bad(
            param,
            f"the prompt has {len(ids)} tokens; with at least one new token it must fit in the context of {context_length}",
        )
    return ids


@dataclass(frozen=True)
class Bootstrap:
    """Where the halves of one prompt meet: what the router injected (protocol §3, Finding P)."""

    host: str = ""
    port: int | None = None
    room: int | None = None


def bootstraps(body: Mapping[str, Any], count: int, n: int, limits: HttpLimits) -> list[Bootstrap]:
    """One for each output: n of each of count prompts, those of one prompt together (facts/router §0.3).

    Each field is a scalar, a list with an entry for each prompt, or one for each output. Rooms that are not named are
    counted up from the one before, modulo 2^63, on both sides alike (protocol §1): a scalar is the first output's,
    an entry for a prompt is its first output's.
    """
    total = count * n
    hosts, ports = (_per_output(body, name, count, n) for name in ("bootstrap_host", "bootstrap_port"))
    given = _per_output(body, "bootstrap_room", count, n)
    for host in hosts:
        if not isinstance(host, str) or not 0 < len(host) <= limits.max_host_chars:
            raise bad(
                "bootstrap_host", "must be the host of the prefill server: send requests through a PD router"
            )
    for port in ports:
        if port is not None and (type(port) is not int or not 1 <= port <= 65535):
            raise bad("bootstrap_port", "must be an integer in [1, 65535], or null for the configured port")
    for room in given:
        if type(room) is not int or not 0 <= room <= ROOM_MAX:
            raise bad(
                "bootstrap_room", f"must be an integer in [0, {ROOM_MAX}]: send requests through a PD router"
            )
    named = body.get("bootstrap_room")
    run = total if not isinstance(named, list) else n if len(named) == count else 1
    rooms = [(room + i % run) & ROOM_MAX for i, room in enumerate(given)]
    if len(set(rooms)) != len(rooms):
        raise bad("bootstrap_room", "names the same room for two outputs")
    return [Bootstrap(*fields) for fields in zip(hosts, ports, rooms, strict=True)]


def named_rooms(body: Mapping[str, Any]) -> list[int]:
    """The rooms that a body names, whatever else is wrong with it."""
    value = body.get("bootstrap_room")
    values = value if isinstance(value, list) else [value]
    return [room for room in values if type(room) is int and 0 <= room <= ROOM_MAX]


def request_ids(body: Mapping[str, Any], count: int, n: int, limits: HttpLimits) -> list[str | None]:
    """The client's names of its outputs; one text may name them all, and a prompt's names all of its outputs."""
    values = _per_output(body, "rid", count, n)
    for one in values:
        if one is not None and not (isinstance(one, str) and 0 < len(one) <= limits.max_rid_chars):
            raise bad("rid", f"must be a text of 1 to {limits.max_rid_chars} characters")
    return values


def _per_output(body: Mapping[str, Any], name: str, count: int, n: int) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        return [value] * (count * n)
    if len(value) == count * n:
        return value
    if len(value) != count:
        outputs = f" and {count * n} outputs" if n > 1 else ""
        raise bad(name, f"has {len(value)} entries for {count} prompt{'s' * (count != 1)}{outputs}")
    return [one for one in value for _ in range(n)]
