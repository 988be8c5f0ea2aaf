"""What a property is, and what a run tells it: tracked rooms, page owners, registrations, deadlines.

Everything is kept up to date line by line, so that a breach is seen at the event that makes it. A property reads the
nodes of the world and never changes them. Must never ask the table what is right: the rules here are written a
second time, by hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import xxhash

LIVE = frozenset({"Bootstrapping", "WaitingForInput", "Transferring"})
ENDED = frozenset({"Success", "Failed"})
WIRE = frozenset({"hello", "abort", "done", "unknown", "pending", "ready", "failed", "done_ack"})
LOOK_MS = 25.0
STEP_MS = 50.0  # τ of protocol §7: one loop turn of the driver
SLACK_MS = 5.0  # rounding of the log, and the turn in which a due timer fires
Life = tuple[str, str]  # node, epoch


@dataclass(frozen=True)
class Violation:
    """One breach. t: virtual ms. row: of the event-log line that showed it, -1 where none did."""

    property: str
    sentence: str
    text: str
    t: float
    row: int = -1

    def __str__(self) -> str:
        return f"{self.property} at {self.t:g} ms: {self.text} ({self.sentence})"


@dataclass(frozen=True, slots=True)
class Decision:
    """The part of a decision of the table that comes again and again: what kind it is, not what it is about."""

    event: str
    role: str
    source: str
    target: str
    effects: tuple[str, ...]

    @property
    def opens(self) -> bool:
        """A record comes into being and lives."""
        return self.source == "Absent" and self.target == "Bootstrapping"

    @property
    def ends(self) -> bool:
        return self.target in ENDED and self.source not in ENDED


@dataclass(slots=True)
class Track:
    """One record of one room in one life of a node, as the event log tells it."""

    node: str
    epoch: str
    role: str
    room: int
    state: str = "Absent"
    before: str = "Absent"  # the state that the newest line started in
    attempt: str = "0"
    peer: str = ""  # that this record is bound to
    peer_epoch: str = "0"
    began_ms: float = 0.0
    came_ms: float = 0.0  # P: when the leg came, on a gated P the first hello of a D if that was later
    came_turn: int = 0  # P: turns that its scheduler had begun then
    ended_ms: float = 0.0
    reserved: int = 0
    released: int = 0
    uuid: str = ""
    stage: str = ""  # D: start, landed, scattered
    ready_ms: float = -1.0
    reason: str = ""
    seen: dict[str, int] = field(default_factory=dict)  # effect → how often
    n_decisions: int = 0
    last_wire: tuple[Any, ...] = ()  # the number and the content of the newest decision about a message

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def __str__(self) -> str:
        return f"{self.role} room {self.room} on {self.node}"


@dataclass
class LifeTrack:
    """One life of one node."""

    name: str
    epoch: str
    rooms: dict[int, Track] = field(default_factory=dict)
    holders: dict[int, set[str]] = field(default_factory=dict)  # page → tokens
    pages: dict[str, set[int]] = field(default_factory=dict)  # token → pages
    slots: dict[int, int] = field(default_factory=dict)  # slot of host memory → room that holds it
    newest: dict[str, int] = field(default_factory=dict)  # peer → newest epoch that acted here
    delivered: tuple[str, str, str, int] = (
        "",
        "",
        "",
        0,
    )  # message, peer, attempt, room: of the newest delivery
    legs: int = 0


@dataclass
class Offer:
    """A registration, as it was made."""

    node: str
    epoch: str
    room: int
    peer: str
    packed: Any
    hashes: tuple[int, ...]
    attempt: str = "0"
    withdrawn_ms: float = -1.0
    slot: int = 0  # in which the arrays are staged; 0: in none
    slot_is_back: bool = False  # others' bytes may lie there by now


class Property:
    """Subclasses name themselves, say their sentence and bound, and hear the events of ``hears``.

    ``hears``: event names; "transition" is every decision of the table that ``wants`` says yes to. ``instants``: wants
    ``on_instant`` after every event that wrote a line; ``sampled``: wants ``on_sample`` every LOOK_MS.
    """

    name: ClassVar[str] = ""
    sentence: ClassVar[str] = ""
    bound: ClassVar[str] = "at every step"
    hears: ClassVar[tuple[str, ...]] = ()
    instants: ClassVar[bool] = False
    sampled: ClassVar[bool] = False

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    @staticmethod
    def wants(decision: Decision) -> bool:
        """Could a decision of this kind matter? Asked once for each kind."""
        return True

    def breach(self, text: str, line: dict[str, Any] | None = None) -> None:
        self.ctx.breach(self, text, line)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        """An event of ``hears``. track: the room's record on that node, for lines about a room."""

    def on_instant(self) -> None:
        """After everything of one event, if it wrote a line."""

    def on_sample(self) -> None:
        """Now and then."""

    def at_end(self) -> None:
        """The world has healed and is quiet."""


