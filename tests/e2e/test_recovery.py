"""Processes that come back: used again within one heartbeat, listed again after a long stop, and no other request lost."""

import concurrent.futures
import itertools
import signal
import time

import httpx
import pytest
from fleets import WAIT_S, Deployment
from shims import until
from test_drain import has_ended, listed
from test_faults import TIMERS, TINY, body, eventually_serves

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

HEARTBEAT_S = 1.0  # as TIMERS say
LATE_S = 9.0  # what a loaded machine adds: several requests, and a process that has only just started
# Beyond both: whoever waited for a lease or for a bootstrap timeout would come too late.
LONG = ["--disaggregation-lease", "12", "--disaggregation-bootstrap-timeout", "14"]
PAIRS = [(p, d) for p in ("prefill-0", "prefill-1") for d in ("decode-0", "decode-1")]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with Deployment(
        tmp_path_factory.mktemp("recovery"), "tiny", *TINY, *TIMERS, *LONG, prefill=2, decode=2
    ) as deployment:
        deployment.start()
        eventually_serves(deployment)
        yield deployment
        deployment.await_free()
        deployment.check_logs()


def through(fleet, pair, n_out=24):
    """The tokens of one request through a pair; None when a half failed or its connection broke."""
    request = body(fleet, n_out)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        p = pool.submit(fleet.post, pair[0], "/generate", request)
        try:
            d = fleet.post(pair[1], "/generate", request)
            good = (p.result().status_code, d.status_code) == (200, 200)
        except httpx.HTTPError:
            return None
    return d.json()["output_ids"] if good else None


def serves_within(fleet, pair, within_s):
    began = time.monotonic()
    assert until(lambda: through(fleet, pair) is not None, WAIT_S), pair
    assert time.monotonic() - began < within_s, pair


def test_an_evicted_instance_that_goes_on_lists_itself_again_and_is_used(four):
    """Stopped for longer than the TTL: P and D at once."""
    stopped = {"prefill-1": "prefill", "decode-1": "decode"}
    for name in stopped:
        four.child(name).tell(signal.SIGSTOP)
    try:
        for name, role in stopped.items():
            assert until(lambda n=name, r=role: n not in listed(four, r)), f"{name} is still listed"
        assert through(four, ("prefill-0", "decode-0")) is not None, "the others serve meanwhile"
    finally:
        for name in stopped:
            four.child(name).tell(signal.SIGCONT)
    began = time.monotonic()
    for name, role in stopped.items():
        assert until(lambda n=name, r=role: n in listed(four, r)), f"{name} is not listed again"
    assert time.monotonic() - began < HEARTBEAT_S + LATE_S
    for pair in PAIRS:
        serves_within(four, pair, HEARTBEAT_S + LATE_S)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_restart_under_load_loses_only_its_own_requests(four, name):
    """Killed in the middle of it and started again on the same address; used again within one heartbeat."""
    expected = through(four, PAIRS[0])
    pairs = itertools.cycle(PAIRS)
    outcomes: list[tuple[tuple[str, str], list[int] | None]] = []
    stop = False

    def client():
        while not stop:
            pair = next(pairs)
            outcomes.append((pair, through(four, pair)))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client) for _ in range(8)]
        try:
            assert until(lambda: len(outcomes) >= 16, WAIT_S)
            four.kill(name)
            assert until(lambda: sum(name in pair and got is None for pair, got in outcomes) >= 2, WAIT_S)
            four.restart(name)
            n_before = len(outcomes)
            for pair in PAIRS:
                if name in pair:
                    serves_within(four, pair, HEARTBEAT_S + LATE_S)
            assert until(lambda: len(outcomes) >= n_before + 16, WAIT_S)
        finally:
            stop = True
        for one in clients:
            one.result()
    lost = [pair for pair, got in outcomes if got is None]
    assert lost and all(name in pair for pair in lost), f"others than those of {name} were lost: {lost}"
    assert all(got == expected for _, got in outcomes if got is not None)
    four.await_free(within_s=40)


def test_a_request_whose_p_is_killed_is_computed_by_its_d(four):
    """--disaggregation-on-failure recompute: the same tokens, not an error, and nothing is left of it."""
    pair = ("prefill-1", "decode-1")
    expected = through(four, pair)
    four.child("decode-1").tell(signal.SIGTERM)
    has_ended(four, "decode-1")
    four.restart("decode-1", [*four.commands["decode-1"], "--disaggregation-on-failure", "recompute"])
    serves_within(four, pair, HEARTBEAT_S + LATE_S)
    request = body(four, len(expected))
    room = request["bootstrap_room"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        four.post("prefill-1", "/pause_generation", {"mode": "in_place"}).raise_for_status()
        broken = pool.submit(four.post, "prefill-1", "/generate", request)
        waiting = pool.submit(four.post, "decode-1", "/generate", request)
        shown = f"{four.url('decode-1')}/debug/rooms?room={room}"
        assert until(lambda: [r["peer"] for r in four.http.get(shown).json()["rooms"]] == ["prefill-1"])
        four.kill("prefill-1")
        with pytest.raises(httpx.HTTPError):
            broken.result()
        answer = waiting.result()
    assert answer.status_code == 200 and answer.json()["output_ids"] == expected, answer.text
    assert four.state("decode-1")["recomputed"] == 1
    four.await_free(["decode-1"])
    four.restart("prefill-1")
    serves_within(four, pair, HEARTBEAT_S + LATE_S)
