"""Bodies of /generate with every sampling option, and what must be equal when two servers answer the same one.

For tests that compare PD with an ordinary server, in one process or over routers. Bodies hold neither prompt nor
room: a test adds them. Whatever they provoke (the end at the first token, say) they provoke with a bias, so they
work with any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOGPROBS = {"return_logprob": True, "top_logprobs_num": 4, "logprob_start_len": 0}
SCHEMA = (
    '{"type": "object", "properties": {"name": {"enum": ["ann", "bob"]}, "n": {"enum": [1, 22, 333]}, '
    '"ok": {"type": "boolean"}}, "required": ["name", "n", "ok"], "additionalProperties": false}'
)


def matrix(eos: int, token: int, text: str) -> dict[str, dict[str, Any]]:
    """Name → body. eos: an end-of-text token. token: any other one whose text is ``text``, alone and repeated."""
    end, say = {str(eos): 1000}, {str(token): 1000}
    warm = {"temperature": 0.9, "sampling_seed": 7}
    greedy = {"temperature": 0}
    lean = {str(token): 4.0}  # likelier, not certain
    sampling: dict[str, dict[str, Any]] = {
        "greedy": greedy,
        "seeded": warm,
        "hot": {"temperature": 1.7, "sampling_seed": (1 << 63) + 5},
        "default_temperature": {"sampling_seed": 11},
        "top_p": {**warm, "top_p": 0.7},
        "top_k": {**warm, "top_k": 5},
        "min_p": {**warm, "min_p": 0.5},
        "cuts": {**warm, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
        "presence": {**greedy, "presence_penalty": 1.5},
        "frequency": {**warm, "logit_bias": lean, "frequency_penalty": 1.2},
        "repetition": {**greedy, "repetition_penalty": 1.8},
        "rewards": {**greedy, "frequency_penalty": -1.5, "repetition_penalty": 0.7},
        "penalties": {
            **warm,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
            "top_p": 0.95,
        },
        "bias": {**warm, "logit_bias": lean},
        "bias_and_penalty": {**greedy, "logit_bias": lean, "frequency_penalty": 1.0},
        "eos_first": {**greedy, "logit_bias": end},
        "eos_ignored": {**greedy, "logit_bias": end, "ignore_eos": True},
        "eos_shown": {**greedy, "logit_bias": end, "no_stop_trim": True, "skip_special_tokens": False},
        "min_1": {**greedy, "logit_bias": end, "min_new_tokens": 1},
        "min_4": {**warm, "logit_bias": end, "min_new_tokens": 4},
        "stop_id_first": {**greedy, "logit_bias": say, "stop_token_ids": [token]},
        "stop_id_after_min": {**greedy, "logit_bias": say, "stop_token_ids": [token], "min_new_tokens": 3},
        "stop_first": {**greedy, "logit_bias": say, "stop": text},
        "stop_third": {**greedy, "logit_bias": say, "stop": ["no such text", text * 3]},
        "stop_kept": {**greedy, "logit_bias": say, "stop": [text * 2], "no_stop_trim": True},
        "one_token": {**warm, "max_new_tokens": 1},
        "one_token_that_stops": {**greedy, "max_new_tokens": 1, "logit_bias": say, "stop": [text]},
        "json": {**greedy, "json_schema": SCHEMA, "max_new_tokens": 100},
        "json_seeded": {**warm, "json_schema": SCHEMA, "max_new_tokens": 100},
        "json_cut": {**warm, "json_schema": SCHEMA, "max_new_tokens": 5},
        "json_and_penalty": {**warm, "json_schema": SCHEMA, "max_new_tokens": 100, "frequency_penalty": 1.0},
    }
    bodies = {
        name: {"sampling_params": {"max_new_tokens": 10, **params}, **LOGPROBS}
        for name, params in sampling.items()
    }
    short = {"max_new_tokens": 6}
    bodies |= {
        "no_logprobs": {"sampling_params": {**warm, **short}},
        "logprobs_of_outputs": {"sampling_params": {**warm, **short}, "return_logprob": True},
        "logprobs_from_5": {"sampling_params": {**greedy, **short}, **LOGPROBS, "logprob_start_len": 5},
        "logprob_texts": {
            "sampling_params": {**greedy, **short},
            **LOGPROBS,
            "return_text_in_logprobs": True,
            "top_logprobs_num": 20,
        },
        "logprobs_off": {"sampling_params": {**greedy, **short}, "return_logprob": False},
        "n_2": {"sampling_params": {**warm, **short, "n": 2}, **LOGPROBS},
        "n_2_json": {"sampling_params": {**warm, "n": 2, "json_schema": SCHEMA, "max_new_tokens": 100}},
    }
    return bodies


# Cases in which the first token ends the request: D has nothing to decode.
FIRST_TOKEN_ENDS = (
    "eos_first",
    "eos_shown",
    "stop_id_first",
    "stop_first",
    "one_token",
    "one_token_that_stops",
)
# Cases whose text must be JSON of SCHEMA.
JSON = ("json", "json_seeded", "json_and_penalty", "n_2_json")


def through_rust(body: Mapping[str, Any]) -> bool:
    """The rust router passes the body on whole: it drops logit_bias from sampling_params (measured, 0.3.2)."""
    return "logit_bias" not in body["sampling_params"]


def merged(d: Any, p: Any) -> Any:
    """D's answer as a router completes it: P's input log-probabilities before D's (facts/router §3.1)."""
    if isinstance(d, list):
        return [merged(one, other) for one, other in zip(d, p, strict=True)]
    if "input_token_logprobs" not in d["meta_info"]:
        return d
    meta, name = dict(d["meta_info"]), "input_token_logprobs"
    meta[name] = p["meta_info"][name] + meta[name]
    return {**d, "meta_info": meta}


def differences(pd: Any, plain: Any, *, within: float = 1e-5, inputs: bool = True) -> list[str]:
    """What a client can see differ between two answers; log-probabilities may, by ``within``.

    inputs: the input log-probabilities are merged in, as both routers do for one output. Those of the likeliest
    tokens never are, and a prefix cache belongs to one server.
    """
    if isinstance(plain, list):
        pairs = zip(pd, plain, strict=True)
        return [d for a, b in pairs for d in differences(a, b, within=within, inputs=inputs)]
    found = [
        f"{key}: {pd[key]!r} is not {plain[key]!r}" for key in ("text", "output_ids") if pd[key] != plain[key]
    ]
    a, b = pd["meta_info"], plain["meta_info"]
    if a.keys() != b.keys():
        found.append(f"meta_info has {sorted(a.keys() ^ b.keys())} on one side only")
    names = [
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "output_token_logprobs",
        "output_top_logprobs",
    ]
    names += ["input_token_logprobs"] if inputs else []
    found += [
        f"meta_info.{n}: {a[n]!r} is not {b[n]!r}"
        for n in names
        if n in b and not _close(a.get(n), b[n], within)
    ]
    return found


def _close(a: Any, b: Any, within: float) -> bool:
    if isinstance(b, float):
        return isinstance(a, float) and abs(a - b) <= within
    if isinstance(b, list):
        return (
            isinstance(a, list)
            and len(a) == len(b)
            and all(_close(x, y, within) for x, y in zip(a, b, strict=True))
        )
    if isinstance(b, Mapping):
        return a == b
    return type(a) is type(b) and a == b
