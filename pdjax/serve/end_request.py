"""EndRequest: who asked this process to end. Every command that runs until a signal waits on one.

Must never do more in a signal handler than count and write one byte, or call ``_exit``: a lock that the main thread
holds would never come free, and that of an event is held while its waiter begins and ends each wait.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType

ALIVE_POLL_S = 1.0  # between two looks at whether what a process serves with is alive


class EndRequest:
    """Who asked this process to end, and how urgently. ``listen`` on the main thread, first of all."""

    def __init__(self) -> None:
        self.by = ""  # what asked first
        self._signals = 0
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
        self.wake()

    def wake(self) -> None:
        """From any thread: end a ``wait``, though nobody has asked for anything."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier ones: it will be read
            os.write(self._write, b".")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 2:
            os._exit(128 + number)  # nothing is flushed: each line of the log has been, and locks may be held
        self.ask(signal.Signals(number).name)

    def wait(self, timeout_s: float) -> bool:
        """Until it is asked once more, or woken, or the time is over: whether anybody has asked. Main thread only."""
        if select.select([self._read], [], [], timeout_s)[0]:
            os.read(self._read, 4096)
        return self.asked

    def close(self) -> None:
        """Never of one that listens: a signal may come at any time."""
        for end in (self._read, self._write):
            os.close(end)
