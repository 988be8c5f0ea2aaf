"""facts/router §3.2 and §9 with killed processes and halves that differ, behind both routers: errors in seconds, no leftovers."""

import concurrent.futures
import time

import httpx
import pytest
from router_rows import body, ok, stream
from shims import until
from test_faults import SOON_S, eventually_serves, pair

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROUTERS = ("rust-pair", "mini-pair")
__all__ = ["pair"]


@pytest.fixture(scope="module")
def routed(pair):
    """The pair that may be hurt, behind rust (no retries, no breaker: each try is seen) and mini."""
    plain = ("--disable-retries", "--disable-circuit-breaker")
    pair.add_router("rust-pair", "rust", None, None, *plain)
    pair.add_router("mini-pair", "mini")
    return pair


def end(fleet, name):
    """A clean end, so that another life can take the seat."""
    fleet.child(name).tell(15)
    assert fleet.child(name).join(20)
    fleet.children.remove(fleet.child(name))


def serves_again(fleet, within_s=60.0):
    """Through both routers; rust needs two health checks first."""
    eventually_serves(fleet)
    for router in ROUTERS:
        assert until(lambda r=router: fleet.post(r, "/generate", body()).status_code == 200, within_s), router
    fleet.await_free(within_s=40)


def test_3_2_p_down_and_p_crash(routed):
    """P dies under a request that waits for it; then it is down. D's stream ends with an event, nobody waits for a timer."""
    expected = eventually_serves(routed)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        routed.post("prefill-0", "/pause_generation", {"mode": "in_place"}).raise_for_status()
        waiting = [pool.submit(routed.post, router, "/generate", body()) for router in ROUTERS]
        assert until(lambda: routed.state("decode-0")["queued"] == 2)
        began = time.monotonic()
        routed.kill("prefill-0")
        codes = [one.result().status_code for one in waiting]
    # The routers see P's connection break, or D, which sees it too, is faster: its 503 says peer_lost.
    assert codes[0] in (502, 503) and codes[1] in (500, 503), codes
    down = [routed.post(router, "/generate", body()) for router in ROUTERS]
    assert [one.status_code for one in down][1] == 500 and down[0].status_code in (502, 503), down
    streamed = stream(routed, "mini-pair", "/generate", body())
    assert "[DONE]" not in streamed.raw
    assert time.monotonic() - began < 3 * SOON_S
    routed.await_free(["decode-0"], within_s=20)
    routed.restart("prefill-0")
    serves_again(routed)
    assert eventually_serves(routed) == expected


def test_3_2_d_down_and_d_crash(routed):
    """D dies in the middle of a stream: the client's is cut. P's half is free after its lease, and serves the next D."""
    for router in ROUTERS:
        broken = _cut_by(routed, router, lambda: routed.kill("decode-0"))
        assert broken, f"{router}: the stream looked whole"
        down = routed.post(router, "/generate", body())
        assert down.status_code in (500, 502, 503), down.text
        assert routed.http.get(f"{routed.url('prefill-0')}/health").status_code == 200
        routed.restart("decode-0")
        serves_again(routed)


def _cut_by(fleet, router, hurt):
    long = body(n_out=400)
    raw = b""
    with fleet.http.stream("POST", f"{fleet.url(router)}/generate", json={**long, "stream": True}) as answer:
        try:
            for i, chunk in enumerate(answer.iter_raw()):
                raw += chunk
                if i == 1:
                    hurt()
        except httpx.HTTPError:
            return True
    return b"[DONE]" not in raw


def test_0_7_limits_that_differ(routed):
    """D's context is the shorter one: a 400 from both, whichever half refuses, and no timer runs out."""
    command = list(routed.commands["decode-0"])
    command[command.index("--context-length") + 1] = "128"
    end(routed, "decode-0")
    routed.restart("decode-0", command)
    assert until(lambda: routed.http.get(f"{routed.url('decode-0')}/readiness").status_code == 200)
    serves_again(routed)
    long = body(list(range(3, 203)))
    for router in ROUTERS:
        began = time.monotonic()
        answer = routed.post(router, "/generate", long)
        assert answer.status_code == 400 and "context" in answer.text, (router, answer.text)
        assert time.monotonic() - began < 5
        routed.await_free(within_s=5)
    end(routed, "decode-0")
    routed.restart("decode-0")
    end(routed, "prefill-0")
    command = list(routed.commands["prefill-0"])
    command[command.index("--context-length") + 1] = "128"
    routed.restart("prefill-0", command)
    serves_again(routed)
    for router in ROUTERS:
        began = time.monotonic()
        assert routed.post(router, "/generate", long).status_code == 400, router
        assert time.monotonic() - began < 5, "D waits for a P that has refused"
        routed.await_free(within_s=5)
    end(routed, "prefill-0")
    routed.restart("prefill-0")
    serves_again(routed)


def test_9_failure_injection(routed):
    """One request in twenty loses its P half: those answers fail, every other one is right, both servers live."""
    expected = ok(routed.post("mini-pair", "/generate", body()))["output_ids"]
    n, lost = 60, range(0, 60, 20)
    for router in ROUTERS:
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            with routed.paused("prefill-0"):
                requests = [body(rid=f"{router}-{i}") for i in range(n)]
                answers = [pool.submit(routed.post, router, "/generate", one) for one in requests]
                assert until(lambda: routed.state("prefill-0")["http"]["live"] == n)
                for i in lost:
                    aborted = routed.post("prefill-0", "/abort_request", {"rid": f"{router}-{i}"})
                    assert ok(aborted) == {"aborted": 1}
            got = [answer.result() for answer in answers]
        for i, answer in enumerate(got):
            if i in lost:
                assert ok(answer)["meta_info"]["finish_reason"]["type"] == "abort"
            else:
                assert ok(answer)["output_ids"] == expected
        for name in ("prefill-0", "decode-0"):
            assert routed.http.get(f"{routed.url(name)}/health_generate").status_code == 200
        routed.await_free(within_s=20)
