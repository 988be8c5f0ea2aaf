"""Child processes of one parent: started in groups of their own, heard line by line, and ended within a bound.

Must never end a process that it did not start, nor leave one behind when the parent is asked to stop, or is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from pdjax.serve.guardian import Guardian
from pdjax.serve.ready import parse_ready

_guardian = Guardian()
END_WAIT_S = 15.0
AGAIN_WAIT_S = 5.0


class ChildError(Exception):
    """A child ended or did not come up; the text says which and how. code: what the parent should end with."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """One process with its output forwarded as ``[name] line``. ready holds the fields of its ready line."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], forward: Callable[[str], None]
    ) -> None:
        self.name = name
        self.ready: dict[str, Any] | None = None
        self._forward = forward
        # A session of its own: Ctrl-C reaches only the parent, which then ends the children in order.
        self.process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        _guardian.watch(self.process.pid)
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), name=f"{name}-output", daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                text = line.rstrip("\n")
                fields = parse_ready(text)
                if fields is not None:
                    self.ready = fields
                self._forward(f"[{self.name}] {text}")

    @property
    def alive(self) -> bool:
        return self._ended() is None

    def _ended(self) -> int | None:
        """Its exit code. Once that has been read its number may become another's, so nobody is to end it any more."""
        code = self.process.poll()
        if code is not None:
            _guardian.forget(self.process.pid)
        return code

    def check(self) -> None:
        """Raises ChildError when the process has ended."""
        code = self._ended()
        if code is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise ChildError(f"{self.name} {how}", code=2 if code == 2 else 1)

    def tell(self, number: signal.Signals) -> None:
        """Signal the whole group: a child's own children end with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def join(self, wait_s: float) -> bool:
        """Whether the process has ended within wait_s seconds; its output has then been forwarded."""
        try:
            self.process.wait(max(wait_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        self._ended()
        for reader in self._readers:
            reader.join(1.0)
        return True


def end_all(children: Sequence[Child], wait_s: float = END_WAIT_S) -> list[str]:
    """SIGTERM to each, in this order; once more to those that still drain after wait_s seconds, which ends them at
    once; then SIGKILL to whatever is left: their names.
    """
    late = _asked_to_end(_asked_to_end(children, wait_s), min(wait_s, AGAIN_WAIT_S))
    for child in late:
        child.tell(signal.SIGKILL)
        child.join(wait_s)
    return [child.name for child in late]


def _asked_to_end(children: Sequence[Child], wait_s: float) -> list[Child]:
    """SIGTERM to each that is there; those that have not ended wait_s seconds later."""
    for child in children:
        if child.alive:
            child.tell(signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    return [child for child in children if not child.join(deadline - time.monotonic())]
