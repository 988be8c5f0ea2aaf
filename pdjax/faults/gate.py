"""Gate: holds the driver and the scheduler of a process still while somebody acts on it, at the turn that he waited for.

A scenario's step "acts when the turn in which it happened is over, before anything else happens" (docs/simulation.md);
in a real process this is what makes it so. Must never be waited at with a lock of the manager held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

Role = Literal["driver", "scheduler"]
HOLD_LIMIT_S = 20.0  # whoever has not answered by then is gone: the process goes on


class Gate:
    """holds: open holds. expired: how many ended by their limit. Calls are made on the thread that they are for."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._holds: set[int] = set()
        self._calls: dict[Role, deque[Callable[[], None]]] = {"driver": deque(), "scheduler": deque()}
        self.expired = 0

    def hold(self, number: int) -> None:
        with self._cond:
            self._holds.add(number)

    def release(self, number: int) -> None:
        with self._cond:
            self._holds.discard(number)
            self._cond.notify_all()

    def release_all(self) -> None:
        with self._cond:
            self._holds.clear()
            self._cond.notify_all()

    def enter(self, role: Role) -> None:
        """Before each turn of that thread, and after a turn that has met a hold: wait until there is none."""
        while True:
            with self._cond:
                ready = self._cond.wait_for(lambda: not self._holds or self._calls[role], HOLD_LIMIT_S)
                if not ready:
                    self.expired += len(self._holds)
                    self._holds.clear()
                calls = list(self._calls[role])
                self._calls[role].clear()
                if not calls and not self._holds:
                    return
            for call in calls:
                call()

    def call(self, role: Role, work: Callable[[], Any]) -> Future[Any]:
        """Have that thread do some work at its next turn; whoever calls wakes it."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # the caller of the port is told; the thread goes on (S11)
                done.set_exception(error)

        with self._cond:
            self._calls[role].append(run)
            self._cond.notify_all()
        return done
