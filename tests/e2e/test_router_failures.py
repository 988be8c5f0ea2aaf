"""facts/router §3.2 to §3.4: what each router makes of answers that fail, late, or never come.

Where the row is about the router alone both workers are canned; these tests pin what the servers' own rules rest on.
"""

import json

import pytest
from router_rows import body, ok, stream
from shims import Hangs, Says, Streams, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REQUEST = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
REFUSED = {"error": {"message": "worker says no"}}
OK = Says()


def canned(shims, p, d, router="rust-shim", streamed=False, request=REQUEST):
    """The client's answer, and how many tries P and D saw."""
    fleet, shim_p, shim_d = shims
    shim_p.reset()
    shim_d.reset()
    shim_p.always, shim_d.always = p, d
    if streamed:
        got = stream(fleet, router, "/generate", request)
        return got.status, got.raw, len(shim_p.seen), len(shim_d.seen)
    got = fleet.post(router, "/generate", request)
    return got.status_code, got.text, len(shim_p.seen), len(shim_d.seen)


@pytest.mark.parametrize("status", [400, 404])
def test_3_2_p_400_d_ok(shims, status):
    no = Says(status, REFUSED)
    for streamed, d in ((False, OK), (True, Streams())):
        seen = canned(shims, no, d, streamed=streamed)
        assert seen[0] == status and seen[2:] == (1, 1), seen
        assert "Prefill server error" in seen[1] and "worker says no" in seen[1]
        # mini never looks at P's status: D must be right on its own.
        assert canned(shims, no, d, "mini-shim", streamed)[0] == 200


@pytest.mark.parametrize(("status", "shown"), [(422, 500), (429, 500), (500, 500), (503, 503)])
def test_3_2_p_500_d_ok(shims, status, shown):
    no = Says(status, REFUSED)
    seen = canned(shims, no, OK)
    assert seen[0] == (status if (status, seen[0]) == (429, 429) else shown) and seen[2:] == (5, 5), seen
    assert len({one.room for one in shims[1].seen}) == 5
    assert canned(shims, no, Streams(), streamed=True)[2] == 5
    assert canned(shims, no, OK, "mini-shim")[0] == 200
    # With the key of log-probabilities mini reads P's body, and falls over it.
    assert canned(shims, no, OK, "mini-shim", request={**REQUEST, "return_logprob": False})[0] == 500


def test_3_2_p_ok_d_400(shims):
    no = Says(400, REFUSED)
    seen = canned(shims, OK, no)
    assert seen[0] == 400 and seen[2:] == (1, 1)
    assert "decode_bad_request" in seen[1] and "worker says no" in seen[1]
    status, text, *_ = canned(shims, OK, no, "mini-shim")
    assert (status, json.loads(text)) == (400, REFUSED)
    streamed = canned(shims, Streams(), no, "mini-shim", streamed=True)
    assert streamed[0] == 200 and "data:" not in streamed[1], streamed


def test_3_3_stream_error_of_d_is_garbage(shims):
    """Why D answers a failed stream as 200 with an event: rust rewrites the body and keeps its old length."""
    status, text, *_ = canned(shims, Streams(), Says(400, REFUSED), streamed=True)
    assert status == 400 and text.startswith("data: {'error'"), text
    assert len(text) <= len('{"error": {"message": "worker says no"}}') and "says no" not in text


@pytest.mark.parametrize(("status", "shown", "tries"), [(422, 500, 5), (429, 500, 5)])
def test_3_2_p_ok_d_422(shims, status, shown, tries):
    seen = canned(shims, OK, Says(status, REFUSED))
    assert seen[0] in (shown, status) and seen[2:] == (tries, tries), seen
    assert canned(shims, OK, Says(status, REFUSED), "mini-shim")[0] == status
    assert canned(shims, Streams(), Says(status, REFUSED), streamed=True)[0] == status


@pytest.mark.parametrize("status", [500, 503])
def test_3_2_p_ok_d_500(shims, status):
    no = Says(status, REFUSED)
    assert canned(shims, OK, no)[::2] == (status, 5), "P prefilled five times"
    seen = canned(shims, OK, no, "mini-shim")
    assert (seen[0], *seen[2:]) == (status, 1, 1)
    assert canned(shims, Streams(), no, "mini-shim", streamed=True)[0] == 200


@pytest.mark.parametrize("side", ["p", "d"])
def test_3_2_fails_once(shims, side):
    """rust tries again in a new room and gets the right tokens; mini has one try, and does not see P's failure at all."""
    fleet, p, d = shims
    expected = ok(fleet.post("plain-0", "/generate", body()))["output_ids"]
    shim = p if side == "p" else d
    shim.plan.append(Says(500, REFUSED, after=True))
    assert ok(fleet.post("rust-shim", "/generate", body()))["output_ids"] == expected
    assert len({one.room for one in d.seen}) == len(d.seen) == len(p.seen) == 2
    shim.plan.append(Says(500, REFUSED, after=True))
    answer = fleet.post("mini-shim", "/generate", body())
    assert (answer.status_code, len(d.seen)) == (200 if side == "p" else 500, 3)


