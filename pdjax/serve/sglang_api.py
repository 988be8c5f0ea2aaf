"""sglang's native endpoint, POST /generate, as its clients and both routers use it.

Must never answer a value that it did not compute: unsupported parameters are refused by name (params.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdjax.serve.answer import Plan
from pdjax.serve.calls import Sub
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import bad
from pdjax.serve.limits import HttpLimits
from pdjax.serve.logprobs import ListedLogprobs, read_wanted
from pdjax.serve.params import NEUTRAL_ANYWHERE, NEUTRAL_GENERATE, boolean, refuse_unsupported
from pdjax.serve.phases import phase_seconds
from pdjax.serve.prompts import build_prompts, texts_or_ids
from pdjax.serve.sampling_fields import SGLANG, Sampling, read_sampling

DEFAULT_MAX_NEW_TOKENS = 128  # sglang's


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
    samplings = _samplings(body, len(prompts), engine, limits)
    wanted = read_wanted(body, len(prompts))
    built = build_prompts(body, prompts, samplings, engine, param, limits, wanted)
    n = samplings[0].n
    listed = [
        ListedLogprobs(wanted[i // n], prompt.ids, engine.tokenizer, engine.role)
        for i, prompt in enumerate(built)
    ]
    return Plan(built, GenerateDialect(batch or n > 1, listed))


def _samplings(body: Mapping[str, Any], count: int, engine: Engine, limits: HttpLimits) -> list[Sampling]:
    """sampling_params is one object, or a list with one for each prompt."""
    value = body.get("sampling_params")
    if isinstance(value, list):
        if len(value) != count:
            raise bad("sampling_params", f"has {len(value)} entries for {count} prompts")
        return [_sampling(one, engine, limits) for one in value]
    return [_sampling({} if value is None else value, engine, limits)] * count


def _sampling(params: Any, engine: Engine, limits: HttpLimits) -> Sampling:
    if not isinstance(params, dict):
        raise bad("sampling_params", "must be an object")
    refuse_unsupported(params, NEUTRAL_ANYWHERE, SGLANG.where)
    return read_sampling(
        params, SGLANG, limits, default_max=DEFAULT_MAX_NEW_TOKENS, vocab_size=engine.vocab_size
    )


def finish_reason(sub: Sub) -> dict[str, Any] | None:
    """sglang's shape: {"type": "stop", "matched": id, text or null}, {"type": "length", "length": n}, {"type": "abort", ...}."""
    finish = sub.finish
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": len(sub.output_ids)}
    return {"type": "abort", "message": finish.message or "the request was aborted"}


class GenerateDialect:
    """batch: several outputs may come, so a list is answered, and stream frames carry an index.

    listed: each output's log-probabilities.
    """

    def __init__(self, batch: bool, listed: list[ListedLogprobs]) -> None:
        self._batch = batch
        self._listed = listed

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
                **self._listed[sub.index].meta_info(sub),
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
