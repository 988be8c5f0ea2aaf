"""facts/router §3.1: what a client sees of both answers: bodies, merged log-probabilities, streams, usage."""

import json

import pytest
from router_rows import BOTH, CHAT, PROMPT, body, ok, stream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SHIMMED = ("rust-shim", "mini-shim")
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}
COMPLETION = {"model": "default", "prompt": "Once upon", "max_tokens": 6, "temperature": 0}


@pytest.mark.parametrize("router", SHIMMED)
def test_3_1_body_of_d(shims, router):
    fleet, _, d = shims
    for path, request in (
        ("/generate", body()),
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 4}),
    ):
        answer = fleet.post(router, path, request)
        assert answer.status_code == 200 and answer.content == d.seen[-1].sent, path


@pytest.mark.parametrize("router", SHIMMED)
def test_3_1_logprobs_merged(shims, router):
    """P's list and D's empty one: what an ordinary server answers. rust calls the merged body an octet stream."""
    fleet, p, d = shims
    answer = fleet.post(router, "/generate", body(**LOGPROBS))
    plain = ok(fleet.post("plain-0", "/generate", body(**LOGPROBS)))["meta_info"]
    meta = ok(answer)["meta_info"]
    halves = [json.loads(seen[-1].sent)["meta_info"]["input_token_logprobs"] for seen in (p.seen, d.seen)]
    assert halves[1] == [] and len(halves[0]) == len(PROMPT)
    # rust writes the last digit of a number its own way.
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [entry[1:] for entry in halves[0]]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1] for entry in meta[name]] == [entry[1] for entry in plain[name]]
        for ours, theirs in zip(meta[name], plain[name], strict=True):
            assert ours[0] == theirs[0] or abs(ours[0] - theirs[0]) < 1e-5
    kind = answer.headers["content-type"]
    assert kind == ("application/octet-stream" if router == "rust-shim" else "application/json"), kind


@pytest.mark.parametrize("router", BOTH)
def test_3_1_logprob_key_false(fleet, router):
    """mini merges wherever the key is, also when it is false: both halves hold a list then."""
    meta = ok(fleet.post(router, "/generate", body(return_logprob=False)))["meta_info"]
    assert meta.get("input_token_logprobs", []) == [] and "output_token_logprobs" not in meta


@pytest.mark.parametrize("router", BOTH)
def test_3_1_batch_not_merged(fleet, router):
    """A list of answers is D's alone, in the order of the prompts; input log-probabilities stay with P."""
    answers = ok(fleet.post(router, "/generate", body([PROMPT, PROMPT[:3]], **LOGPROBS)))
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [len(PROMPT), 3]
    assert [one["meta_info"]["input_token_logprobs"] for one in answers] == [[], []]
    assert [len(one["meta_info"]["output_token_logprobs"]) for one in answers] == [6, 6]


@pytest.mark.parametrize("router", BOTH)
def test_3_1_openai_not_merged(fleet, router):
    for path, request in (
        ("/v1/completions", {**COMPLETION, "logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    ):
        plain, pd = (ok(fleet.post(where, path, request)) for where in ("plain-0", router))
        assert _rounded(pd["choices"]) == _rounded(plain["choices"])


def _rounded(value):
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(("router", "n_input"), [("rust", 0), ("mini", len(PROMPT))])
def test_3_1_stream_logprobs(fleet, router, n_input):
    """P answers server-sent events: mini merges its first one into each of D's, rust merges nothing in a stream."""
    frames = stream(fleet, router, "/generate", body(**LOGPROBS)).frames
    assert [len(frame["meta_info"]["input_token_logprobs"]) for frame in frames] == [n_input] * len(frames)
    assert len(frames[-1]["meta_info"]["output_token_logprobs"]) == 6


@pytest.mark.parametrize("router", SHIMMED)
def test_3_1_stream_unchanged(shims, router):
    fleet, _, d = shims
    for path, request in (("/generate", body()), ("/v1/completions", COMPLETION)):
        seen = stream(fleet, router, path, request)
        assert seen.status == 200 and seen.headers["content-type"].startswith("text/event-stream")
        assert seen.raw.encode() == d.seen[-1].sent and seen.raw.endswith("data: [DONE]\n\n")
    merged = stream(fleet, router, "/generate", body(**LOGPROBS))
    assert ("\n\n\n" in merged.raw) is (router == "mini-shim")
    assert merged.frames[-1]["text"] == stream(fleet, router, "/generate", body()).frames[-1]["text"]


@pytest.mark.parametrize("router", BOTH)
def test_3_1_usage(fleet, router):
    """D's, unchanged: null in chunks; the last chunk has it and no choices where it was asked for."""
    for path, request in (
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 6}),
    ):
        usage = ok(fleet.post(router, path, request))["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        asked = stream(fleet, router, path, {**request, "stream_options": {"include_usage": True}}).frames
        assert asked[-1]["choices"] == []
        told = asked[-1]["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert told[name] == usage[name]
        assert all(frame.get("usage") is None and frame["choices"] for frame in asked[:-1])
        plain = stream(fleet, router, path, request).frames
        assert all(frame["choices"] and frame.get("usage") is None for frame in plain)
