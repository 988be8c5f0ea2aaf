"""The sampling fields of a body, in either dialect, as SamplingParams; each mistake is a 400 that names its field.

Names and ranges are sglang's and OpenAI's (docs/api.md has the table). Must never coerce: "1" is no number.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pdjax.sched.request import SamplingParams
from pdjax.serve.errors import bad
from pdjax.serve.limits import HttpLimits
from pdjax.serve.params import LARGE, UINT64, boolean, integer, number
from pdjax.serve.text import DEFAULTS, TextOptions

ALL_TOKENS = 1 << 30  # sglang's top_k for "not used"; any larger one means the same
JSON_OBJECT = '{"type":"object"}'


@dataclass(frozen=True)
class Dialect:
    """How one API names what both have. where: prefix of a field's name in messages.

    null_fits: null as max_new_tokens means whatever fits, not the default.
    """

    where: str
    max_new_tokens: tuple[str, ...]
    min_new_tokens: tuple[str, ...]
    seed: tuple[str, ...]
    null_fits: bool


SGLANG = Dialect(
    "sampling_params.", ("max_new_tokens",), ("min_new_tokens",), ("sampling_seed", "seed"), null_fits=True
)
OPENAI = Dialect(
    "",
    ("max_completion_tokens", "max_tokens"),
    ("min_tokens", "min_new_tokens"),
    ("seed", "sampling_seed"),
    null_fits=False,
)


@dataclass(frozen=True)
class Sampling:
    """The fields of one body. ``of`` gives what one output is drawn with: its seed may come from its room.

    max_new_tokens None: whatever the context still holds. schema: a JSON schema as text, "" for none, from the field
    that schema_field names. params: everything that is the same for each output.
    """

    params: SamplingParams
    max_new_tokens: int | None
    seed: int | None
    text: TextOptions = DEFAULTS
    schema: str = ""
    schema_field: str = ""
    n: int = 1

    def of(self, n_prompt: int, context_length: int, room: int | None, sample: int = 0) -> SamplingParams:
        """sample: which of the n outputs of a prompt; each draws from a stream of its own."""
        space = context_length - n_prompt
        seed = self.seed
        if seed is not None:
            seed = seed_of_sample(seed, sample)
        elif self.params.temperature > 0:
            seed = secrets.randbits(63) if room is None else seed_for_room(room)
        return replace(
            self.params,
            max_new_tokens=space if self.max_new_tokens is None else min(self.max_new_tokens, space),
            seed=seed or 0,
        )


def seed_for_room(room: int) -> int:
    """P and D hold the same room and so choose the same seed without a word; close rooms get unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(room.to_bytes(8, "big"), digest_size=8).digest(), "big")


def seed_of_sample(seed: int, sample: int) -> int:
    """The client's own seed for its first output, unrelated ones for the others."""
    if not sample:
        return seed
    blob = seed.to_bytes(8, "big") + sample.to_bytes(8, "big")
    return int.from_bytes(hashlib.blake2b(blob, digest_size=8).digest(), "big")


def read_sampling(
    body: Mapping[str, Any],
    dialect: Dialect,
    limits: HttpLimits,
    *,
    default_max: int | None,
    vocab_size: int,
) -> Sampling:
    """Raises ApiError 400. default_max: new tokens where the body has no word of them, None: what fits."""
    where = dialect.where
    longest = _first_integer(body, dialect.max_new_tokens, 1, where)
    if longest is None and not (dialect.null_fits and any(name in body for name in dialect.max_new_tokens)):
        longest = default_max
    fewest = _first_integer(body, dialect.min_new_tokens, 0, where) or 0
    if longest is not None and fewest > longest:
        name = next(name for name in dialect.min_new_tokens if body.get(name) is not None)
        raise bad(f"{where}{name}", f"is {fewest}, more than the most new tokens, {longest}")
    schema, schema_field = _schema(body, where, limits)
    params = SamplingParams(
        # sglang's and OpenAI's default is 1.0.
        temperature=number(body, "temperature", 1.0, 0, LARGE, where),
        top_p=number(body, "top_p", 1.0, 0, 1, where, above=True),
        top_k=_top_k(body, where),
        min_p=number(body, "min_p", 0.0, 0, 1, where),
        presence_penalty=number(body, "presence_penalty", 0.0, -2, 2, where),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2, 2, where),
        repetition_penalty=number(body, "repetition_penalty", 1.0, 0, 2, where, above=True),
        min_new_tokens=fewest,
        ignore_eos=boolean(body, "ignore_eos", where),
        stop_token_ids=_stop_ids(body, where, limits, vocab_size),
        logit_bias=_logit_bias(body, where, limits, vocab_size),
        grammar=schema,
    )
    return Sampling(
        params,
        longest,
        _seed(body, dialect),
        TextOptions(
            stop=_stop(body, where, limits),
            no_stop_trim=boolean(body, "no_stop_trim", where),
            skip_special_tokens=boolean(body, "skip_special_tokens", where, default=True),
        ),
        schema,
        schema_field,
        _n(body, where, limits),
    )


