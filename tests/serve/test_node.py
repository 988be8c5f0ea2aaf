"""One node's own numbers, on the tiny model and without its threads."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest

from pdjax.core.errors import PDError
from pdjax.sched.request import Request, SamplingParams
from pdjax.serve import node as node_module
from pdjax.serve.args import ServeArgs
from pdjax.serve.loading import load
from pdjax.serve.node import Node


@pytest.fixture(scope="module")
def node():
    args = ServeArgs("tiny", num_pages=32, context_length=64, chunked_prefill_size=16)
    return Node(args, load(args), "http://127.0.0.1:1")


def test_a_waiting_request_is_counted_once(node):
    """Routers balance by get_load: a request is in the inbox or in a queue, and one either way."""
    for i in range(3):
        node.submit(Request(f"r{i}", [5, 6], SamplingParams(max_new_tokens=2), sink=lambda output: None))
    assert node.info()["num_waiting"] == 3, "in the inbox"
    node.scheduler._drain_inbox()
    assert node.info()["num_waiting"] == 3, "in the queue"
    refused = node.flush_cache(0.0)
    node.scheduler._drain_inbox()
    node.scheduler._answer_flushes()
    assert refused.result(0) is False
    for i in range(3):
        node.abort(f"r{i}")
    node.scheduler._drain_inbox()
    assert node.info()["num_waiting"] == 0
    flushed = node.flush_cache(0.0)
    assert not flushed.cancel(), "the scheduler could not answer it any more"
    node.scheduler._drain_inbox()
    node.scheduler._answer_flushes()
    assert flushed.result(0) is True


def test_no_wait_of_a_client_is_too_long_for_the_loop(node, monkeypatch):
    """A thread cannot wait for 1e300 s: asked to, it raises, and the server would end."""
    waits = []

    def wait(timeout_s):
        waits.append(timeout_s)
        assert timeout_s < threading.TIMEOUT_MAX
        node._stopping.set()

    node.submit(Request("held", [5, 6], SamplingParams(max_new_tokens=2), sink=lambda output: None))
    node.scheduler.pause(True, lambda: None)
    flushed = node.flush_cache(1e300)
    monkeypatch.setattr(node, "_warm_up", lambda: None)
    monkeypatch.setattr(node._wake, "wait", wait)
    node._run_scheduler()
    assert node.failed() is None and len(waits) == 1 and not flushed.done()
    node._stopping.clear()  # for the other tests on it
    node.scheduler.pause(False, lambda: None)
    node.abort("held")
    node.scheduler.host_work()
    assert flushed.result(0) is True


def test_a_draining_node_takes_nothing_new_and_knows_what_is_left(node):
    def request(rid):
        return Request(rid, [5, 6], SamplingParams(max_new_tokens=2), sink=lambda output: None)

    node.submit(request("before"))
    node.drain()
    assert node.unfinished() == 1 and not node.has_last_words()
    with pytest.raises(PDError) as refused:
        node.submit(request("after"))
    assert (refused.value.reason, refused.value.status) == ("draining", 503)
    node.end_all()
    node.scheduler.host_work()
    assert node.unfinished() == 0
    node.draining = False  # for the other tests on it


def test_a_drain_ends_a_pause_whether_or_not_the_scheduler_has_heard_of_it(node):
    node.scheduler.host_work()
    assert not node.end_pause() and not node.scheduler.paused
    for heard in (False, True):
        paused = node.pause(True)
        if heard:
            node.scheduler.host_work()
        assert paused.done() is heard
        assert node.end_pause() and not node.end_pause()
        node.scheduler.host_work()
        assert not node.scheduler.paused and paused.done()
    node.pause(True)
    node.pause(False)
    assert not node.end_pause(), "somebody has ended it before"
    node.scheduler.host_work()


def test_a_node_is_quiet_since_the_drain_began_or_the_last_request(node, monkeypatch):
    times = iter([100.0, 101.0, 107.0, 109.0])
    # Of this module alone: the event loops of other servers in this process read the same clock.
    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    node.drain()
    assert node.quiet_s() == 1.0
    with pytest.raises(PDError):
        node.submit(Request("late", [5, 6], SamplingParams(max_new_tokens=2), sink=lambda output: None))
    assert node.quiet_s() == 2.0
    node.draining = False  # for the other tests on it


@pytest.mark.parametrize("ask", [lambda node: node.abort("mine"), lambda node: node.abort_all()])
def test_an_abort_counts_the_rooms_that_it_ends_however_fast_the_scheduler_is(node, monkeypatch, ask):
    """A P's room lives on behind its answer: the answer to /abort_request says so each time, or never means anything."""
    rooms = {7: "Transferring"}
    monkeypatch.setattr(node, "manager", SimpleNamespace(live_rooms=lambda rid: dict(rooms)))
    for name in ("abort", "abort_all"):
        monkeypatch.setattr(node.scheduler, name, lambda *rid: rooms.clear())
    assert ask(node) == 1 and not rooms


def test_a_node_whose_scheduler_has_died_still_says_what_is_left_and_what_its_driver_has_to_say(
    node, monkeypatch
):
    """It is about to end: what it cuts off is counted, and the peers are told as long as the driver lives."""
    node.submit(Request("left", [5, 6], SamplingParams(max_new_tokens=2), sink=lambda output: None))
    monkeypatch.setattr(node, "_dead", "the scheduler thread has died")
    assert node.unfinished() == 1
    held = {"notices": 1, "pending_effects": 0}
    for alive in (True, False):
        driver = SimpleNamespace(alive=lambda alive=alive: alive, quiescent=lambda: held)
        monkeypatch.setattr(node, "manager", driver)
        assert node.has_last_words() is alive
    monkeypatch.setattr(node, "manager", None)
    node.abort("left")
    node.scheduler.host_work()


def test_a_registry_client_that_died_is_a_failure_of_the_node(node, monkeypatch):
    """Its entry runs out and nobody sends it anything any more: alive it would only look well."""
    monkeypatch.setattr(node, "registry", SimpleNamespace(failed=lambda: "the heartbeats have died"))
    assert node.failed() == "the heartbeats have died"
    monkeypatch.setattr(node, "registry", SimpleNamespace(failed=lambda: None))
    assert node.failed() is None


@pytest.mark.parametrize(
    ("host", "role", "compatible", "reachable", "ready"),
    [
        ("", "decode", None, None, True),
        ("h", "decode", 0, None, False),
        ("h", "decode", 1, None, False),
        ("h", "decode", 1, True, True),
        ("h", "prefill", 0, None, False),
        ("h", "prefill", 1, None, True),
    ],
)
def test_ready_means_a_peer_where_a_registry_could_know_one(
    node, monkeypatch, host, role, compatible, reachable, ready
):
    """A D without one learns from each request which registry knows its P."""
    member = SimpleNamespace(compatible=compatible, reachable=reachable)
    monkeypatch.setattr(node, "registry", SimpleNamespace(membership=member))
    monkeypatch.setattr(node, "args", dataclasses.replace(node.args, bootstrap_host=host))
    monkeypatch.setattr(node, "role", role)
    monkeypatch.setattr(node, "draining", False)
    monkeypatch.setattr(node, "_dead", None)
    monkeypatch.setattr(node, "_loaded", SimpleNamespace(is_set=lambda: True))
    assert node.ready() is ready