def test_0_6_retry_with_the_same_rid(shims):
    """New room, same rid, same x-request-id: accepted each time, also streaming, and the answer is the plain server's."""
    fleet, p, d = shims
    expected = ok(fleet.post("plain-0", "/generate", body()))["output_ids"]
    d.plan += [Says(503, REFUSED, after=True)] * 2
    answer = fleet.post("rust-shim", "/generate", body(rid="mine"), headers={"x-request-id": "x1"})
    assert ok(answer)["output_ids"] == expected and answer.json()["meta_info"]["id"] == "mine"
    for shim in (p, d):
        assert len({seen.room for seen in shim.seen}) == len(shim.seen) == 3
        assert {(seen.body["rid"], seen.headers["x-request-id"]) for seen in shim.seen} == {("mine", "x1")}


def test_3_4_verdicts_and_disabling(shims):
    """Five tries in all, unless they are disabled; a 400 is never tried again."""
    for status, tries in ((400, 1), (404, 1), (429, 5), (500, 5), (503, 5)):
        assert canned(shims, OK, Says(status, REFUSED))[3] == tries, status
        assert canned(shims, OK, Says(status, REFUSED), "rust-hasty")[3] == 1, status


def test_3_2_p_slow_d_500_once(shims):
    """rust waits for both legs before it acts; in a stream it acts on D's at once."""
    fleet, p, d = shims
    p.always, d.always = Says(wait_s=0.5), OK
    d.plan.append(Says(500, REFUSED))
    assert fleet.post("rust-shim", "/generate", REQUEST).status_code == 200
    assert [bool(seen.sent) for seen in p.seen] == [True, True], "P's answer was awaited both times"
    p.reset()
    d.reset()
    p.always, d.always = Streams(3, 0.5), Streams()
    d.plan.append(Says(500, REFUSED))
    assert stream(fleet, "rust-shim", "/generate", REQUEST).status == 200
    assert until(lambda: p.seen[0].left), "P's first stream was dropped"


@pytest.mark.parametrize("side", ["p", "d"])
def test_3_2_hang(shims, side):
    """The router's own limit ends it, with an error that names no cause: our timers must be shorter."""
    p, d = (Hangs(), OK) if side == "p" else (OK, Hangs())
    status, _, *tries = canned(shims, p, d, "rust-hasty")
    assert (status, tries) == (502, [1, 1])
    assert canned(shims, p, d, "mini-hasty")[0] == 500
    seen = canned(shims, p if side == "p" else Streams(), d if side == "d" else Streams(), "mini-hasty", True)
    assert seen[0] in (0, 200) and seen[1] == ""  # closed, with headers or without, and never an event


def test_3_2_p_4xx_while_d_waits(shims):
    """rust waits for D before it tells of P's 400 (its own limit ends the wait); mini waits for D alone."""
    no = Says(400, REFUSED)
    assert canned(shims, no, Hangs(), "rust-hasty")[0] in (400, 502)
    shim_d = shims[2]
    assert until(lambda: shim_d.seen[0].left)
    assert canned(shims, no, Hangs(), "mini-hasty")[0] == 500


def test_3_2_stream_longer_than_timeout(shims):
    """The limit counts the whole stream: it is cut without an event."""
    fleet, p, d = shims
    for router in ("rust-hasty", "mini-hasty"):
        p.always, d.always = Streams(1), Streams(100, 0.2)
        cut = stream(fleet, router, "/generate", REQUEST)
        assert cut.status == 200 and "[DONE]" not in cut.raw, router
        assert 1 < len(cut.lines) < 100 and "error" not in cut.raw, router


def test_3_2_p_still_sending(shims):
    """rust gives the client nothing until P's body has ended; mini never reads it, and drops it when D has ended."""
    fleet, p, d = shims
    p.always, d.always = Streams(2, 1.0), Streams()
    for router in ("rust-shim", "mini-shim"):
        p.seen.clear()
        with fleet.http.stream(
            "POST", f"{fleet.url(router)}/generate", json={**REQUEST, "stream": True}
        ) as got:
            chunks = got.iter_raw()
            first = next(chunks)
            assert p.seen[0].done is (router == "rust-shim"), router
            assert b"[DONE]" in first + b"".join(chunks)
        assert until(lambda: p.seen[0].done or p.seen[0].left)
        assert p.seen[0].left is (router == "mini-shim"), router


def test_3_4_breaker(fleet, shims):
    """Ten failed tries open it for both sides; a 400 never counts. A router of its own, ended with its breaker open."""
    _, p, d = shims
    fleet.add_router("rust-breaker", "rust", ["shim-p"], ["shim-d"])
    try:
        p.always, d.always = OK, Says(400, REFUSED)
        for _ in range(12):
            assert fleet.post("rust-breaker", "/generate", REQUEST).status_code == 400
        d.always = Says(500, REFUSED)
        codes = [fleet.post("rust-breaker", "/generate", REQUEST) for _ in range(3)]
        assert [one.status_code for one in codes] == [500, 500, 503], [one.text for one in codes]
        assert "circuits open" in codes[-1].text or "No available" in codes[-1].text
        assert fleet.http.get(f"{fleet.url('rust-breaker')}/readiness").status_code == 200
    finally:
        fleet.drop("rust-breaker")
