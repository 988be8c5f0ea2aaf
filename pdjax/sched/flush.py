"""Those who want the prefix cache emptied, and how long each of them waits for the server to be quiet.

A flush under running requests would be half a flush: what they read stays, and they put back what they computed. So it
waits, or is refused, as with SGLang's /flush_cache (facts/router §9). Must never read a clock.
"""

from __future__ import annotations

from collections.abc import Callable

from pdjax.sched.chunk_cache import BasePrefixCache


class FlushQueue:
    """For the scheduler's thread. Each asker is told exactly once, True when the cache is empty."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, Callable[[bool], None]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, until_s: float, told: Callable[[bool], None]) -> None:
        self._waiting.append((until_s, told))

    def answer(self, cache: BasePrefixCache, busy: bool, now_s: float) -> bool:
        """Flush and tell all when no request is live; tell those whose time is over that one is (busy).

        Pages that a device step still writes for a request that has ended come back within a turn: that is waited for.
        """
        asked, self._waiting = self._waiting, []
        quiet = not busy and cache.available_pages() == cache.capacity()
        if quiet:
            cache.flush()
        for until_s, told in asked:
            if quiet or (busy and until_s <= now_s):
                told(quiet)
            else:
                self._waiting.append((until_s, told))
        return len(self._waiting) < len(asked)

    def next_deadline_s(self) -> float | None:
        return min((until_s for until_s, _ in self._waiting), default=None)
