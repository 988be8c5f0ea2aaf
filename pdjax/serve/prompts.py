"""From texts or token ids of a body to validated outputs: what /generate and the OpenAI endpoints share.

Everything that can be wrong with a request is found here, before the engine hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdjax.sched.request import Grammar
from pdjax.serve.calls import Prompt
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import bad
from pdjax.serve.limits import HttpLimits
from pdjax.serve.logprobs import Wanted
from pdjax.serve.params import Bootstrap, bootstraps, check_prompt, request_ids
from pdjax.serve.sampling_fields import Sampling


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
    limits: HttpLimits,
    wanted: list[Wanted],
) -> list[Prompt]:
    """Tokenize and check each prompt, and pair its outputs with their rooms: n for each prompt, one after the other.

    sampling and wanted have one entry for each prompt.
    """
    count, n = len(prompts), sampling[0].n
    if any(how.n != n for how in sampling):
        raise bad("sampling_params.n", "must be the same for all prompts")
    if count * n > limits.max_batch:
        raise bad("n", f"{count} prompts with {n} outputs each: the limit is {limits.max_batch} outputs")
    # Without PD the bootstrap fields mean nothing, whatever they hold.
    meeting = bootstraps(body, count, n, limits) if engine.role != "null" else [Bootstrap()] * (count * n)
    # In PD the context of this side may be the shorter one: the engine refuses, and tells the other half (protocol §4).
    longest = engine.context_length if engine.role == "null" else None
    rids = request_ids(body, count, n, limits)
    built = []
    for i, (prompt, how, lists) in enumerate(zip(prompts, sampling, wanted, strict=True)):
        tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = check_prompt(tokens, engine.vocab_size, longest, param)
        if lists.scores_from is not None and lists.scores_from > len(ids):
            raise bad("logprob_start_len", f"is past the end of the prompt of {len(ids)} tokens")
        for sample in range(n):
            where, rid = meeting[i * n + sample], rids[i * n + sample]
            drawn = how.of(len(ids), engine.context_length, where.room, sample)
            drawn = replace(drawn, top_logprobs=lists.n_top, prompt_logprobs_from=lists.scores_from)
            built.append(Prompt(ids, drawn, where, rid, how.text, _grammar(how, engine)))
    return built


def _grammar(how: Sampling, engine: Engine) -> Grammar | None:
    if not how.schema:
        return None
    try:
        return engine.tokenizer.json_grammar(how.schema)
    except ValueError as error:
        raise bad(how.schema_field, str(error)) from error
