"""KVManager: the protocol's core between a scheduler and the ports (design §1).

``claim``, the senders and the receivers run the table under one lock, from any thread, and never wait. What the
table wants done to the world is queued, and the driver performs it in ``turn``: it alone touches channel,
transport and registry. The simulator calls the same ``turn``. Must never import JAX or start a thread.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdjax.core import effects as fx
from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.errors import PDError
from pdjax.core.identity import peer_key
from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import KVArgs, packed_bytes
from pdjax.core.reasons import explain
from pdjax.core.receiver import ReceiverRoom, ReceiverSide
from pdjax.core.room import Event, IllegalEvent, Transition
from pdjax.core.sender import Budget, Offer, SenderRoom, SenderSide
from pdjax.core.settings import PDSettings
from pdjax.core.trace import EventLog
from pdjax.engine.base import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    FirstToken,
    KVEnded,
    KVEvent,
    KVLanded,
    KVReady,
    KVReleased,
    Leg,
    Packed,
)
from pdjax.engine.peers import PeerBook
from pdjax.engine.ports import (
    Clock,
    FrameIn,
    LookupDone,
    PullDone,
    PullSettled,
    Refused,
    RegistryClient,
    SideChannel,
    Transport,
    TransportEvent,
)

TICK_S = 0.25  # the transport's lazy timeouts fire only when its tables are touched (peer-servers rule 2)

TIMER_EVENTS = {
    "request": "expire_request",
    "lease": "expire_lease",
    "bootstrap": "expire_bootstrap",
    "transfer": "expire_transfer",
    "tombstone": "tombstone_timer",
    "hello": "hello_timer",
    "notice": "notice_timer",
}


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Give up one life of a peer in the transport, after the rooms that used it have been told."""

    peer: str
    epoch: int


@dataclass
class Ports:
    """The world of one manager."""

    transport: Transport
    channel: SideChannel
    registry: RegistryClient
    clock: Clock


