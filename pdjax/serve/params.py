"""Fields of request bodies → what the engine takes, or a 400 that names the field.

Unknown keys are ignored (routers add about ten, facts/router §2). A known parameter that is not supported and would
change the answer is refused, never ignored; its neutral value passes. Nothing here is coerced: a room as 1e3 is wrong.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdjax.sched.request import SamplingParams
from pdjax.serve.errors import bad

ROOM_MAX = (1 << 63) - 1
UINT64 = (1 << 64) - 1
MAX_RID_CHARS = 512
MAX_TEMPERATURE = 1e30  # as good as uniform, and a float32 holds it
MAX_HOST_CHARS = 255

# Values that mean "not used": they pass. Anything else would change the answer and is refused with the name.
NEUTRAL_SAMPLING: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "stop": ("", []),
    "stop_regex": ("", []),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "logit_bias": ({},),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "custom_params": ({},),
    "lora_path": ("", []),
    "return_hidden_states": (False,),
    "return_entropy": (False,),
    "custom_logit_processor": ("",),
}
NEUTRAL_GENERATE: Mapping[str, Sequence[Any]] = {
    **{name: NEUTRAL_SAMPLING[name] for name in ("lora_path", "return_hidden_states", "return_entropy")},
    "custom_logit_processor": ("",),
    "return_logprob": (False, [], [False]),
    "top_logprobs_num": (0, []),
    "token_ids_logprob": ([],),
    "input_embeds": ([],),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "return_bytes": (False,),
    "background": (False,),
}
NEUTRAL_OPENAI: Mapping[str, Sequence[Any]] = {
    **NEUTRAL_SAMPLING,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
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


def boolean(body: Mapping[str, Any], name: str, where: str = "") -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad(f"{where}{name}", "must be true or false")
    return value


def temperature(body: Mapping[str, Any], where: str = "") -> float:
    """sglang's and OpenAI's default is 1.0."""
    value = body.get("temperature")
    if value is None:
        return 1.0
    # Compared, not converted: an integer of 400 digits is no float.
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (known and 0 <= value <= MAX_TEMPERATURE):
        raise bad(f"{where}temperature", f"must be a number in [0, {MAX_TEMPERATURE:g}] (0 is greedy)")
    return float(value)


def seed_of(body: Mapping[str, Any], names: Sequence[str], where: str = "") -> int | None:
    """The first of these fields that is set, modulo 2^64."""
    for name in names:
        value = integer(body, name, -(1 << 63), UINT64, where)
        if value is not None:
            return value & UINT64
    return None


def seed_for_room(room: int) -> int:
    """P and D hold the same room and so choose the same seed without a word; close rooms get unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(room.to_bytes(8, "big"), digest_size=8).digest(), "big")


def stop_ids(body: Mapping[str, Any], where: str = "") -> frozenset[int]:
    value = body.get("stop_token_ids")
    if value is None:
        return frozenset()
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise bad(f"{where}stop_token_ids", "must be a list of token ids")
    return frozenset(value)


@dataclass(frozen=True)
class Sampling:
    """Sampling of a whole call; ``of`` gives that of one prompt, whose seed may come from its room.

    max_new_tokens None: whatever the context still holds.
    """

    max_new_tokens: int | None
    temperature: float
    seed: int | None
    ignore_eos: bool
    stop_token_ids: frozenset[int]

    def of(self, n_prompt: int, context_length: int, room: int | None) -> SamplingParams:
        space = context_length - n_prompt
        seed = self.seed
        if seed is None and self.temperature > 0:
            seed = secrets.randbits(63) if room is None else seed_for_room(room)
        return SamplingParams(
            max_new_tokens=space if self.max_new_tokens is None else min(self.max_new_tokens, space),
            temperature=self.temperature,
            seed=seed or 0,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


def check_prompt(ids: Any, vocab_size: int, context_length: int, param: str) -> list[int]:
    """Token ids that the engine can take, or a 400 before anything is taken."""
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise bad(param, "must be a list of token ids (integers)")
    if not ids:
        raise bad(param, "the prompt is empty: it has no tokens")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise bad(param, f"token ids must be in [0, {vocab_size - 1}]")
    if len(ids) >= context_length:
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


def _per_prompt(body: Mapping[str, Any], name: str, count: int) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad(name, f"has {len(value)} entries for {count} prompt{'s' * (count != 1)}")
    return value


def bootstraps(body: Mapping[str, Any], count: int) -> list[Bootstrap]:
    """One for each prompt; each field is a scalar or a list (facts/router §0.3).

    A scalar room with several prompts is room, room + 1, ... modulo 2^63 on both sides (protocol §1).
    """
    hosts, ports = _per_prompt(body, "bootstrap_host", count), _per_prompt(body, "bootstrap_port", count)
    rooms = _per_prompt(body, "bootstrap_room", count)
    for host in hosts:
        if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST_CHARS:
            raise bad(
                "bootstrap_host", "must be the host of the prefill server: send requests through a PD router"
            )
    for port in ports:
        if port is not None and (type(port) is not int or not 1 <= port <= 65535):
            raise bad("bootstrap_port", "must be an integer in [1, 65535], or null for the configured port")
    for room in rooms:
        if type(room) is not int or not 0 <= room <= ROOM_MAX:
            raise bad(
                "bootstrap_room", f"must be an integer in [0, {ROOM_MAX}]: send requests through a PD router"
            )
    if not isinstance(body.get("bootstrap_room"), list):
        rooms = [(room + i) & ROOM_MAX for i, room in enumerate(rooms)]
    if len(set(rooms)) != len(rooms):
        raise bad("bootstrap_room", "names the same room for two prompts")
    return [Bootstrap(*fields) for fields in zip(hosts, ports, rooms, strict=True)]


def request_ids(body: Mapping[str, Any], count: int) -> list[str | None]:
    """The client's names of its prompts; one text may name them all."""
    value = body.get("rid")
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise bad("rid", f"has {len(values)} entries for {count} prompt{'s' * (count != 1)}")
    for one in values:
        if one is not None and not (isinstance(one, str) and 0 < len(one) <= MAX_RID_CHARS):
            raise bad("rid", f"must be a text of at most {MAX_RID_CHARS} characters")
    return values
