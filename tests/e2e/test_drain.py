"""Servers that are asked to end: they take nothing new, finish what they have, tell their peers, and end with code 0."""

import concurrent.futures
import signal
import time

import pytest
from fleets import REGISTRY_KEY, WAIT_S, Deployment
from shims import until
from test_faults import SOON_S, TIMERS, TINY, body, both, eventually_serves

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def leaving(tmp_path_factory):
    with Deployment(
        tmp_path_factory.mktemp("drain"), "tiny", *TINY, *TIMERS, prefill=1, decode=1
    ) as deployment:
        deployment.start()
        yield deployment
        deployment.await_free([child.name for child in deployment.children if child.name in NODES])
        deployment.check_logs()


NODES = ("prefill-0", "decode-0")
ROLES = ("prefill", "decode")
N_LEGS = 25
SOON = ("--drain-timeout", "0.5")
GATED = ("--disaggregation-prefill-gate", "gated")


def pair_up(fleet, *, p=(), d=()):
    """Both serve with these options: who has ended in the test before, or has others, is started again."""
    given = fleet.__dict__.setdefault("given", dict.fromkeys(NODES, ()))
    for name, options in zip(NODES, (p, d), strict=True):
        alive = any(child.name == name for child in fleet.children)
        if alive and given[name] != options:
            fleet.child(name).tell(signal.SIGTERM)
            has_ended(fleet, name)
            alive = False
        if not alive:
            fleet.restart(name, [*fleet.commands[name], *options])
        given[name] = options
    eventually_serves(fleet)


def readiness(fleet, name):
    return fleet.http.get(f"{fleet.url(name)}/readiness").json()["status"]


def listed(fleet, role):
    url = f"{fleet.addresses['bootstrap']}/list?role={role}"
    found = fleet.http.get(url, headers=REGISTRY_KEY).json()["instances"]
    return [one["instance_id"] for one in found]


def has_ended(fleet, name, within_s=WAIT_S):
    """It ends with code 0 by itself; then another life may take its seat."""
    child = fleet.child(name)
    assert child.join(within_s), f"{name} has not ended after {within_s} s"
    assert child.process.returncode == 0
    fleet.children.remove(child)


def in_the_middle_of_a_stream(fleet, pool, n_out=300):
    """A request that D decodes."""
    long = body(fleet, n_out)
    decoding = pool.submit(fleet.post, "decode-0", "/generate", long)
    assert fleet.post("prefill-0", "/generate", long).status_code == 200
    fleet.await_any("decode-0", "running", unless=decoding.done)
    return decoding


def test_a_draining_d_finishes_what_it_decodes_and_refuses_the_rest(leaving):
    pair_up(leaving)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        decoding = in_the_middle_of_a_stream(leaving, pool)
        half = body(leaving, 4)  # holds D until P has the other one
        held = half_at_d(leaving, pool, half)
        leaving.child("decode-0").tell(signal.SIGTERM)
        assert until(lambda: readiness(leaving, "decode-0") == "draining")
        assert until(lambda: listed(leaving, "decode") == [])
        assert leaving.http.get(f"{leaving.url('decode-0')}/health").status_code == 200
        p, d = both(leaving, body(leaving, 3))
        assert d.status_code == 503 and d.json()["error"]["reason"] == "draining", d.text
        assert p.status_code in (200, 503), p.text  # it may be prefilled by then
        leaving.await_free(["prefill-0"], within_s=5)  # D has told it: the lease takes longer
        assert until(lambda: readiness(leaving, "prefill-0") == "not ready")
        assert leaving.post("prefill-0", "/generate", half).status_code == 200
        answers = decoding.result(), held.result()
    assert [(a.status_code, len(a.json()["output_ids"])) for a in answers] == [(200, 300), (200, 4)]
    has_ended(leaving, "decode-0")
    leaving.await_free(["prefill-0"])


def half_at_d(fleet, pool, request):
    """D's leg, which waits there for P's."""
    waiting = pool.submit(fleet.post, "decode-0", "/generate", request)
    assert until(lambda: fleet.state("decode-0")["bootstrapping"] == 1)
    return waiting


def test_a_draining_p_keeps_its_kv_until_it_is_pulled(leaving):
    """Asked over HTTP; a D whose half comes later still finds it."""
    pair_up(leaving, d=SOON)
    request = body(leaving, 4)
    assert leaving.post("prefill-0", "/generate", request).status_code == 200
    assert leaving.post("prefill-0", "/drain", {}).json()["draining"] is True
    assert until(lambda: readiness(leaving, "prefill-0") == "draining" and listed(leaving, "prefill") == [])
    assert leaving.post("prefill-0", "/drain", {}).status_code == 200, "asking again changes nothing"
    answer = leaving.post("decode-0", "/generate", request)
    assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 4, answer.text
    has_ended(leaving, "prefill-0")


