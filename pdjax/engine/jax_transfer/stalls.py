"""Whether this process has just stood still: stopped by a signal, or without its processor for a while.

Its peers have spoken meanwhile, and what they said lies in the kernel until ZMQ's own thread has run again: the driver may
be the first to go on, finds nothing, and takes a P for silent that was not (protocol §7, S11). Must never delay a turn of a
process that was merely busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STALLED_S = (
    0.25  # later than it was to come: no load of ours takes as long, and no timer of a peer is as short
)
SETTLE_S = 0.05  # one loop turn of the driver, which every bound of protocol §7 allows


class Stalls:
    """``expect`` the next look, ``settle`` at it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_s = clock()

    def expect(self, within_s: float) -> None:
        """The next look comes within so long, unless the process stands still."""
        self._by_s = self._clock() + within_s

    def settle(self) -> None:
        """After a stall: let the other threads of this process hear what has arrived."""
        if self._clock() - self._by_s > STALLED_S:
            time.sleep(SETTLE_S)
        self._by_s = self._clock()
