"""How a server ends: it takes nothing new, finishes what it has, says its last words, and stops its threads in order.

Asked once (SIGTERM, SIGINT, POST /drain) it drains, within a bound; asked again it ends what runs at once; a third
signal ends the process on the spot. Must never wait without a bound, and must never do more in a signal handler than
count and write one byte: a lock that the main thread holds would never come free.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from pdjax.engine.bootstrap.httpd import HttpThread
from pdjax.engine.jax_transfer.process import leave
from pdjax.serve.log import ServerLog

if TYPE_CHECKING:
    from pdjax.serve.node import Node

POLL_S = 0.02  # of what still runs while it drains
LAST_WORDS_S = 2.0  # after an end by force: for the requests to be answered and the peers to be told


class EndRequest:
    """Who asked this process to end, and how urgently. ``listen`` on the main thread, first of all."""

    def __init__(self) -> None:
        self.by = ""  # what asked first
        self._signals = 0
        self.serving = False  # somebody may know us: then even a signal has to wait for the end of the drain
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    @property
    def asked(self) -> bool:
        return bool(self.by)

    @property
    def urgent(self) -> bool:
        """A second signal. The first one after POST /drain is none: a supervisor sends it when its hook has drained."""
        return self._signals > 1

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def ask(self, by: str) -> None:
        """From any thread, and repeatable: only signals make it urgent."""
        self.by = self.by or by
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier ones: it will be read
            os.write(self._write, b".")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.serving:
            leave(0)  # it loads or compiles: nobody knows us yet
        self._signals += 1
        if self._signals > 2:
            leave(128 + number)
        self.ask(signal.Signals(number).name)

    def wait(self, timeout_s: float) -> None:
        """Until it is asked once more, or the time is over. Main thread only."""
        if select.select([self._read], [], [], timeout_s)[0]:
            os.read(self._read, 4096)


def end(
    node: Node, http: HttpThread, request: EndRequest, log: ServerLog, within_s: float, failed: bool
) -> None:
    """From "draining" to the last thread's end. failed: nothing can finish any more, so nothing is waited for."""
    began = time.monotonic()
    until = began if failed else began + within_s
    node.drain()
    node.leave_routers()
    log.event("draining", instance_id=node.instance_id, reason="failed" if failed else request.by)
    _wait(request, lambda: bool(node.unfinished()), until)
    left = 0 if failed else node.unfinished()
    if left or failed:
        node.end_all()
        _wait(request, lambda: bool(node.unfinished()), time.monotonic() + LAST_WORDS_S, hurried=True)
    http.stop()  # what is answered goes out; from here no new leg can come
    hurried = bool(left) or request.urgent or failed
    last = time.monotonic() + LAST_WORDS_S
    _wait(request, node.has_last_words, last if hurried else max(until, last), hurried=hurried)
    unheard = node.close()
    log.event(
        "ended",
        instance_id=node.instance_id,
        seconds=round(time.monotonic() - began, 3),
        cut_off=left,
        unheard=unheard,
    )


def _wait(request: EndRequest, busy: Callable[[], bool], until: float, *, hurried: bool = False) -> None:
    """While it is busy, until the time is over. hurried: what goes on is the hurry itself."""
    while busy() and time.monotonic() < until and (hurried or not request.urgent):
        request.wait(POLL_S)