@dataclass
class Counters:
    """What was dropped, refused or late, by name: nothing is lost silently."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n


class KVManager(BaseKVManager):
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
        secret: bytes = b"",
        log: EventLog | None = None,
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(args, bootstrap_addr)
        self.role = t.SENDER if role == "prefill" else t.RECEIVER
        self.settings, self.ports, self.epoch = settings, ports, epoch
        self.log = log or EventLog(args.instance_id, epoch, ports.clock)
        self.counters = Counters()
        self._on_event = on_event
        self._runner: Any = None
        self._lock = threading.RLock()
        self._pending: deque[fx.Effect | DropPeer] = deque()
        self._inbox: deque[TransportEvent | LookupDone] = deque()
        self._events: deque[KVEvent] = deque()
        self._timers: list[tuple[float, int, fx.TimerKey]] = []
        self._timer_seq = 0
        self._legs: dict[int, Leg] = {}
        self._unopened: dict[int, list[KVEvent]] = {}  # claimed, and not yet taken over by the scheduler
        self._pulls: dict[int, tuple[int, int, fx.StartPull]] = {}
        self._pull_ids: dict[tuple[int, int], int] = {}
        fingerprint = args.fingerprint.hash
        self.sender = SenderSide(settings, epoch, fingerprint, args.page_size, Budget(budget_bytes))
        self.receiver = ReceiverSide(settings, epoch, fingerprint, args.page_size, list(args.pools))
        self.peers = PeerBook(
            args.instance_id, epoch, settings, secret, ports.channel, self.counters.add, self._log_wire
        )
        self.draining = False
        self.log.line("started")
        ports.transport.start(self._post)
        ports.registry.start(self._post)
        self._arm(("tick", None), ports.clock() + TICK_S)

    # ------------------------------------------------------------------ from any thread

    def register_runner(self, runner: Any) -> None:
        self._runner = runner

    @property
    def rooms(self) -> dict[int, SenderRoom] | dict[int, ReceiverRoom]:
        return self.sender.rooms if self.role == t.SENDER else self.receiver.rooms

    def claim(self, leg: Leg) -> None:
        self._take_leg(leg, "leg", "")

    def refuse(self, leg: Leg, reason: str) -> None:
        """A leg that this side cannot serve: 400 for bad_request, else 503; the peer is told. Always raises."""
        self._take_leg(leg, "leg_bad" if reason == "bad_request" else "leg_refused", reason)

    def _take_leg(self, leg: Leg, name: str, reason: str) -> None:
        with self._lock:
            if name == "leg" and (self.draining or self._full()):
                name, reason = "leg_refused", "draining" if self.draining else "queue_full"
            known = leg.room in self.rooms
            if not known:
                self._legs[leg.room] = leg
                self._unopened[leg.room] = []
            answer = next(
                (
                    e
                    for e in self._handle(leg.room, Event(name, reason=reason), leg)
                    if isinstance(e, fx.Answer)
                ),
                None,
            )
        self.ports.channel.wake()
        if answer is not None:
            if not known:
                self._unopened.pop(leg.room, None)
            self.counters.add(f"legs_refused_{answer.reason}")
            raise PDError(explain(answer.reason), reason=answer.reason, status=answer.status, room=leg.room)

    def _full(self) -> bool:
        n_rooms = len(self.rooms)
        return n_rooms >= self.settings.max_tombstones or self.n_live >= self.settings.max_rooms

    @property
    def n_live(self) -> int:
        return self._n_live

    _n_live = 0

    def create_sender(self, room: int) -> Sender:
        with self._lock:
            self._open(room)
            return Sender(self, room, self.sender.rooms[room])

    def create_receiver(self, room: int, bootstrap_addr: str) -> Receiver:
        with self._lock:
            self._open(room)
            return Receiver(self, bootstrap_addr, room, self.receiver.rooms[room])

    def _open(self, room: int) -> None:
        """The scheduler has the room now: what happened since the claim was kept for it (V11)."""
        if room not in self.rooms:
            raise PDError("the room has ended and is forgotten", reason="request_timeout", room=room)
        self._events += self._unopened.pop(room, [])

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

    def _post(self, event: TransportEvent | LookupDone) -> None:
        self._inbox.append(event)
        self.ports.channel.wake()

    # ------------------------------------------------------------------ the core, under the lock

    def _handle(self, room: int, ev: Event, leg: Leg | None = None) -> list[fx.Effect]:
        now = self.ports.clock()
        record = self.rooms.get(room)
        was_live = record is not None and record.live
        if self.role == t.SENDER:
            effects, line = self.sender.handle(room, ev, now, leg.digest if leg else "")
        else:
            effects, line = self.receiver.handle(room, ev, now, leg)
        record = self.rooms.get(room)
        self._n_live += (record is not None and record.live) - was_live
        if record is None:
            self._legs.pop(room, None)
            self._unopened.pop(room, None)
        self._log_transition(line, ev)
        self._keep(effects)
        return effects

    def _keep(self, effects: Sequence[fx.Effect | DropPeer]) -> None:
        for e in effects:
            if isinstance(e, fx.ArmTimer):
                self._arm(e.key, e.at)
            elif isinstance(e, fx.Count):
                self.counters.add(e.name)
            elif isinstance(e, fx.Ended | fx.PageQueue | fx.Deliver | fx.BudgetFreed):
                held = self._unopened.get(e.room) if not isinstance(e, fx.BudgetFreed) else None
                (self._events if held is None else held).append(_kv_event(e))
                self._on_event()
            elif not isinstance(e, fx.Answer):
                self._pending.append(e)

    def _arm(self, key: fx.TimerKey, at: float) -> None:
        self._timer_seq += 1
        heapq.heappush(self._timers, (at, self._timer_seq, key))

    def _log_transition(self, line: Transition, ev: Event) -> None:
        if line.kind == "stale":
            self.counters.add(f"stale_{line.event}")
        if self.log.on:
            extra: dict[str, Any] = {}
            if ev.peer:
                extra["peer"] = ev.peer
                extra["peer_epoch"] = str(ev.epoch)
            uuid = getattr(ev.msg, "uuid", None) or (
                ev.msg.manifest.uuid if isinstance(ev.msg, wire.Ready) else None
            )
            if uuid:
                extra["uuid"] = str(uuid)
            self.log.transition(line, **extra)

    def _log_wire(self, event: str, peer: str, m: wire.AnyMessage) -> None:
        if self.log.on:
            with self._lock:
                self.log.line(
                    event, m.room, message=wire.EVENT_OF[type(m)], peer=peer, attempt=str(m.attempt)
                )

    # ------------------------------------------------------------------ the driver

    def turn(self) -> None:
        """One turn of the driver: read everything, then fire due timers, then perform (protocol §7: a process
        that was stopped reads its inbox before it fires timers)."""
        for event in self.ports.channel.receive():
            if isinstance(event, Refused):
                self._peer_down(self.peers.by_address(event.address), "refused")
            else:
                self._frame(event)
        while self._inbox:
            self._inbox_event(self._inbox.popleft())
        self._fire_timers()
        self._perform()
        self.peers.flush(self.ports.clock())

    def next_deadline(self) -> float:
        with self._lock:
            if self._pending or self._inbox:
                return self.ports.clock()
            return self._timers[0][0] if self._timers else self.ports.clock() + TICK_S

    def _frame(self, event: FrameIn) -> None:
        now = self.ports.clock()
        got = self.peers.receive(event, now, create=self.role == t.SENDER)
        if got is None:
            return
        link, frame, fresh, reborn_from = got
        if reborn_from:
            self._reborn(link.instance, frame.epoch, reborn_from)
        if not fresh:
            return
        with self._lock:
            if self.role == t.RECEIVER:
                self.receiver.answered(link.instance, now)
            for m in frame.messages:
                if (type(m) in wire.TO_SENDER) != (self.role == t.SENDER):
                    self.counters.add("wrong_direction")
                    continue
                if self.log.on:
                    self._log_wire("delivered", link.instance, m)
                self._safely(m.room, Event(wire.EVENT_OF[type(m)], link.instance, frame.epoch, m))

    def _safely(self, room: int, ev: Event) -> None:
        """Wire input and timers never stop the driver (S11)."""
        try:
            self._handle(room, ev)
        except IllegalEvent as e:
            self.counters.add("illegal")
            self.log.line("illegal", room, detail=str(e))

    def _reborn(self, peer: str, epoch: int, old_epoch: int) -> None:
        """A newer life of the peer has spoken: whatever belonged to the old one is over."""
        with self._lock:
            if self.role == t.SENDER:
                rooms = self.sender.rooms_of_older_life(peer, epoch)
            else:
                rooms = self.receiver.rooms_of(peer)
            for room in rooms:
                self._safely(room, Event("peer_reborn", peer, epoch))
            self._pending.append(DropPeer(peer, old_epoch))

    def _peer_down(self, peer: str | None, event: str) -> None:
        """D: nobody listens at P's address, or P is mute."""
        if peer is None or self.role != t.RECEIVER:
            return
        with self._lock:
            self.receiver.gone(peer)
            for room in self.receiver.rooms_of(peer):
                self._safely(room, Event(event, peer))
            self._pending.append(DropPeer(peer, self.peers.epoch_of(peer)))

    def _inbox_event(self, event: TransportEvent | LookupDone) -> None:
        with self._lock:
            if isinstance(event, LookupDone):
                self._looked_up(event)
                return
            pull = self._pulls.pop(event.pull_id, None)
            if pull is None:
                return
            room, attempt, start = pull
            self._pull_ids.pop((room, attempt), None)
            record = self.receiver.rooms.get(room)
            if record is None or record.attempt != attempt:
                return
            if isinstance(event, PullSettled) or record.state != t.LETTERS["T"]:
                if record.state == t.LETTERS["F"]:
                    self._safely(room, Event("pull_settled"))
                return
            self._pull_done(room, event, start)

    def _pull_done(self, room: int, event: PullDone, start: fx.StartPull) -> None:
        wrong = [(p, e) for p, e in zip(start.parts, event.errors, strict=True) if e is not None]
        if not wrong:
            self._safely(room, Event("landed", data=Packed(start.parts, event.arrays)))
            return
        self.counters.add("parts_failed", len(wrong))
        part, error = wrong[0]
        detail = f"{len(wrong)} of {len(start.parts)} parts failed; part {part.pool}/{part.rank}/{part.chunk}: {error}"
        self._safely(room, Event("peer_failed", peer=start.peer, detail=detail))

    def _looked_up(self, done: LookupDone) -> None:
        record, leg = self.receiver.rooms.get(done.tag), self._legs.get(done.tag)
        if record is None or leg is None:
            return
        entries = done.entries
        if not entries and done.rejected:
            why = "; ".join(f"{name}: {reason}" for name, reason in done.rejected.items())
            self._safely(done.tag, Event("no_candidate", detail=f"no compatible prefill instance ({why})"))
            return
        if done.error:
            self.counters.add("lookups_failed")
        for e in entries:
            self.peers.learn(e.instance_id, e.zmq_addr)
        self._safely(done.tag, Event("candidates", data=[(e.instance_id, e.epoch) for e in entries]))

    # ------------------------------------------------------------------ timers

    def _fire_timers(self) -> None:
        now = self.ports.clock()
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                at, _, (kind, key) = heapq.heappop(self._timers)
                self._fire(kind, key, at, now)

    def _fire(self, kind: str, key: Any, at: float, now: float) -> None:
        if kind == "tick":
            self.ports.transport.tick()
            self._arm(("tick", None), now + TICK_S)
        elif kind == "silence":
            self._silence(key, now)
        elif kind == "limbo":
            entry = self.sender.limbo.get(key)
            if entry is not None and entry.until <= now:
                self._safely(key.room, Event("limbo_timer", data=key))
        elif kind == "early":
            if key not in self.sender.rooms:
                self._safely(key, Event("early_timer"))
            else:
                self.sender.forget_early(key, now)
        elif kind == "graveyard":
            self._graveyard(key)
        else:
            record = self.rooms.get(key)
            deadline = record.timers.get(kind) if record is not None else None
            if record is not None and deadline is not None and deadline <= now:
                del record.timers[kind]
                self._safely(key, Event(TIMER_EVENTS[kind]))

    def _silence(self, peer: str, now: float) -> None:
        due = self.receiver.silent(peer, now)
        if due is None:
            return
        if due > now:
            self._arm(("silence", peer), due)
        else:
            self._peer_down(peer, "peer_silence")

    def _graveyard(self, pull_id: int) -> None:
        """An abandoned pull that has not settled costs its peer's server; that peer's rooms fail over."""
        if pull_id not in self._pulls:
            return
        start = self._pulls[pull_id][2]
        self.counters.add("servers_replaced")
        for room in self.receiver.rooms_of(start.peer):
            record = self.receiver.rooms[room]
            if record.state == t.LETTERS["T"] and record.bound == start.peer:
                self._safely(
                    room,
                    Event(
                        "peer_failed", peer=start.peer, detail="the transfer server of this peer was replaced"
                    ),
                )
        self._pending.append(DropPeer(start.peer, start.epoch))

    # ------------------------------------------------------------------ effects on ports

    def _perform(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    return
                effect = self._pending.popleft()
            try:
                self._perform_one(effect)
            except Exception as e:
                self._effect_failed(effect, e)

    def _perform_one(self, e: fx.Effect | DropPeer) -> None:
        transport = self.ports.transport
        if isinstance(e, fx.Send):
            self._send(e)
        elif isinstance(e, fx.Register):
            key = peer_key(e.peer, e.epoch)
            transport.offer(key, e.uuid, e.packed)
            self.note("registered", e.room, uuid=str(e.uuid), peer=e.peer, peer_epoch=str(e.epoch))
        elif isinstance(e, fx.Withdraw):
            transport.withdraw(peer_key(e.peer, e.epoch), e.uuid, self.settings.withdrawn_life_s)
            self.note("withdrawn", e.room, uuid=str(e.uuid), peer=e.peer)
        elif isinstance(e, fx.Lookup):
            self._look_up(e.room)
        elif isinstance(e, fx.StartPull):
            self._start_pull(e)
        elif isinstance(e, fx.AbandonPull):
            pull_id = self._pull_ids.get((e.room, e.attempt))
            if pull_id is not None:
                transport.abandon(pull_id)
                with self._lock:
                    self._arm(("graveyard", pull_id), self.ports.clock() + self.settings.graveyard_timeout_s)
        elif isinstance(e, DropPeer):
            transport.drop_peer(peer_key(e.peer, e.epoch))

    def _send(self, e: fx.Send) -> None:
        m = e.message
        if isinstance(m, wire.Ready):
            address = self.ports.transport.address_for(peer_key(e.peer, self.peers.epoch_of(e.peer)))
            m = msgspec.structs.replace(
                m, manifest=msgspec.structs.replace(m.manifest, transfer_address=address)
            )
        self.peers.send(e.peer, m)

    def _look_up(self, room: int) -> None:
        leg = self._legs.get(room)
        if leg is None:
            return
        self.ports.registry.lookup(room, leg.bootstrap_host, leg.bootstrap_port)

    def _start_pull(self, e: fx.StartPull) -> None:
        with self._lock:
            record = self.receiver.rooms.get(e.room)
            if record is None or record.attempt != e.attempt or record.state != t.LETTERS["T"]:
                self._never_pulled(e)
                return
        pull_id = self.ports.transport.pull(
            peer_key(e.peer, e.epoch), e.manifest.transfer_address, e.manifest.uuid, e.parts
        )
        with self._lock:
            self._pulls[pull_id] = (e.room, e.attempt, e)
            self._pull_ids[(e.room, e.attempt)] = pull_id
            self.log.line("pull_started", e.room, uuid=str(e.manifest.uuid), peer=e.peer)

    def _never_pulled(self, e: fx.StartPull) -> None:
        """The room ended between the decision and the pull: nothing was issued, so it is quiet now."""
        record = self.receiver.rooms.get(e.room)
        if record is not None and record.attempt == e.attempt and record.state == t.LETTERS["F"]:
            self._safely(e.room, Event("pull_settled"))

    def _effect_failed(self, effect: fx.Effect | DropPeer, error: Exception) -> None:
        """A port raised: the room that needed it fails, the driver goes on (S11)."""
        self.counters.add(f"effect_failed_{type(effect).__name__}")
        room = getattr(effect, "room", None)
        self.note(
            "effect_failed", room, effect=type(effect).__name__, detail=f"{type(error).__name__}: {error}"
        )
        if isinstance(effect, fx.StartPull):
            with self._lock:
                record = self.receiver.rooms.get(effect.room)
                if record is not None and record.attempt == effect.attempt and record.state == t.LETTERS["T"]:
                    self._safely(
                        effect.room,
                        Event("peer_failed", peer=effect.peer, detail=f"the pull could not start: {error}"),
                    )
                else:
                    self._never_pulled(effect)
        elif isinstance(effect, fx.Register):
            self.event(effect.room, Event("engine_error", detail=f"the KV could not be registered: {error}"))

    # ------------------------------------------------------------------ what others ask

    def packed_bytes(self, n_pages: int) -> int:
        return packed_bytes(self.args.pools, n_pages)

    def quiescent(self) -> dict[str, int]:
        """What still belongs to somebody: all zero when everything is free (tombstones not counted)."""
        with self._lock:
            return {
                "live_rooms": self._n_live,
                "budget_bytes": self.sender.budget.charged_bytes,
                "limbo": len(self.sender.limbo),
                "notices": sum(len(r.notices) for r in self.receiver.rooms.values()),
                "pulls": len(self._pulls),
                "pending_effects": len(self._pending),
            }

    def close(self, wait_s: float) -> None:
        """End of the process: peers are told by the caller (abort), then the ports go."""
        self.ports.registry.close()
        self.ports.transport.close(wait_s)
        self.ports.channel.close()


def _kv_event(e: fx.Ended | fx.PageQueue | fx.Deliver | fx.BudgetFreed) -> KVEvent:
    if isinstance(e, fx.Ended):
        return KVEnded(e.room, 503, e.reason, e.message)
    if isinstance(e, fx.PageQueue):
        return KVReady(e.room, e.manifest.n_tokens, e.manifest.n_pages, e.first)
    if isinstance(e, fx.Deliver):
        return KVLanded(e.room, e.attempt, e.packed)
    return KVReleased()


class _Half:
    """What a sender and a receiver share: the record may outlive its place in the table, so it is held."""

    _record: SenderRoom | ReceiverRoom

    def __init__(self, manager: KVManager, room: int) -> None:
        self._manager = manager
        self.room = room

    def poll(self) -> KVPoll:
        return self._record.poll

    def abort(self, reason: str = "client_abort") -> None:
        name = "engine_error" if reason == "engine_error" else "abort_local"
        self._manager.event(self.room, Event(name, reason=reason))

    def failure_exception(self) -> PDError | None:
        r = self._record
        if r.state != t.LETTERS["F"]:
            return None
        return PDError(r.detail or explain(r.reason), reason=r.reason, room=r.room)


class Sender(_Half, BaseKVSender):
    """P's half of one room, for the scheduler thread."""

    def __init__(self, manager: KVManager, room: int, record: SenderRoom) -> None:
        super().__init__(manager, room)
        self._record: SenderRoom = record

    def admit(self, n_bytes: int) -> bool:
        self._manager.event(self.room, Event("admit", data=n_bytes))
        return self._record.state == t.LETTERS["W"]

    def send(self, kv_indices: Sequence[int], first: FirstToken) -> bool:
        if self._record.state != t.LETTERS["W"]:
            return False
        manager = self._manager
        packed = manager._runner.gather(kv_indices)
        offer = Offer(packed, packed.parts, self.n_tokens, len(kv_indices), first)
        with manager._lock:
            if self._record.state != t.LETTERS["W"]:
                return False
            manager._handle(self.room, Event("kv_ready", data=offer))
        manager.ports.channel.wake()
        return True

    @property
    def n_tokens(self) -> int:
        return self._manager._legs[self.room].n_prompt


class Receiver(_Half, BaseKVReceiver):
    """D's half of one room, for the scheduler thread."""

    def __init__(self, manager: KVManager, bootstrap_addr: str, room: int, record: ReceiverRoom) -> None:
        super().__init__(manager, room)
        self.bootstrap_addr = bootstrap_addr
        self._record: ReceiverRoom = record
        self.token = record.attempt

    def receive(self, kv_indices: Sequence[int]) -> bool:
        if self._record.state != t.LETTERS["W"]:
            return False
        self._manager.event(self.room, Event("start", data=kv_indices))
        return self._record.state == t.LETTERS["T"]

    def commit(self) -> bool:
        if self._record.state != t.LETTERS["T"]:
            return False
        self._manager.event(self.room, Event("scattered"))
        return self._record.state == t.LETTERS["S"]