def test_a_gated_p_computes_nothing_for_a_d_that_is_not_there(leaving):
    pair_up(leaving, p=GATED, d=SOON)
    request = body(leaving, 4)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = leaving.state("prefill-0")["prefill_tokens"]
        waiting = pool.submit(leaving.post, "prefill-0", "/generate", request)
        assert until(lambda: leaving.state("prefill-0")["gate"] == 1)
        shown = leaving.http.get(f"{leaving.url('prefill-0')}/debug/rooms").json()["rooms"]
        assert "a D has said hello" in shown[0]["says"], shown
        assert leaving.state("prefill-0")["prefill_tokens"] == before
        assert leaving.post("decode-0", "/generate", request).status_code == 200
        assert waiting.result().status_code == 200


def test_legs_that_come_before_and_after_the_signal_are_answered_and_their_other_halves_are_told(leaving):
    """P is idle between them; every leg of it has an answer, and no D waits for a P that is gone."""
    pair_up(leaving, p=("--drain-linger", "2"), d=SOON)
    with concurrent.futures.ThreadPoolExecutor(2 * N_LEGS) as pool:
        began, legs = time.monotonic(), []
        for i in range(N_LEGS):
            until(lambda i=i: time.monotonic() - began >= 0.02 * i)
            if i == N_LEGS // 5:
                leaving.child("prefill-0").tell(signal.SIGTERM)
            request = body(leaving, 3)
            legs.append([pool.submit(leaving.post, f"{role}-0", "/generate", request) for role in ROLES])
        answers = [[half.result() for half in pair] for pair in legs]
        assert time.monotonic() - began < SOON_S
    seen = {tuple(half.json().get("error", {}).get("reason", 200) for half in pair) for pair in answers}
    assert seen <= {(200, 200), ("draining", "peer_failed")} and ("draining", "peer_failed") in seen, seen
    has_ended(leaving, "prefill-0")
    leaving.await_free(["decode-0"])


def test_a_drain_ends_a_pause(leaving):
    pair_up(leaving, d=SOON)
    said = len(leaving.output)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        leaving.post("prefill-0", "/pause_generation", {"mode": "in_place"}).raise_for_status()
        request = body(leaving, 4)
        waiting = pool.submit(leaving.post, "prefill-0", "/generate", request)
        # It may have its pages already: a pause launches no step, and that is all.
        assert until(lambda: sum(leaving.state("prefill-0")[q] for q in ("num_waiting", "num_running")) == 1)
        leaving.child("prefill-0").tell(signal.SIGTERM)
        assert waiting.result().status_code == 200
        assert leaving.post("decode-0", "/generate", request).status_code == 200
    has_ended(leaving, "prefill-0")
    assert any("pause_ended" in line for line in leaving.output[said:])


@pytest.mark.parametrize("how", ["its bound", "a second signal"])
def test_what_does_not_end_by_itself_is_ended(leaving, how):
    """The client is answered, the peer is told, and the code is 0 all the same."""
    pair_up(leaving, p=GATED, d=SOON if how == "its bound" else ())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        decoding = in_the_middle_of_a_stream(leaving, pool, 470)
        leaving.post("decode-0", "/pause_generation", {"mode": "in_place"}).raise_for_status()
        landing = body(leaving, 4)  # P has no leg of it
        waiting = half_at_d(leaving, pool, {**landing, "rid": "never"})
        leaving.child("decode-0").tell(signal.SIGTERM)
        assert until(lambda: readiness(leaving, "decode-0") == "draining")
        leaving.post("decode-0", "/pause_generation", {"mode": "in_place"})  # the drain has ended that one
        if how == "a second signal":
            assert leaving.child("decode-0").alive
            leaving.child("decode-0").tell(signal.SIGTERM)
        has_ended(leaving, "decode-0", SOON_S)
        assert decoding.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        refused = waiting.result()
        assert refused.status_code == 503 and refused.json()["error"]["reason"] == "draining", refused.text
    began = time.monotonic()
    late = leaving.post("prefill-0", "/generate", landing)
    assert late.status_code == 503 and time.monotonic() - began < SOON_S, "P was told before its leg came"
