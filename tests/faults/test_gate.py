"""The gate of a process under test: nothing begins while somebody acts, and the thread that waits still does what it is asked."""

from __future__ import annotations

import threading

import pytest

from pdjax.faults import gate as gate_module
from pdjax.faults.gate import Gate

BOUND_S = 30.0


@pytest.fixture
def at_gate():
    """(gate, start): start(role) lets a thread come to the gate; the event is set when it has passed."""
    gate, threads = Gate(), []

    def start(role: str) -> threading.Event:
        passed = threading.Event()

        def come() -> None:
            gate.enter(role)
            passed.set()

        threads.append(threading.Thread(target=come))
        threads[-1].start()
        return passed

    yield gate, start
    gate.release_all()
    for thread in threads:
        thread.join(BOUND_S)


def test_an_open_gate_lets_everybody_pass(at_gate):
    _, start = at_gate
    assert start("driver").wait(BOUND_S) and start("scheduler").wait(BOUND_S)


def test_nobody_passes_before_every_hold_is_over(at_gate):
    gate, start = at_gate
    gate.hold(1)
    gate.hold(2)
    passed = start("driver")
    gate.release(1)
    assert not passed.wait(0.1)
    gate.release(2)
    assert passed.wait(BOUND_S)


def test_a_thread_at_the_gate_does_its_own_calls_and_no_other_ones(at_gate):
    gate, start = at_gate
    gate.hold(1)
    passed = start("driver")
    assert gate.call("driver", threading.get_ident).result(BOUND_S) != threading.get_ident()
    other = gate.call("scheduler", lambda: None)
    assert not passed.wait(0.1) and not other.done()


def test_a_call_that_raises_is_the_callers_loss_only(at_gate):
    gate, start = at_gate
    failed = gate.call("driver", lambda: 1 // 0)
    assert start("driver").wait(BOUND_S)
    with pytest.raises(ZeroDivisionError):
        failed.result(0)


def test_a_hold_that_nobody_ends_is_over_after_its_limit_and_counted(at_gate, monkeypatch):
    monkeypatch.setattr(gate_module, "HOLD_LIMIT_S", 0.05)
    gate, start = at_gate
    gate.hold(1)
    assert start("driver").wait(BOUND_S)
    assert gate.expired == 1
