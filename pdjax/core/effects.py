"""What the core wants done, as data. The driver performs effects in order, through ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdjax.core.pools import Manifest, Part
from pdjax.core.wire import AnyMessage, FirstToken

TimerKey = tuple[str, Any]  # (kind, room or limbo key or peer)


@dataclass(frozen=True, slots=True)
class Send:
    """To one life of a peer; dropped if the channel is full: hellos and notices heal it."""

    peer: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP leg being claimed is refused."""

    room: int
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArmTimer:
    key: TimerKey
    at: float


@dataclass(frozen=True, slots=True)
class Register:
    peer: str
    epoch: int
    room: int
    uuid: int
    packed: Any


@dataclass(frozen=True, slots=True)
class Withdraw:
    peer: str
    epoch: int
    room: int
    uuid: int


@dataclass(frozen=True, slots=True)
class Lookup:
    room: int


@dataclass(frozen=True, slots=True)
class StartPull:
    room: int
    attempt: int
    peer: str
    epoch: int
    manifest: Manifest
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class AbandonPull:
    room: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PageQueue:
    """D's scheduler: ready has come (FIFO by the order of these)."""

    room: int
    manifest: Manifest
    first: FirstToken


@dataclass(frozen=True, slots=True)
class Deliver:
    """D's scheduler: the verified parts, to be scattered into the pages of the attempt."""

    room: int
    attempt: int
    packed: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """The scheduler: the room has failed."""

    room: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class BudgetFreed:
    """P's scheduler: waiting rooms may be admitted now."""

    room: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Count:
    name: str


Effect = (
    Send
    | Answer
    | ArmTimer
    | Register
    | Withdraw
    | Lookup
    | StartPull
    | AbandonPull
    | PageQueue
    | Deliver
    | Ended
    | BudgetFreed
    | Count
)
