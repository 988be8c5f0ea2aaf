"""LockedRooms: the protocol's table under one lock, for every thread of a process (design §1.2).

A call runs the table and never waits. What the table wants done to the world is queued for the driver, what the
scheduler must know is queued for it. Must never call a port, except to read the clock and to wake the driver.
"""

from __future__ import annotations

import dataclasses
import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdjax.core import effects as fx
from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.budget import Budget, HostSlots
from pdjax.core.errors import PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import KVArgs
from pdjax.core.reasons import explain
from pdjax.core.receiver import ReceiverRoom, ReceiverSide
from pdjax.core.room import Event, Transition
from pdjax.core.sender import SenderRoom, SenderSide
from pdjax.core.settings import PDSettings
from pdjax.core.tally import Tally
from pdjax.core.trace import EventLog
from pdjax.engine.base import BaseKVManager, KVEnded, KVEvent, KVLanded, KVReady, KVReleased, KVWanted, Leg
from pdjax.engine.ports import Clock, RegistryClient, SideChannel, Transport

LEAST_TIMERS = 1024  # fewer are never looked through

_FOR_SCHEDULER = (fx.Ended, fx.PageQueue, fx.Deliver, fx.BudgetFreed, fx.Wanted)


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Give up one life of a peer in the transport, after the rooms that used it have been told."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class TickTransport:
    """Let the transport look at its own timeouts."""


@dataclass(frozen=True, slots=True)
class ForgetSilentPeers:
    """Give up the peers that nothing was heard of since then and no room needs."""

    since: float


Upkeep = (
    DropPeer | TickTransport | ForgetSilentPeers
)  # that the driver owes its ports beside the table's effects


@dataclass
class Ports:
    """The world of one manager."""

    transport: Transport
    channel: SideChannel
    registry: RegistryClient
    clock: Clock


@dataclass
class Counters:
    """What was dropped, refused or late, by name: nothing is lost silently. Every thread of a process counts."""

    counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + n


