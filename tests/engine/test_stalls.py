"""A process that was stopped reads what came meanwhile before its timers look at the time (protocol §7)."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from pdjax.core.settings import PDSettings
from pdjax.engine.jax_transfer import stalls
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.jax_transfer.stalls import SETTLE_S, STALLED_S, Stalls
from pdjax.engine.ports import FrameIn

BOUND_S = 20.0


@pytest.fixture
def pair():
    settings = PDSettings()
    p, d = ZmqSideChannel.bind("127.0.0.1", settings=settings), ZmqSideChannel.dealer(settings=settings)
    yield p, d
    d.close()
    p.close()


def first_frame(channel):
    deadline = time.monotonic() + BOUND_S
    while not (events := channel.receive()):
        assert time.monotonic() < deadline
        channel.wait(0.05)
    return events[0]


def test_what_came_while_the_process_stood_still_is_in_the_first_look(pair):
    """ZMQ's thread hears it after the driver goes on: here because P speaks only then."""
    p, d = pair
    assert d.send(p.address, b"hello")
    at_p = first_frame(p).address
    d.wait(0)
    assert d.receive() == []
    time.sleep(STALLED_S + 0.1)  # as if stopped
    late = threading.Timer(SETTLE_S / 10, p.send, (at_p, b"said meanwhile"))
    late.start()
    assert d.receive() == [FrameIn(p.address, b"said meanwhile")]
    late.join()


@pytest.mark.parametrize(
    ("within_s", "took_s", "slept"),
    [(0.0, STALLED_S / 2, []), (0.0, STALLED_S + 0.1, [SETTLE_S]), (5.0, 5.0 + STALLED_S / 2, []), (5.0, 2.0, []),
     (5.0, 5.1 + STALLED_S, [SETTLE_S])],
)  # fmt: skip
def test_only_a_look_that_comes_too_late_waits(monkeypatch, within_s, took_s, slept):
    now, waits = [100.0], []
    monkeypatch.setattr(stalls, "time", SimpleNamespace(sleep=waits.append))
    one = Stalls(lambda: now[0])
    one.expect(within_s)
    now[0] += took_s
    one.settle()
    assert waits == slept
    one.settle()
    assert waits == slept, "once for each stall"
