"""The guardian: a small process that outlives its parent by a moment, to end the children that the parent leaves behind.

A parent that is killed with SIGKILL can end nobody, and its servers would keep their ports and their memory. The guardian
reads the names of process groups from a pipe that only the parent holds: the pipe's end is the parent's end. Run as a
program of its own, so it imports the standard library alone. Must never end a group that it was told to forget.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

END_WAIT_S = 15.0  # from SIGTERM to SIGKILL, as a parent that lives gives them (children.END_WAIT_S)
POLL_S = 0.05


class Guardian:
    """The parent's side. One for a process; started with the first group that it is told of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[str] | None = None

    def watch(self, group: int) -> None:
        """End this group when the calling process is gone."""
        with self._lock:
            self._groups.add(group)
            if self._process is None or self._process.poll() is not None:  # somebody may have killed it
                self._start()
                for each in self._groups:
                    self._say(f"+{each}")
            else:
                self._say(f"+{group}")

    def forget(self, group: int) -> None:
        """It has ended, and its number may become another's."""
        with self._lock:
            if group in self._groups:
                self._groups.discard(group)
                self._say(f"-{group}")

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # what ends the parent's group must not end the guardian first
        )

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: the next group starts another
            print(line, file=self._process.stdin, flush=True)


def _there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _end(groups: set[int]) -> None:
    for number, wait_s in ((signal.SIGTERM, END_WAIT_S), (signal.SIGKILL, 0.0)):
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        deadline = time.monotonic() + wait_s
        while any(map(_there, groups)) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    _end(groups)


if __name__ == "__main__":
    main()
