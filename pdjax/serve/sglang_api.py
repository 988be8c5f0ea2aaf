"""sglang's native endpoint, POST /generate, as its clients and both routers use it.

Must never answer a value that it did not compute: unsupported parameters are refused by name (params.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdjax.serve.answer import HttpLimits, Plan
from pdjax.serve.calls import Sub
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import bad
from pdjax.serve.params import (
    NEUTRAL_GENERATE,
    NEUTRAL_SAMPLING,
    UINT64,
    Sampling,
    boolean,
    integer,
    refuse_unsupported,
    seed_of,
    stop_ids,
    temperature,
)
from pdjax.serve.phases import phase_seconds
from pdjax.serve.prompts import build_prompts, texts_or_ids

DEFAULT_MAX_NEW_TOKENS = 128  # sglang's
WHERE = "sampling_params."


def parse_generate(body: dict[str, Any], engine: Engine, limits: HttpLimits) -> Plan:
    """A body of /generate. Raises ApiError 400."""
    boolean(body, "stream")
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise bad("text", "send exactly one of text and input_ids")
    param, value = ("text", text) if text is not None else ("input_ids", ids)
    if param == "text" and isinstance(value, list) and not all(isinstance(one, str) for one in value):
        raise bad("text", "must be a text or a list of texts")
    if param == "input_ids" and isinstance(value, (str, list)) and any(isinstance(one, str) for one in value):
        raise bad("input_ids", "must be a list of token ids or a list of such lists")
    prompts, batch = texts_or_ids(value, param, limits)
    refuse_unsupported(body, NEUTRAL_GENERATE)
    built = build_prompts(body, prompts, _samplings(body, len(prompts)), engine, param)
    return Plan(built, GenerateDialect(batch))


def _samplings(body: Mapping[str, Any], count: int) -> list[Sampling]:
    """sampling_params is one object, or a list with one for each prompt."""
    value = body.get("sampling_params")
    values = value if isinstance(value, list) else [{} if value is None else value] * count
    if len(values) != count:
        raise bad("sampling_params", f"has {len(values)} entries for {count} prompts")
    return [_sampling(one) for one in values]


def _sampling(params: Any) -> Sampling:
    if not isinstance(params, dict):
        raise bad("sampling_params", "must be an object")
    refuse_unsupported(params, NEUTRAL_SAMPLING, WHERE)
    asked = integer(params, "max_new_tokens", 1, UINT64, WHERE)
    if asked is None and "max_new_tokens" not in params:
        asked = DEFAULT_MAX_NEW_TOKENS
    return Sampling(
        max_new_tokens=asked,
        temperature=temperature(params, WHERE),
        seed=seed_of(params, ("sampling_seed", "seed"), WHERE),
        ignore_eos=boolean(params, "ignore_eos", WHERE),
        stop_token_ids=stop_ids(params, WHERE),
    )


def finish_reason(sub: Sub) -> dict[str, Any] | None:
    """sglang's shape: {"type": "stop", "matched": id}, {"type": "length", "length": n}, {"type": "abort", ...}."""
    finish = sub.finish
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": len(sub.output_ids)}
    return {"type": "abort", "message": finish.message or "the request was aborted"}


class GenerateDialect:
    """batch: the client sent a list, so a list is answered, and stream frames carry an index."""

    def __init__(self, batch: bool) -> None:
        self._batch = batch

    def _result(self, sub: Sub) -> dict[str, Any]:
        request = sub.request
        return {
            "text": sub.text,
            "output_ids": sub.output_ids,
            "meta_info": {
                "id": sub.rid,
                "finish_reason": finish_reason(sub),
                "prompt_tokens": len(request.prompt_ids),
                "completion_tokens": len(sub.output_ids),
                "cached_tokens": request.cached_tokens,
                "e2e_latency": sub.latency_s,
                "times": phase_seconds(request.times),
            },
        }

    def whole(self, subs: list[Sub]) -> Any:
        results = [self._result(sub) for sub in subs]
        return results if self._batch else results[0]

    def frames(self, sub: Sub, piece: str) -> Iterable[Mapping[str, Any]]:
        """The text so far, not the piece: sglang's streams are cumulative."""
        frame = self._result(sub)
        if self._batch:
            frame["index"] = sub.index
        return [frame]

    def tail(self, subs: list[Sub]) -> Iterable[Mapping[str, Any]]:
        return []
