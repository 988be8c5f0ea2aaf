"""From texts or token ids of a body to validated prompts: what /generate and the OpenAI endpoints share.

Everything that can be wrong with a request is found here, before the engine hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdjax.serve.answer import HttpLimits
from pdjax.serve.calls import Prompt
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import bad
from pdjax.serve.params import Bootstrap, Sampling, bootstraps, check_prompt, request_ids


def texts_or_ids(value: Any, param: str, limits: HttpLimits) -> tuple[list[str] | list[list[int]], bool]:
    """(prompts, whether the client sent a list of them) from a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value], False
    if not isinstance(value, list):
        raise bad(param, "must be a text, a list of token ids, or a list of one of these")
    if not value:
        raise bad(param, "is empty")
    if all(isinstance(one, str) for one in value) or all(isinstance(one, list) for one in value):
        if len(value) > limits.max_batch:
            raise bad(param, f"has {len(value)} prompts, the limit is {limits.max_batch}")
        return value, True
    return [value], False


def build_prompts(
    body: Mapping[str, Any],
    prompts: list[str] | list[list[int]],
    sampling: list[Sampling],
    engine: Engine,
    param: str,
) -> list[Prompt]:
    """Tokenize and check each prompt, and pair it with its room. sampling has one entry for each prompt."""
    count = len(prompts)
    # Without PD the bootstrap fields mean nothing, whatever they hold.
    meeting = bootstraps(body, count) if engine.role != "null" else [Bootstrap()] * count
    rids = request_ids(body, count)
    built = []
    for prompt, how, where, rid in zip(prompts, sampling, meeting, rids, strict=True):
        tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = check_prompt(tokens, engine.vocab_size, engine.context_length, param)
        built.append(Prompt(ids, how.of(len(ids), engine.context_length, where.room), where, rid))
    return built
