"""What the core wants done, as data. The driver performs effects in order, through ports.

Structs, not dataclasses: several are made for each event, and a frozen dataclass costs ten times as much to make.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdjax.core.budget import Slot
from pdjax.core.pools import Manifest, Part
from pdjax.core.wire import AnyMessage, FirstToken

TimerKey = tuple[str, Any]  # (kind, room or limbo key or peer)


class Send(msgspec.Struct, frozen=True):
    """To one life of a peer; dropped if the channel is full: hellos and notices heal it."""

    peer: str
    message: AnyMessage


class Answer(msgspec.Struct, frozen=True):
    """The HTTP leg being claimed is refused."""

    room: int
    status: int
    reason: str


class ArmTimer(msgspec.Struct, frozen=True):
    key: TimerKey
    at: float


class Register(msgspec.Struct, frozen=True):
    peer: str
    epoch: int
    room: int
    uuid: int
    packed: Any


class Withdraw(msgspec.Struct, frozen=True):
    peer: str
    epoch: int
    room: int
    uuid: int


class Lookup(msgspec.Struct, frozen=True):
    room: int


class StartPull(msgspec.Struct, frozen=True):
    room: int
    attempt: int
    peer: str
    epoch: int
    manifest: Manifest
    parts: tuple[Part, ...]


class AbandonPull(msgspec.Struct, frozen=True):
    room: int
    attempt: int


class PageQueue(msgspec.Struct, frozen=True):
    """D's scheduler: ready has come (FIFO by the order of these)."""

    room: int
    manifest: Manifest
    first: FirstToken


class Deliver(msgspec.Struct, frozen=True):
    """D's scheduler: the verified parts, to be scattered into the pages of the attempt."""

    room: int
    attempt: int
    packed: Any


class Ended(msgspec.Struct, frozen=True):
    """The scheduler: the room has failed. status: what the client is answered."""

    room: int
    reason: str
    message: str
    status: int = 503


class BudgetFreed(msgspec.Struct, frozen=True):
    """P's scheduler: waiting rooms may be admitted now."""

    room: int
    n_bytes: int


class ReturnSlot(msgspec.Struct, frozen=True):
    """The slot of a room's staged bytes comes back, once what was to be withdrawn before it is. quiet: see HostSlots."""

    room: int
    slot: Slot
    quiet: bool


class Wanted(msgspec.Struct, frozen=True):
    """P's scheduler, gated: a D has come for the room, which may ask for its bytes now."""

    room: int


class Count(msgspec.Struct, frozen=True):
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
    | ReturnSlot
    | Wanted
    | Count
)