class LockedRooms(BaseKVManager):
    """Senders (role prefill) or receivers (role decode) of one process."""

    def __init__(
        self,
        args: KVArgs,
        bootstrap_addr: str,
        *,
        role: str,
        settings: PDSettings,
        ports: Ports,
        epoch: int,
        budget_bytes: int,
        log: EventLog | None = None,
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(args, bootstrap_addr)
        self.role = t.SENDER if role == "prefill" else t.RECEIVER
        self.settings, self.ports, self.epoch = settings, ports, epoch
        self.log = log or EventLog(args.instance_id, epoch, ports.clock)
        self.counters = Counters()
        self.tally = Tally()
        self._on_event = on_event
        self._runner: Any = None
        self._lock = threading.RLock()
        self._pending: deque[fx.Effect | Upkeep] = deque()
        self._events: deque[KVEvent] = deque()
        self._timers: list[tuple[float, int, fx.TimerKey]] = []
        self._timer_seq = 0
        self._armed: dict[fx.TimerKey, float] = {}  # the soonest entry of each key
        self._sweep_at = LEAST_TIMERS  # so many timers are looked through for those that nobody needs
        self._legs: dict[int, Leg] = {}
        self._live_by_rid: dict[str, set[int]] = {}
        self._unopened: dict[int, list[KVEvent]] = {}  # claimed, and not yet taken over by the scheduler
        fingerprint = args.fingerprint.hash
        self.host_slots = HostSlots(budget_bytes) if settings.host_staging and role == "prefill" else None
        budget = Budget(budget_bytes, host=self.host_slots)
        self.sender = SenderSide(settings, epoch, fingerprint, args.page_size, budget)
        self.receiver = ReceiverSide(settings, epoch, fingerprint, args.page_size, list(args.pools))
        self.rooms: dict[int, SenderRoom] | dict[int, ReceiverRoom] = (
            self.sender.rooms if self.role == t.SENDER else self.receiver.rooms
        )
        self.draining = False
        self.log.line("started", **_process(role, args, settings))

    # ------------------------------------------------------------------ from any thread

    def register_runner(self, runner: Any) -> None:
        self._runner = runner

    def claim(self, leg: Leg) -> None:
        self._take_leg(leg, "leg", "")

    def refuse(self, leg: Leg, reason: str) -> None:
        """A leg that this side cannot serve: 400 for bad_request, else 503; the peer is told. Always raises."""
        self._take_leg(leg, "leg_bad" if reason == "bad_request" else "leg_refused", reason)

    def _take_leg(self, leg: Leg, name: str, reason: str) -> None:
        with self._lock:
            known = leg.room in self.rooms
            if known:
                name, reason = "leg", ""  # whatever else is wrong with it: the first goes on (protocol §1)
            elif name == "leg" and (self.draining or self._full()):
                name, reason = "leg_refused", "draining" if self.draining else "queue_full"
            if not known and len(self.rooms) >= self.settings.max_tombstones:
                # Not even a record of the refusal: the table is at its bound (S12). P or D learns by its timer.
                refused: fx.Answer | None = fx.Answer(leg.room, 503, "queue_full")
            else:
                refused = self._claim(leg, Event(name, reason=reason), known)
        self.ports.channel.wake()
        if refused is not None:
            self.counters.add(f"legs_refused_{refused.reason}")
            raise PDError(
                explain(refused.reason), reason=refused.reason, status=refused.status, room=leg.room
            )

    def _claim(self, leg: Leg, ev: Event, known: bool) -> fx.Answer | None:
        """The leg meets the table; the answer that refuses it, if any."""
        if not known:
            self._legs[leg.room] = leg
            self._unopened[leg.room] = []
        effects = self._handle(leg.room, ev, leg)
        refused = next((e for e in effects if isinstance(e, fx.Answer)), None)
        if refused is not None and not known:
            self._unopened.pop(leg.room, None)
        return refused

    def _full(self) -> bool:
        return len(self.rooms) >= self.settings.max_tombstones or self._n_live >= self.settings.max_rooms

    @property
    def n_live(self) -> int:
        return self._n_live

    _n_live = 0

    def _open(self, room: int) -> None:
        """The scheduler has the room now: what happened since the claim was kept for it (V11)."""
        if room not in self.rooms:
            raise PDError("the room has ended and is forgotten", reason="request_timeout", room=room)
        self._events += self._unopened.pop(room, [])

    def live_rooms(self, rid: str | None) -> dict[int, KVPoll]:
        with self._lock:
            of_rid = self._live_by_rid.values() if rid is None else [self._live_by_rid.get(rid, set())]
            return {room: self.rooms[room].poll for rooms in of_rid for room in rooms}

    def take_events(self) -> list[KVEvent]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def note(self, event: str, room: int | None = None, **fields: Any) -> None:
        """A line of the event log from another thread of this process (pages, first token, …)."""
        if self.log.on:
            with self._lock:
                self.log.line(event, room, **fields)

    def event(self, room: int, ev: Event) -> bool:
        """One local event for a live room, from any thread. False: the room has ended or never was."""
        with self._lock:
            record = self.rooms.get(room)
            if record is None or not record.live:
                return False
            self._handle(room, ev)
        self.ports.channel.wake()
        return True

    # ------------------------------------------------------------------ the core, under the lock

    def _handle(self, room: int, ev: Event, leg: Leg | None = None) -> list[fx.Effect]:
        now, rooms = self.ports.clock(), self.rooms
        record = rooms.get(room)
        was_live = record is not None and record.state in t.LIVE
        if self.role == t.SENDER:
            effects, line = self.sender.handle(room, ev, now, leg.digest if leg else "")
        else:
            effects, line = self.receiver.handle(room, ev, now, leg)
        record = rooms.get(room)
        is_live = record is not None and record.state in t.LIVE
        if is_live != was_live:
            self._count_live(room, is_live)
        if record is None:
            self._legs.pop(room, None)
            self._unopened.pop(room, None)
        self.tally.note(line)
        if line.kind == "stale":
            self.counters.add(f"stale_{line.event}")
        if self.log.on:
            self._log_transition(line, ev, leg)
        if effects:
            self._keep(effects)
        return effects

    def _count_live(self, room: int, is_live: bool) -> None:
        """A room begins or ceases to live. A rid may have several: samples, and a router's retries (facts/router §0.6)."""
        rid = self._legs[room].rid
        if is_live:
            self._n_live += 1
            self._live_by_rid.setdefault(rid, set()).add(room)
            return
        self._n_live -= 1
        rooms = self._live_by_rid[rid]
        rooms.discard(room)
        if not rooms:
            del self._live_by_rid[rid]

    def _keep(self, effects: Sequence[fx.Effect | Upkeep]) -> None:
        for e in effects:
            if isinstance(e, fx.ArmTimer):
                self._arm(e.key, e.at)
            elif isinstance(e, _FOR_SCHEDULER):
                held = self._unopened.get(e.room) if not isinstance(e, fx.BudgetFreed) else None
                (self._events if held is None else held).append(_kv_event(e))
                self._on_event()
            elif isinstance(e, fx.Count):
                self.counters.add(e.name)
            elif not isinstance(e, fx.Answer):
                self._pending.append(e)

    def _arm(self, key: fx.TimerKey, at: float) -> None:
        """One entry for each key, however often a peer has its deadline renewed (S12).

        A later deadline is not entered: the one that fires looks at the record and arms what is left of it.
        """
        soonest = self._armed.get(key)
        if soonest is not None and soonest <= at:
            return
        self._armed[key] = at
        self._timer_seq += 1
        heapq.heappush(self._timers, (at, self._timer_seq, key))
        if len(self._timers) > self._sweep_at:
            self._sweep_timers()

    def _sweep_timers(self) -> None:
        """An early entry that gave way to a newer one leaves its timer, which a peer could pile up by naming rooms (S12).

        Looked through only when they have doubled, so that it costs each timer next to nothing.
        """
        for key in [one for one in self._armed if one[0] == "early" and one[1] not in self.sender.early]:
            del self._armed[key]
        self._timers = [entry for entry in self._timers if self._armed.get(entry[2]) == entry[0]]
        heapq.heapify(self._timers)
        self._sweep_at = 2 * max(len(self._timers), LEAST_TIMERS)

    def _log_transition(self, line: Transition, ev: Event, leg: Leg | None) -> None:
        extra: dict[str, Any] = {"rid": leg.rid, "prompt": leg.n_prompt} if leg is not None else {}
        if ev.peer:
            extra["peer"] = ev.peer
            extra["peer_epoch"] = str(ev.epoch)
        if ev.msg is not None:
            uuid = ev.msg.manifest.uuid if isinstance(ev.msg, wire.Ready) else getattr(ev.msg, "uuid", 0)
            if uuid:
                extra["uuid"] = str(uuid)
        self.log.transition(line, extra)

    def _log_wire(self, event: str, peer: str, m: wire.AnyMessage) -> None:
        if self.log.on:
            with self._lock:
                self.log.line(
                    event, m.room, message=wire.EVENT_OF[type(m)], peer=peer, attempt=str(m.attempt)
                )


def _process(role: str, args: KVArgs, settings: PDSettings) -> dict[str, Any]:
    """What a log must say of its process, so that the run can be simulated: sizes, and flags unlike their defaults."""
    flags = {
        f.metadata["flag"]: getattr(settings, f.name)
        for f in dataclasses.fields(settings)
        if getattr(settings, f.name) != f.default
    }
    pools = [pool.name for pool in args.pools]
    num_pages = args.pools[0].shape[0] if args.pools else 0
    return {
        "mode": role, "page_size": args.page_size, "num_pages": num_pages, "pools": pools, "flags": flags
    }  # fmt: skip


def _kv_event(e: fx.Ended | fx.PageQueue | fx.Deliver | fx.BudgetFreed | fx.Wanted) -> KVEvent:
    if isinstance(e, fx.Ended):
        return KVEnded(e.room, e.status, e.reason, e.message)
    if isinstance(e, fx.PageQueue):
        return KVReady(e.room, e.manifest.n_tokens, e.manifest.n_pages, e.first)
    if isinstance(e, fx.Deliver):
        return KVLanded(e.room, e.attempt, e.packed)
    return KVWanted(e.room) if isinstance(e, fx.Wanted) else KVReleased()
