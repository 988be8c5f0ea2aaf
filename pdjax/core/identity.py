"""Who a process is and the ids that it mints (protocol §1). Must never read a clock or draw at random itself."""

from __future__ import annotations

from dataclasses import dataclass, field

_LOW32 = (1 << 32) - 1


def make_epoch(unix_time_s: float, random32: int) -> int:
    """This life of an instance: start time in the high bits, random low bits, so that it grows and never repeats."""
    return ((int(unix_time_s) & _LOW32) << 32) | (random32 & _LOW32) or 1


@dataclass
class Minter:
    """An epoch-salted counter of uint64: grows within a life, and no two lives share a value in practice.

    The salt is the epoch with its low 20 bits cleared; those and the carry count (facts/transfer, rule 4).
    """

    epoch: int
    _next: int = field(init=False)

    def __post_init__(self) -> None:
        self._next = (self.epoch & ~((1 << 20) - 1)) | 1

    def mint(self) -> int:
        value = self._next
        self._next += 1
        if value >= 1 << 64:
            raise OverflowError("id space of this epoch is used up: restart the process")
        return value

    def minted(self, value: int) -> bool:
        """Whether this life has minted that value."""
        return (self.epoch & ~((1 << 20) - 1)) < value < self._next


def peer_key(instance_id: str, epoch: int) -> str:
    """The transport's name for one life of one peer."""
    return f"{instance_id}:{epoch:x}"
