"""Virtual time: a heap of named events, one seeded Random, and every tie between events a recorded choice.

Events of one instant have no natural order, so which one goes first is drawn, and the draw is kept by name: a file
that carries the names replays the same run, also after steps were deleted from it. Must never read real time.
"""

from __future__ import annotations

import difflib
import heapq
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pdjax.sim.ports import VirtualClock

Name = tuple[Any, ...]  # kind, then what it is about: ("deliver", "ready", 7, 1)

# Every kind of event, with how many processes its name begins with: fewer than that is no name of this kind.
KINDS: Final = {
    "do": 0, "deliver": 0, "steps": 0,
    "driver": 1, "scheduler": 1, "device": 1, "beat": 1, "lookup": 1, "refused": 1, "stop": 1, "leave": 1,
    "connect": 2, "pull": 2, "land": 2, "reset": 2,
    "post": 0, "posted": 0, "http": 0, "answer": 0, "timeout": 0, "retry": 0, "disconnect": 0, "abort": 1,
}  # fmt: skip

GAP_S = 1e-7  # between two things of which the second cannot overtake the first


TIME, _ORDER, ACTION, NAME = range(4)


class Event(list[Any]):
    """Something that will happen: [time, order of entry, action, name], so that a heap compares it without our help.

    ``cancel`` makes it nothing.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[ACTION] = None


def choice_of(name: Name) -> dict[str, Any]:
    """A name as it stands in a trace file: {"deliver": ["ready", 7, 1]}."""
    return {str(name[0]): list(name[1:])}


def name_of(choice: Mapping[str, Any]) -> Name:
    """The reverse of ``choice_of``. Raises ValueError."""
    if len(choice) != 1:
        raise ValueError("a choice has one key, its kind")
    kind, about = next(iter(choice.items()))
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1)
        raise ValueError(
            f"{kind}: no kind of event; {f'{near[0]} is one' if near else 'known are ' + ', '.join(KINDS)}"
        )
    if not isinstance(about, list) or any(isinstance(x, (list, dict, float)) for x in about):
        raise ValueError(f"{kind}: a list of names and numbers")
    if len(about) < KINDS[kind]:
        raise ValueError(f"{kind}: the process that it is about is missing")
    return (kind, *about)


class Loop:
    """choices: names that win their ties, in this order; where none of them stands to be chosen, the seed decides."""

    def __init__(self, seed: int = 0, choices: Iterable[Name] = ()) -> None:
        self.clock = VirtualClock()
        self.rng = random.Random(seed)
        self.n_events = 0
        self.taken: list[Name] = []
        self._wanted: dict[Name, list[int]] = {}
        for place, name in enumerate(choices):
            self._wanted.setdefault(name, []).append(place)
        for places in self._wanted.values():
            places.reverse()
        self._heap: list[Event] = []
        self._seq = 0

    def at(self, time_s: float, action: Callable[[], None], name: Name = ("do",)) -> Event:
        """Perform action at time_s (now, if that has passed)."""
        now_s = self.clock.now_s
        self._seq += 1
        event = Event((time_s if time_s > now_s else now_s, self._seq, action, name))
        heapq.heappush(self._heap, event)
        return event

    def after(self, delay_s: float, action: Callable[[], None], name: Name = ("do",)) -> Event:
        return self.at(self.clock.now_s + delay_s, action, name)

    def next_at(self) -> float | None:
        """When something happens next; None: never."""
        heap = self._heap
        while heap and heap[0][ACTION] is None:
            heapq.heappop(heap)
        return heap[0][TIME] if heap else None

    def step(self, stop_s: float = float("inf")) -> bool:
        """Perform the next event, if it is due by stop_s."""
        heap = self._heap
        while heap and heap[0][ACTION] is None:
            heapq.heappop(heap)
        if not heap or heap[0][TIME] > stop_s:
            return False
        event = heapq.heappop(heap)
        at = event[TIME]
        if heap and heap[0][TIME] == at:
            event = self._choose(event)
        action, event[ACTION] = event[ACTION], None
        if at > self.clock.now_s:
            self.clock.now_s = at
        self.n_events += 1
        action()
        return True

    def run_due(self) -> bool:
        """Perform what is due now; False: nothing was."""
        worked = False
        while self.step(self.clock()):
            worked = True
        return worked

    def _choose(self, first: Event) -> Event:
        heap, at = self._heap, first[TIME]
        tied = [first]
        while heap and heap[0][TIME] == at:
            event = heapq.heappop(heap)
            if event[ACTION] is not None:
                tied.append(event)
        if len(tied) == 1:
            return first
        pick = self.rng.randrange(len(tied))  # also when the file decides: later draws must be the same
        if self._wanted:
            pick = self._wanted_of(tied, pick)
        chosen = tied.pop(pick)
        for event in tied:
            heapq.heappush(heap, event)
        self.taken.append(chosen[NAME])
        return chosen

    def _wanted_of(self, tied: list[Event], pick: int) -> int:
        """The tied event whose name stands first among the wanted ones that are left."""
        best, found = -1, pick
        for i, event in enumerate(tied):
            places = self._wanted.get(event[NAME])
            if places and (best < 0 or places[-1] < best):
                best, found = places[-1], i
        if best < 0:
            return pick
        name = tied[found][NAME]
        self._wanted[name].pop()
        return pick if tied[pick][NAME] == name else found
