"""Counts that cost an addition: what the table decided, and histograms of seconds and bytes.

Fed where things happen, read when somebody asks. Bounded by the states and by the reasons of this process; must
never hold a room, a peer or anything else that a client can name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from pdjax.core.room import Transition
from pdjax.core.vocabulary import LETTERS, LIVE, STATE_NAMES

_N = len(STATE_NAMES)
_FAILED = LETTERS["F"]
_LIVE_FROM = {state: [other for other in STATE_NAMES if other != state] for state in sorted(LIVE)}

BYTES_BOUNDS = tuple(float(1 << n) for n in range(12, 34, 2))  # 4 KiB … 8 GiB
SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of values up to each bound, the last one of what is beyond them all. One writer at a time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as text, how many are at most that), ending with "+Inf"."""
        counts, running, out = list(self.counts), 0, []
        for bound, n in zip([*(f"{b:g}" for b in self.bounds), "+Inf"], counts, strict=True):
            running += n
            out.append((bound, running))
        return out


class Tally:
    """The table's decisions of one process. ``note`` under the owner's lock; the rest from any thread.

    moved_bytes: of each hand-off, when P registers it or D has all of it. pull_s: seconds of each pull that ended right.
    """

    def __init__(self) -> None:
        self._moves = [0] * (_N * _N)
        self._ends: dict[str, int] = {}
        self.moved_bytes = Histogram(BYTES_BOUNDS)
        self.pull_s = Histogram(SECONDS_BOUNDS)

    def note(self, line: Transition) -> None:
        if line.source == line.target:
            return
        self._moves[line.source * _N + line.target] += 1
        if line.target == _FAILED:
            self._ends[line.reason] = self._ends.get(line.reason, 0) + 1

    def moves(self) -> Iterator[tuple[str, str, int]]:
        """(from, to, how often) of every pair of states that has been seen, by name."""
        for i, n in enumerate(list(self._moves)):
            if n:
                yield STATE_NAMES[i // _N], STATE_NAMES[i % _N], n

    def live(self) -> dict[str, int]:
        """Rooms that are in each live state now: those that came in less those that went."""
        moves = list(self._moves)
        return {
            STATE_NAMES[state]: sum(moves[other * _N + state] - moves[state * _N + other] for other in others)
            for state, others in _LIVE_FROM.items()
        }

    def failures(self) -> dict[str, int]:
        """How many rooms ended badly, by reason."""
        return dict(self._ends)
