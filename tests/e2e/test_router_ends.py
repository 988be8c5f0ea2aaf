"""facts/router §0.5 to §0.10 and the disconnects of §3.2, with real servers: every request ends, on both sides."""

import concurrent.futures
import json

import pytest
from router_rows import at_once, await_bound, body, bound, left_after_first_frame, left_when, ok, stream
from shims import Hangs, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SHIMMED = ("rust-shim", "mini-shim")
LONG = body(n_out=400)
WRONG = [
    {"sampling_params": {"top_p": 7}},
    {"sampling_params": {"max_new_tokens": 0}},
    {"input_ids": [5] * 600},
    {"input_ids": [10_000_000]},
]


def posted(pool, fleet, where, content):
    """The request, under way: its halves have met."""
    answer = pool.submit(fleet.post, where, "/generate", content)
    await_bound(fleet, answer)
    return answer


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("router", SHIMMED)
def test_0_5_p_that_gives_up_ends_d(shims, router, streamed):
    """The router tells D nothing: P does. Long before any timer, in a stream as an event and [DONE]."""
    fleet, _, d = shims
    with fleet.paused("prefill-0"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = posted(pool, fleet, router, body(rid="gone", stream=streamed))
        assert ok(fleet.post("prefill-0", "/abort_request", {"rid": "gone"}))["aborted"] == 1
        text = answer.result().text
        assert until(lambda: d.seen[0].done)
    assert d.seen[0].status == 200 and len(d.seen) == 1, "an abort is not tried again"
    if streamed:
        text, end = text.strip().split("\n\n")
        assert end == "data: [DONE]"
    answered = json.loads(text.removeprefix("data: "))
    assert answered["meta_info"]["finish_reason"]["type"] == "abort", answered


@pytest.mark.parametrize("router", SHIMMED)
def test_0_5_d_that_gives_up_frees_p(shims, router):
    """P's leg ended well long ago; its bytes are free as soon as D has said that it will not come."""
    fleet, p, _ = shims
    with fleet.paused("decode-0"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = posted(pool, fleet, router, body(rid="gone"))
        assert until(lambda: p.seen[0].done)
        fleet.post("decode-0", "/abort_request", {"rid": "gone"}).raise_for_status()
        assert "abort" in answer.result().text
        fleet.await_free(["prefill-0"], within_s=10)


def test_0_6_rid_again_while_the_old_one_is_aborted(shims):
    """A retry does not wait for the end of what it repeats."""
    fleet, _, d = shims
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with fleet.paused("decode-0"):
            first = posted(pool, fleet, "rust-shim", body(rid="same"))
        second = fleet.post("rust-shim", "/generate", body(rid="same"))
        assert ok(first.result())["output_ids"] == ok(second)["output_ids"]
    assert d.seen[0].room != d.seen[1].room


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("router", SHIMMED)
def test_0_7_client_fault(shims, router, wrong):
    """The same 400 from P and D, at once; in a stream a 400 from P (rust) or D's event (mini)."""
    fleet, p, d = shims
    answer = fleet.post(router, "/generate", body(**wrong))
    assert answer.status_code == 400, answer.text
    if answer.json()["error"].get("type") == "Validation error" or not d.seen:
        return  # rust refused it itself
    assert [seen.status for seen in (*p.seen, *d.seen)] == [400, 400]
    # Asked without the router, which may hang up on P before it has read P's answer.
    texts = [fleet.post(n, "/generate", p.seen[0].body).content for n in ("prefill-0", "decode-0")]
    assert texts[0] == texts[1]
    p.seen.clear()
    d.seen.clear()
    streamed = stream(fleet, router, "/generate", body(**wrong))
    assert (p.seen[0].status, d.seen[0].status) == (400, 200)
    if router == "rust-shim":
        assert streamed.status == 400 and "prefill_bad_request" in streamed.raw
    else:
        assert streamed.status == 200 and streamed.frames[0]["error"]["code"] == 400


@pytest.mark.parametrize("router", SHIMMED)
def test_0_7_duplicate_room(shims, router):
    """No router draws one twice; a client at the servers' own doors might. 400, and the first goes on."""
    fleet, p, _ = shims
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with fleet.paused("decode-0"):
            first = posted(pool, fleet, router, body())
            again = [fleet.post(n, "/generate", p.seen[0].body) for n in ("prefill-0", "decode-0")]
        assert [one.status_code for one in again] == [400, 400]
        assert len(ok(first.result())["output_ids"]) == 6


@pytest.mark.parametrize("real", ["p", "d", "both"])
@pytest.mark.parametrize(
    ("router", "streamed"), [("rust-shim", False), ("rust-shim", True), ("mini-shim", True)]
)
def test_3_2_client_leaves_before_headers(shims, router, streamed, real):
    """The router tells P and D. One that hears of it first tells the other, which may so end its answer first.

    So each is real alone, too, beside a worker that takes its request and tells nobody anything.
    """
    fleet, p, d = shims
    silent = {"p": [d], "d": [p], "both": []}[real]
    for shim in silent:
        shim.plan.append(Hangs())
    names = [name for name, shim in (("prefill-0", p), ("decode-0", d)) if shim not in silent]

    def under_way():
        if not (p.seen and d.seen):
            return False
        return bound(fleet) if real == "both" else fleet.state(names[0])["http"]["live"]

    with fleet.paused(*names):
        left_when(fleet, router, body(stream=streamed), under_way)
        ended = until(lambda: all(seen.left or seen.done for seen in (*p.seen, *d.seen)))
        assert until(lambda: not any(fleet.state(n)["http"]["live"] for n in names)), "a half has not stopped"
    told = [(seen.left, seen.done, seen.status, seen.sent) for seen in (*p.seen, *d.seen)]
    assert ended and len(told) == 2, told
    assert any(seen.left for seen in (*p.seen, *d.seen)), told
    for seen in (*p.seen, *d.seen):
        assert seen.left or (real == "both" and b'"type":"abort"' in seen.sent), told
    fleet.await_free(within_s=30)


def test_3_2_mini_tells_nobody_that_a_client_left_before_headers(shims):
    """Without a stream: the request runs to its end on both sides and frees all."""
    fleet, p, d = shims
    with fleet.paused("prefill-0", "decode-0"):
        left_when(fleet, "mini-shim", body(), lambda: p.seen and d.seen and bound(fleet))
        assert not until(lambda: p.seen[0].left or d.seen[0].left, within_s=1.5)
    assert until(lambda: p.seen[0].done and d.seen[0].done)
    fleet.await_free(within_s=30)


@pytest.mark.parametrize("router", SHIMMED)
def test_3_2_client_leaves_mid_stream(shims, router):
    """D learns of it at once (mini) or at its next frame (rust), and stops; P has long ended."""
    fleet, p, d = shims
    left_after_first_frame(fleet, router, LONG)
    assert until(lambda: d.seen[0].left)
    fleet.await_free(within_s=15)
    assert p.seen[0].done or router == "mini-shim"
    assert fleet.state("decode-0")["http"]["abandoned"] >= 1


def test_0_8_p_disconnect_after_d_has_finished_is_no_abort(shims):
    """mini closes P's unread body when D has ended: P has ended by then, too, and nothing is torn down."""
    fleet, p, d = shims
    before = fleet.state("prefill-0")["http"].get("abandoned", 0)
    for _ in range(3):
        assert stream(fleet, "mini-shim", "/generate", body()).frames[-1]["output_ids"]
    assert [seen.done for seen in d.seen] == [True] * 3 and len(p.seen) == 3
    assert fleet.state("prefill-0")["http"].get("abandoned", 0) == before


@pytest.mark.parametrize("router", SHIMMED)
def test_0_9_p_ends_its_stream_first(shims, router):
    """Headers at once on both; P's body ends with its one token while D has not begun: rust's gate is open then."""
    fleet, p, d = shims
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with fleet.paused("decode-0"):
            answer = pool.submit(stream, fleet, router, "/generate", body())
            assert until(lambda: p.seen and p.seen[0].sent.endswith(b"[DONE]\n\n"))
            assert until(lambda: d.seen[0].status == 200) and d.seen[0].sent == b""
        frames = answer.result().frames
    assert p.seen[0].sent.count(b"data: ") == 2 and len(frames) == 6


def test_0_10_failed_stream_of_d(fleet):
    """200, one error event, [DONE]: refused at once and failed later alike, so that no router garbles it (3.3)."""
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": fleet.bootstrap_port, "bootstrap_room": 77_001}
    refused = stream(fleet, "decode-0", "/generate", body(**{**where, "bootstrap_room": -1}))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream, fleet, "decode-0", "/generate", body(**where))
        fleet.await_any("decode-0", "queued")
        for p in ("prefill-0", "prefill-1"):
            assert fleet.post(p, "/generate", body(**where, return_hidden_states=True)).status_code == 400
        failed = waiting.result(20)
    for seen in (refused, failed):
        (event,) = seen.frames
        assert seen.status == 200 and event["error"]["code"] == 400, seen.raw


def test_3_2_both_legs_at_once(fleet):
    """Sixteen through each router, half of them left early: the rest is right and everything is free."""
    expected = ok(fleet.post("plain-0", "/generate", body()))["output_ids"]

    def one(router, leave):
        if leave:
            left_after_first_frame(fleet, router, LONG)
            return expected
        return ok(fleet.post(router, "/generate", body()))["output_ids"]

    calls = [lambda r=r, i=i: one(r, i % 2) for i in range(8) for r in ("rust", "mini")]
    assert at_once(*calls) == [expected] * 16
    fleet.await_free(within_s=20)
