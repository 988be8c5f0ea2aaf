"""Simulated ports: so far the clock. Must never import JAX or read real time."""

from __future__ import annotations


class VirtualClock:
    """A Clock (monotonic seconds) that moves only when told to, and never backwards."""

    __slots__ = ("now_s",)

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s  # the same as a call, for those that ask a thousand times in a world

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"advance({seconds}): a monotonic clock does not go back")
        self.now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """Move to time_s; a time already passed changes nothing."""
        self.now_s = max(self.now_s, time_s)
