"""facts/router §9: what sglang's own PD tests assert of a deployment, in our words, through both routers.

Each test is named after the test whose assertions it keeps.
"""

import concurrent.futures
import itertools
import json
import time

import pytest
from options_matrix import SCHEMA
from router_rows import BOTH, CHAT, PROMPT, await_bound, body, ok, stream
from test_shared_prefix import flush
from test_tokens import PAGE, prompt_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMPLETION = {"model": "default", "prompt": "The", "max_tokens": 20, "temperature": 0}
TIGHT = 0.05  # what the parity kit allows
NODES = ("prefill-0", "decode-0")


@pytest.mark.parametrize("router", BOTH)
def test_9_logprob(fleet, router):
    asked = body(n_out=16, return_logprob=True, logprob_start_len=0)
    meta = ok(fleet.post(router, "/generate", asked))["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 16
    assert len(meta["input_token_logprobs"]) > 0


@pytest.mark.parametrize("router", BOTH)
def test_9_structured_output(fleet, router):
    """The state of the grammar goes on from P's first token."""
    params = {"temperature": 0, "max_new_tokens": 100, "json_schema": SCHEMA}
    answer = ok(fleet.post(router, "/generate", {"input_ids": PROMPT, "sampling_params": params}))
    assert json.loads(answer["text"]).keys() == {"name", "n", "ok"}
    chat = {
        **CHAT,
        "max_tokens": 100,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": json.loads(SCHEMA)},
        },
    }
    json.loads(ok(fleet.post(router, "/v1/chat/completions", chat))["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def eos(fleet):
    """An end-of-text token of the model and another one with its text, found by asking."""
    for token in range(8):
        request = {**COMPLETION, "max_tokens": 3, "logit_bias": {str(token): 1000}}
        if ok(fleet.post("plain-0", "/v1/completions", request))["choices"][0]["finish_reason"] == "stop":
            return token
    raise AssertionError("no end-of-text token among the first eight")


@pytest.mark.parametrize("router", BOTH)
def test_9_first_token_finish(fleet, router, eos):
    """A bias to the end of text, then without it, then to a stop string: one token, more, one; no decode step for one."""

    def n_tokens(**changes):
        return ok(fleet.post(router, "/v1/completions", {**COMPLETION, **changes}))["usage"][
            "completion_tokens"
        ]

    word = 300
    said = ok(
        fleet.post(
            "plain-0", "/v1/completions", {**COMPLETION, "max_tokens": 1, "logit_bias": {str(word): 1000}}
        )
    )
    text = said["choices"][0]["text"]
    assert text
    steps = [fleet.state(f"decode-{i}")["decode_steps"] for i in (0, 1)]
    assert n_tokens(logit_bias={str(eos): 1000}) == 1
    assert n_tokens(logit_bias={str(word): 1000}, stop=[text]) == 1
    assert n_tokens(max_tokens=1) == 1
    assert [fleet.state(f"decode-{i}")["decode_steps"] for i in (0, 1)] == steps
    assert n_tokens(logit_bias={str(eos): 1000}, ignore_eos=True) > 1


@pytest.mark.parametrize("router", BOTH)
def test_9_pause_resume(fleet, router):
    """32 requests, both modes of the pause, on P and D: none ends in it, all after it, nothing is left running."""
    expected = ok(fleet.post("plain-0", "/generate", body(n_out=24)))["output_ids"]
    workers = [name for name in fleet.addresses if name.startswith(("prefill-", "decode-"))]
    for mode in ("in_place", "retract"):
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            answers = [pool.submit(fleet.post, router, "/generate", body(n_out=24)) for _ in range(32)]
            concurrent.futures.wait(answers, return_when=concurrent.futures.FIRST_COMPLETED)
            for name in workers:
                fleet.post(name, "/pause_generation", {"mode": mode}).raise_for_status()
            # Answers that had ended reach the client; then half a second of silence is the subject itself.
            time.sleep(0.5)
            done = sum(one.done() for one in answers)
            time.sleep(0.5)
            assert sum(one.done() for one in answers) == done, mode
            for name in workers:
                fleet.post(name, "/continue_generation", {}).raise_for_status()
            assert [ok(one.result())["output_ids"] for one in answers] == [expected] * 32
    for name in workers:
        fleet.post(name, "/abort_request", {"abort_all": True}).raise_for_status()
    fleet.await_free(within_s=20)
    for name in workers:
        text = fleet.http.get(f"{fleet.url(name)}/metrics").text
        running = [line for line in text.splitlines() if line.startswith("sglang:num_running_reqs")]
        assert len(running) == 1 and float(running[0].rsplit(" ", 1)[1]) == 0, running


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("router", ["rust-1p1d", "mini-1p1d"])
def test_9_chunked_prefill_abort(fleet, router, streamed):
    """A long prompt is aborted on P and D while it waits: 200 with finish abort, or 500/503 with "abort"; all healthy."""
    long = body(prompt_of(400), 60, rid="R", stream=streamed)
    with fleet.paused("prefill-0"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fleet.post, router, "/generate", long)
        await_bound(fleet, answer)
        for name in NODES:
            other = fleet.post(name, "/abort_request", {"rid": "R0", "abort_all": False})
            assert ok(other) == {"aborted": 0}, "never by prefix"
        for name in NODES:
            ok(fleet.post(name, "/abort_request", {"rid": "R", "abort_all": False}))
        ended = answer.result(30)
    assert ended.status_code == 200 and "abort" in ended.text, ended.text
    if not streamed:
        assert ended.json()["meta_info"]["finish_reason"]["type"] == "abort"
    for name in NODES:
        assert fleet.http.get(f"{fleet.url(name)}/health").status_code == 200


@pytest.mark.parametrize("router", BOTH)
def test_9_stream_shape(fleet, router):
    """One frame with a finish reason, the last; one id; each text begins with the one before it."""
    frames = stream(fleet, router, "/generate", body(n_out=12)).frames
    finished = [frame["meta_info"]["finish_reason"] is not None for frame in frames]
    assert finished.index(True) == len(frames) - 1
    assert len({frame["meta_info"]["id"] for frame in frames}) == 1
    for earlier, later in itertools.pairwise(frames):
        assert later["text"].startswith(earlier["text"])
    assert frames[-1]["output_ids"] == ok(fleet.post(router, "/generate", body(n_out=12)))["output_ids"]


@pytest.mark.parametrize("router", BOTH)
def test_9_batch_pairing(fleet, router):
    """The right answer at each index, whatever pairs of rooms meet. rust takes token ids only, mini texts, too."""
    prompts = [prompt_of(n, 5) for n in (30, 3, 17)]
    expected = [ok(fleet.post("plain-0", "/generate", body(ids)))["output_ids"] for ids in prompts]
    for _ in range(3):
        answers = ok(fleet.post(router, "/generate", body(prompts)))
        assert [one["output_ids"] for one in answers] == expected
        assert [one["meta_info"]["prompt_tokens"] for one in answers] == [30, 3, 17]
    texts = {"text": ["Once upon", "The"], "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    answer = fleet.post(router, "/generate", texts)
    if router == "rust":
        assert answer.status_code == 422
    else:
        assert [a["text"] for a in ok(answer)] == [
            a["text"] for a in ok(fleet.post("plain-0", "/generate", texts))
        ]


@pytest.mark.parametrize("router", BOTH)
def test_9_input_logprobs_of_the_whole_prompt(fleet, router):
    asked = body(return_logprob=True, logprob_start_len=0)
    meta = ok(fleet.post(router, "/generate", asked))["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_9_missing_bootstrap(fleet, node, path):
    """Straight to one half: 400 at once, no hang. The routers always add the fields."""
    request = {**CHAT, **COMPLETION, "input_ids": PROMPT}
    began = time.monotonic()
    assert fleet.post(node, path, request).status_code == 400
    assert time.monotonic() - began < 10


def test_9_health_generate(fleet):
    """On both roles, and through mini, which asks every worker."""
    for where in (*NODES, *BOTH):
        assert fleet.http.get(f"{fleet.url(where)}/health_generate").status_code == 200


@pytest.mark.parametrize("router", ["rust-1p1d", "mini-1p1d"])
def test_9_radix_cache_multi_turn(fleet, router):
    """The cache is P's: each turn finds the whole pages of the one before it, and says so. D has none, and says so."""
    said = {n: fleet.http.get(f"{fleet.url(n)}/server_info").json()["disable_radix_cache"] for n in NODES}
    assert said == {"prefill-0": False, "decode-0": True}
    flush(fleet, "prefill-0")
    history = prompt_of(60, 9)
    for _ in range(3):
        answer = ok(fleet.post(router, "/generate", body(history, 8)))
        assert answer["output_ids"] == ok(fleet.post("plain-0", "/generate", body(history, 8)))["output_ids"]
        before, history = history, [*history, *answer["output_ids"], *prompt_of(20, 10)]
        again = ok(fleet.post(router, "/generate", body(history, 1)))["meta_info"]["cached_tokens"]
        assert again >= len(before) // PAGE * PAGE - PAGE, (again, len(before))


@pytest.mark.parametrize("router", ["rust-1p1d", "mini-1p1d"])
def test_9_parity_kit(fleet, router):
    """Greedy ids and log-probabilities of a server without PD, with P's prefix cache cold and warm."""
    asked = body(prompt_of(70, 3), 4, return_logprob=True, top_logprobs_num=5)
    plain = ok(fleet.post("plain-0", "/generate", asked))
    flush(fleet, "prefill-0")
    for cached in (0, 64):
        pd = ok(fleet.post(router, "/generate", asked))
        assert pd["output_ids"] == plain["output_ids"]
        meta, expected = pd["meta_info"], plain["meta_info"]
        assert meta["cached_tokens"] == cached
        for ours, theirs in zip(
            meta["output_token_logprobs"], expected["output_token_logprobs"], strict=True
        ):
            assert ours[1] == theirs[1] and abs(ours[0] - theirs[0]) < TIGHT
        for mine, yours in zip(meta["output_top_logprobs"], expected["output_top_logprobs"], strict=True):
            assert len(mine) == 5 and [one[1] for one in mine] == [one[1] for one in yours]
    flush(fleet, "prefill-0")


def test_9_worker_api(fleet):
    """rust lists 2P + 2D with their roles and what /server_info and /model_info told it."""
    workers = fleet.http.get(f"{fleet.url('rust')}/workers").json()["workers"]
    assert sorted(one["worker_type"] for one in workers) == ["decode", "decode", "prefill", "prefill"]
    for one in workers:
        assert one["is_healthy"] and one["model_id"] == "tiny", one
        if one["worker_type"] == "prefill":
            assert one["bootstrap_port"] == fleet.bootstrap_port


@pytest.mark.parametrize("router", BOTH)
def test_9_bench_serving(fleet, router):
    """Its completions, and its cache kit's fields of /generate: text in every chunk, exact completion tokens."""
    request = {**COMPLETION, "best_of": 1, "ignore_eos": True, "temperature": 0.0, "max_tokens": 7}
    frames = stream(fleet, router, "/v1/completions", request).frames
    assert all(isinstance(frame["choices"][0]["text"], str) for frame in frames)
    usage = {"stream_options": {"include_usage": True}}
    last = stream(fleet, router, "/v1/completions", {**request, **usage}).frames[-1]
    assert last["usage"]["completion_tokens"] == 7
    kit = body(
        lora_path="", logprob_start_len=-1, return_logprob=False, stream_options={"include_usage": True}
    )
    assert len(stream(fleet, router, "/generate", kit).frames[-1]["output_ids"]) == 6