def _first_integer(body: Mapping[str, Any], names: Sequence[str], low: int, where: str) -> int | None:
    """The first of these fields that is set."""
    return next((v for name in names if (v := integer(body, name, low, UINT64, where)) is not None), None)


def _seed(body: Mapping[str, Any], dialect: Dialect) -> int | None:
    """Modulo 2^64."""
    for name in dialect.seed:
        value = integer(body, name, -(1 << 63), UINT64, dialect.where)
        if value is not None:
            return value & UINT64
    return None


def _top_k(body: Mapping[str, Any], where: str) -> int:
    """0 means every token, as -1 does."""
    value = integer(body, "top_k", -1, UINT64, where)
    return 0 if value is None or value == -1 or value >= ALL_TOKENS else value


def _n(body: Mapping[str, Any], where: str, limits: HttpLimits) -> int:
    n = integer(body, "n", 1, limits.max_n, where) or 1
    best_of = body.get("best_of")
    if best_of is not None and (type(best_of) is not int or best_of not in (1, n)):
        raise bad(
            f"{where}best_of", f"choosing among more outputs is not supported: leave it out or send {n}"
        )
    return n


def _stop(body: Mapping[str, Any], where: str, limits: HttpLimits) -> tuple[str, ...]:
    """A text or a list of texts; an empty text alone means none, as clients send it."""
    value = body.get("stop")
    if value is None or value == "":
        return ()
    values = value if isinstance(value, list) else [value]
    if len(values) > limits.max_stop_strings:
        raise bad(f"{where}stop", f"has {len(values)} strings, the limit is {limits.max_stop_strings}")
    for one in values:
        if not isinstance(one, str) or not 0 < len(one) <= limits.max_stop_chars:
            raise bad(
                f"{where}stop", f"must be texts of 1 to {limits.max_stop_chars} characters, one or a list"
            )
    return tuple(values)


def _stop_ids(body: Mapping[str, Any], where: str, limits: HttpLimits, vocab_size: int) -> frozenset[int]:
    value = body.get("stop_token_ids")
    if value is None:
        return frozenset()
    if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < vocab_size for i in value):
        raise bad(f"{where}stop_token_ids", f"must be a list of token ids in [0, {vocab_size - 1}]")
    if len(value) > limits.max_stop_token_ids:
        raise bad(f"{where}stop_token_ids", f"has {len(value)} ids, the limit is {limits.max_stop_token_ids}")
    return frozenset(value)


def _logit_bias(
    body: Mapping[str, Any], where: str, limits: HttpLimits, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    """{"token id": bias}, added to that token's logit."""
    value = body.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad(f"{where}logit_bias", "must be an object of token ids and numbers")
    if len(value) > limits.max_logit_bias:
        raise bad(f"{where}logit_bias", f"has {len(value)} entries, the limit is {limits.max_logit_bias}")
    out: dict[int, float] = {}
    for key in value:
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 16 else -1
        if not 0 <= token < vocab_size or token in out:
            raise bad(f"{where}logit_bias", f"must name token ids in [0, {vocab_size - 1}], each once")
        out[token] = number(value, key, 0.0, -LARGE, LARGE, f"{where}logit_bias.")
    return tuple(out.items())


def _schema(body: Mapping[str, Any], where: str, limits: HttpLimits) -> tuple[str, str]:
    """(JSON schema as text or "", the field that holds it): ``json_schema``, or OpenAI's ``response_format``."""
    field = f"{where}json_schema"
    schema = body.get("json_schema")
    form = body.get("response_format") if not where else None
    if schema is not None and schema != "" and form is not None:
        raise bad("response_format", "send either this or json_schema")
    if form is not None:
        field, schema = "response_format", _response_format(form)
    if schema is None or schema == "":
        return "", field
    if isinstance(schema, dict):
        schema = msgspec.json.encode(schema).decode()
    if not isinstance(schema, str):
        raise bad(field, "must be a JSON schema")
    if len(schema.encode()) > limits.max_schema_bytes:
        raise bad(field, f"has {len(schema.encode())} bytes, the limit is {limits.max_schema_bytes}")
    return schema, field


def _response_format(form: Any) -> Any:
    """The schema, None for free text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return schema
        raise bad("response_format", "json_schema.schema must be a JSON schema")
    raise bad("response_format", 'its type must be "text", "json_object" or "json_schema"')
