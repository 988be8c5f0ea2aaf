"""What P may have waiting to be pulled: bytes of the unpulled budget and, where they are staged, slots of host memory.

A slot holds one hand-off from its reservation before the prefill (S17) until its D has said that it is quiet for these
bytes (S1): only then may another hand-off be written there (protocol §6, RFC-2 §5.5 mode B). Pure accounting. Must never
look at what lies in a slot, and never hand a slot out again that somebody may still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Slot:
    """Host memory for one hand-off of exactly n_bytes. arrays: the runner's, one a part; None before its first use."""

    number: int
    n_bytes: int
    arrays: list[Any] | None = None


class HostSlots:
    """Slots that together take at most limit_bytes of host memory; one that is larger than all of it goes alone.

    The arrays of a hand-off have exact shapes, so a slot serves hand-offs of one size only. When requests of another size
    come, free slots make way for theirs, those of the size that has waited longest first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held: dict[int, Slot] = {}
        self.held_bytes = 0
        self.free_bytes = 0
        self.made = 0
        self._free: dict[int, list[Slot]] = {}  # n_bytes → slots; sizes in the order of their newest return

    def can(self, n_bytes: int) -> bool:
        return not self.held or self.held_bytes + n_bytes <= self.limit_bytes

    def take(self, n_bytes: int) -> Slot:
        """A slot that nobody reads. Raises ValueError where ``can`` says no."""
        if not self.can(n_bytes):
            raise ValueError(f"host slots: {n_bytes} bytes on {self.held_bytes} of {self.limit_bytes}")
        if n_bytes in self._free:
            slot = self._pop(n_bytes)
        else:
            self._make_way(n_bytes)
            slot = self._make(n_bytes)
        self.held[slot.number] = slot
        self.held_bytes += n_bytes
        return slot

    def give_back(self, slot: Slot, *, quiet: bool) -> None:
        """Exactly once for each ``take`` (S3). quiet: no pull can touch the slot any more.

        A slot that may still be read is let go: its memory lives as long as the transport reads it, and is never written
        again. Raises ValueError for a slot that is not held.
        """
        if self.held.get(slot.number) is not slot:
            raise ValueError(f"host slots: slot {slot.number} comes back, but nobody holds it")
        del self.held[slot.number]
        self.held_bytes -= slot.n_bytes
        if quiet and self._fits(slot.n_bytes):
            self._put(slot)

    def fill(self, sizes: Iterable[int]) -> list[Slot]:
        """Free slots of these sizes in turn, the small ones first, until no more fits. For the start: nothing is held."""
        fresh: list[Slot] = []
        rounds = sorted(set(sizes))
        while rounds:
            rounds = [n for n in rounds if self._fits(n)]
            for n_bytes in rounds:
                if self._fits(n_bytes):
                    fresh.append(self._make(n_bytes))
                    self._put(fresh[-1])
        return fresh

    def _fits(self, n_bytes: int) -> bool:
        return self.held_bytes + self.free_bytes + n_bytes <= self.limit_bytes

    def _make(self, n_bytes: int) -> Slot:
        self.made += 1
        return Slot(self.made, n_bytes)

    def _make_way(self, n_bytes: int) -> None:
        while self._free and not self._fits(n_bytes):
            self._pop(next(iter(self._free)))

    def _put(self, slot: Slot) -> None:
        slots = self._free.pop(slot.n_bytes, [])
        self._free[slot.n_bytes] = [*slots, slot]
        self.free_bytes += slot.n_bytes

    def _pop(self, n_bytes: int) -> Slot:
        slots = self._free[n_bytes]
        slot = slots.pop()
        if not slots:
            del self._free[n_bytes]
        self.free_bytes -= n_bytes
        return slot


@dataclass
class Budget:
    """Bytes that may wait to be pulled. A room larger than all of it goes alone (protocol §6).

    host: with staging, where these bytes lie; a slot comes back a little later than its bytes.
    """

    limit_bytes: int
    charged_bytes: int = 0
    host: HostSlots | None = None

    def can(self, n_bytes: int) -> bool:
        fits = self.charged_bytes == 0 or self.charged_bytes + n_bytes <= self.limit_bytes
        return fits and (self.host is None or self.host.can(n_bytes))

    def charge(self, n_bytes: int) -> Slot | None:
        """The slot for these bytes where they are staged. Raises ValueError where ``can`` says no."""
        if not self.can(n_bytes):
            raise ValueError(f"budget: {n_bytes} bytes on {self.charged_bytes} of {self.limit_bytes}")
        self.charged_bytes += n_bytes
        return None if self.host is None else self.host.take(n_bytes)

    def give_back(self, n_bytes: int) -> None:
        """The bytes; their slot comes back by itself (effects.ReturnSlot)."""
        if n_bytes > self.charged_bytes:
            raise ValueError(f"budget: {n_bytes} bytes back, but only {self.charged_bytes} are charged")
        self.charged_bytes -= n_bytes