@dataclass
class Context:
    """What all properties share."""

    world: Any
    violations: list[Violation] = field(default_factory=list)
    now: float = 0.0  # virtual ms
    lives: dict[Life, LifeTrack] = field(default_factory=dict)
    births: dict[Life, int] = field(default_factory=dict)  # in the order in which processes started
    offers: dict[int, Offer] = field(default_factory=dict)  # uuid → registration
    pulls: dict[tuple[str, int], PullTrack] = field(default_factory=dict)  # (life of D, uuid)
    touched: dict[tuple[str, str, int], Track] = field(default_factory=dict)  # since the last instant
    dirty: dict[Life, LifeTrack] = field(default_factory=dict)  # since the last instant
    # At an instant: the dirty lives that are there, each with its node.
    active: list[tuple[LifeTrack, Any]] = field(default_factory=list)
    # At an instant: the touched tracks of lives that are there, each with its record (None: forgotten) and node.
    changed: list[tuple[Track, Any | None, Any]] = field(default_factory=list)
    up: list[Any] = field(default_factory=list)  # at a sample: the living nodes
    deadlines: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    stops: dict[str, float] = field(default_factory=dict)  # node → ms that it spent stopped so far
    disturbed_ms: float = -1e18  # the newest moment at which a fault touched messages or processes
    broken_ms: float = -1e18  # likewise, but only processes and links, not single messages
    losses: dict[int, list[float]] = field(
        default_factory=dict
    )  # room → when a message about it was lost or late
    ending: bool = False
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _n: int = 0

    def breach(self, prop: Property, text: str, line: dict[str, Any] | None = None) -> None:
        """Once for each text: a broken invariant would else be reported at every event."""
        if (prop.name, text) not in self._seen:
            self._seen.add((prop.name, text))
            row = int(line.get("row", -1)) if line else -1
            self.violations.append(Violation(prop.name, prop.sentence, text, self.now, row))

    def at(self, t_ms: float, check: Callable[[], None]) -> None:
        """Run check at the first instant at or after t_ms."""
        self._n += 1
        heapq.heappush(self.deadlines, (t_ms, self._n, check))

    def run_deadlines(self) -> None:
        while self.deadlines and self.deadlines[0][0] <= self.now:
            heapq.heappop(self.deadlines)[2]()

    # the world, read only

    def node(self, name: str, epoch: str | None = None) -> Any | None:
        """The living node of that name, and of that life when epoch is given."""
        node = self.world.nodes.get(name)
        if node is None or not node.alive or (epoch is not None and node.manager.log.epoch != epoch):
            return None
        return node

    def nodes(self, role: str = "") -> Iterable[Any]:
        return (n for n in self.world.nodes.values() if n.alive and role in ("", n.role))

    def settings(self, name: str) -> Any:
        return self.world.nodes[name].manager.settings

    def set_back(self, name: str, epoch: str) -> bool:
        """An earlier life of the node has a greater epoch: its clock went back before it started (decision 0006).

        Until they forget the earlier life, its peers and the registry take it for a message out of the past.
        """
        return any(n == name and int(e) > int(epoch) for n, e in self.births)

    def stopped(self, name: str) -> bool:
        """The process stands still, or stood still a moment ago and is reading its inbox."""
        until = self.world.net._frozen_until.get(name, 0.0)
        return bool(until * 1000 + STEP_MS > self.now)

    def life_of(self, node: Any) -> LifeTrack | None:
        return self.lives.get((node.name, node.manager.log.epoch))

    def other_side(self, track: Track) -> Track | None:
        """The peer's record of the same hand-off, if that life is there: newest record of the room on it."""
        for node in self.nodes("decode" if track.role == "sender" else "prefill"):
            life = self.life_of(node)
            there = life.rooms.get(track.room) if life is not None else None
            if there is None:
                continue
            if track.role == "sender" and track.peer in ("", node.name) and there.peer in ("", track.node):
                return there
            if track.role == "receiver" and track.peer in ("", node.name) and there.peer in ("", track.node):
                return there
        return None


@dataclass
class PullTrack:
    """A pull that a D has issued."""

    room: int
    parts: tuple[Any, ...]
    started_ms: float
    late: bool  # issued after the registration was withdrawn
    done: Any = None  # the PullDone or PullSettled that ended it


def digest_of(packed: Any) -> tuple[int, ...]:
    """Hashes of packed arrays, part by part."""
    return tuple(xxhash.xxh3_64_intdigest(np.ascontiguousarray(a).tobytes()) for a in packed.arrays)
