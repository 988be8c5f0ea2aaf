"""Driver: what one turn of the driver thread does (design §1.2, protocol §7).

It reads frames and transport events, fires due timers, and performs the table's effects through the ports; nothing
else may touch a port. It computes nothing and waits for nothing. Must never import JAX or start a thread.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pdjax.core import effects as fx
from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.identity import peer_key
from pdjax.core.pools import KVArgs
from pdjax.core.room import Event, IllegalEvent
from pdjax.core.settings import PDSettings
from pdjax.core.trace import EventLog
from pdjax.engine.base import Packed
from pdjax.engine.peers import PeerBook
from pdjax.engine.ports import FrameIn, LookupDone, PullDone, PullSettled, Refused, TransportEvent
from pdjax.engine.rooms import DropPeer, LockedRooms, Ports

# The transport's lazy timeouts fire only when its tables are touched (peer-servers rule 2); it may name its own tick_s.
TICK_S = 0.25


@dataclass(eq=False)
class _Pull:
    """One pull under way in the transport, and the room that asked for it."""

    start: fx.StartPull
    abandoned: bool = False


class Driver(LockedRooms):
    """``turn`` while ``next_deadline`` is due; every method is of the driver thread."""

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
        super().__init__(
            args,
            bootstrap_addr,
            role=role,
            settings=settings,
            ports=ports,
            epoch=epoch,
            budget_bytes=budget_bytes,
            log=log,
            on_event=on_event,
        )
        self._inbox: deque[TransportEvent | LookupDone] = deque()
        # Of the channel: what a turn that failed has left unread is read in the next one.
        self._arrived: deque[FrameIn | Refused] = deque()
        self._pulls: dict[int, _Pull] = {}
        self._pull_ids: dict[tuple[int, int], int] = {}
        self.peers = PeerBook(
            args.instance_id,
            epoch,
            settings,
            secret,
            ports.channel,
            self.counters.add,
            self._log_wire,
            self._evicted,
        )
        self._tick_s: float = getattr(ports.transport, "tick_s", TICK_S)
        self._arm(("tick", None), ports.clock() + self._tick_s)
        ports.transport.start(self._post)
        ports.registry.start(self._post)

    def _post(self, event: TransportEvent | LookupDone) -> None:
        """The sink of the transport and of the registry, from their threads."""
        self._inbox.append(event)
        self.ports.channel.wake()

    def turn(self) -> None:
        """One turn of the driver: read everything, then fire due timers, then perform (protocol §7: a process
        that was stopped reads its inbox before it fires timers)."""
        self._arrived += self.ports.channel.receive()
        while self._arrived:
            event = self._arrived.popleft()
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
            if self._pending or self._inbox or self._arrived:
                return self.ports.clock()
            return self._timers[0][0] if self._timers else self.ports.clock() + self._tick_s

    def _frame(self, event: FrameIn) -> None:
        now = self.ports.clock()
        got = self.peers.receive(event, now, create=self.role == t.SENDER)
        if got is None:
            return
        link, frame, reborn_from = got
        if reborn_from:
            self._reborn(link.instance, frame.epoch, reborn_from)
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
            start, room, attempt = pull.start, pull.start.room, pull.start.attempt
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
            self.tally.moved_bytes.add(start.manifest.nbytes)
            self.tally.pull_s.add(event.seconds)
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
        if not entries and done.rejected and not record.candidates:
            why = "; ".join(f"{name}: {reason}" for name, reason in done.rejected.items())
            self._safely(done.tag, Event("no_candidate", detail=f"no compatible prefill instance ({why})"))
            return
        if done.error:
            self.counters.add("lookups_failed")
        for e in entries:
            self.peers.learn(e.instance_id, e.zmq_addr, self.ports.clock())
        self._safely(done.tag, Event("candidates", data=[(e.instance_id, e.epoch) for e in entries]))

    # ------------------------------------------------------------------ timers

    def _fire_timers(self) -> None:
        now = self.ports.clock()
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                at, _, timer = heapq.heappop(self._timers)
                if self._armed.get(timer) == at:  # else a sooner one of the same key has fired in its place
                    del self._armed[timer]
                    self._fire(*timer, now)

    def _fire(self, kind: str, key: Any, now: float) -> None:
        if kind == "tick":
            self.ports.transport.tick()
            self._forget_silent_peers(now)
            self._arm(("tick", None), now + self._tick_s)
        elif kind == "silence":
            self._silence(key, now)
        elif kind == "limbo":
            entry = self.sender.limbo.get(key)
            if entry is not None and entry.until > now:
                self._arm((kind, key), entry.until)
            elif entry is not None:
                self._safely(key.room, Event("limbo_timer", data=key))
        elif kind == "early":
            if key not in self.sender.rooms:
                self._safely(key, Event("early_timer"))
            else:
                self.sender.forget_early(key, now)
            left = self.sender.early.get(key)
            if left:
                self._arm((kind, key), min(e.until for e in left.values()))
        elif kind == "graveyard":
            self._graveyard(key)
        else:
            record = self.rooms.get(key)
            deadline = record.timers.get(kind) if record is not None else None
            if record is None or deadline is None:
                return
            if deadline > now:
                self._arm((kind, key), deadline)
                return
            del record.timers[kind]
            self._safely(key, Event(t.TIMER_EVENTS[kind]))

    def _silence(self, peer: str, now: float) -> None:
        due = self.receiver.silent(peer, now)
        if due is None:
            return
        if due > now:
            self._arm(("silence", peer), due)
        else:
            self._peer_down(peer, "peer_silence")

    def _graveyard(self, pull_id: int) -> None:
        """An abandoned pull that has not settled by now costs its peer's server."""
        pull = self._pulls.get(pull_id)
        if pull is not None:
            self._replace_server(pull.start)

    def _replace_server(self, start: fx.StartPull) -> None:
        """Give up the server of that life of P with every pull on it; its other rooms fail over (protocol §6)."""
        self.counters.add("servers_replaced")
        why = "the transfer server of this peer was replaced"
        with self._lock:
            for room in self.receiver.rooms_of(start.peer):
                record = self.receiver.rooms[room]
                if record.state == t.LETTERS["T"] and record.bound == start.peer:
                    self._safely(room, Event("peer_failed", peer=start.peer, detail=why))
            self._pending.append(DropPeer(start.peer, start.epoch))

    # ------------------------------------------------------------------ peers that are gone

    def _evicted(self, peer: str, epoch: int) -> None:
        """The peer book forgot this peer: so do the transport, which holds a server for it, and D's silence timer."""
        with self._lock:
            self.receiver.gone(peer)
            self._pending.append(DropPeer(peer, epoch))

    def _forget_silent_peers(self, now: float) -> None:
        """A peer that came back under another name never says that its old one is over (peer-servers rule 4)."""
        for peer, epoch in self.peers.silent(now - self.settings.withdrawn_life_s):
            if self.role == t.SENDER:
                used = bool(self.sender.rooms_of_older_life(peer, epoch + 1))
            else:
                used = bool(self.receiver.rooms_of(peer))
            if not used:
                self.counters.add("peers_forgotten")
                self.peers.forget(peer)

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
            self.tally.moved_bytes.add(sum(part.nbytes for part in e.packed.parts))
            self.note("registered", e.room, uuid=str(e.uuid), peer=e.peer, peer_epoch=str(e.epoch))
        elif isinstance(e, fx.Withdraw):
            transport.withdraw(peer_key(e.peer, e.epoch), e.uuid, self.settings.withdrawn_life_s)
            self.note("withdrawn", e.room, uuid=str(e.uuid), peer=e.peer)
        elif isinstance(e, fx.ReturnSlot):
            self._return_slot(e)
        elif isinstance(e, fx.Lookup):
            self._look_up(e.room)
        elif isinstance(e, fx.StartPull):
            self._start_pull(e)
        elif isinstance(e, fx.AbandonPull):
            self._abandon(e)
        elif isinstance(e, DropPeer):
            transport.drop_peer(peer_key(e.peer, e.epoch))

    def _return_slot(self, e: fx.ReturnSlot) -> None:
        """Here and not in the core: whatever was to be withdrawn before it has been (RFC-2 §5.5 mode B)."""
        with self._lock:
            assert self.host_slots is not None
            self.host_slots.give_back(e.slot, quiet=e.quiet)
            if not e.quiet:
                self.counters.add("slots_replaced")
            self.log.line("slot_freed", e.room, slot=e.slot.number, quiet=e.quiet)
            self._keep([fx.BudgetFreed(e.room, 0)])  # who was refused for the lack of a slot asks again (V11)

    def _send(self, e: fx.Send) -> None:
        m = e.message
        if isinstance(m, wire.Ready):
            record = self.sender.rooms.get(m.room)
            if record is None or record.state != t.LETTERS["T"]:
                self.counters.add("ready_withheld")  # registering has failed since: nothing is offered (S13)
                return
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
            self._pulls[pull_id] = _Pull(e)
            self._pull_ids[(e.room, e.attempt)] = pull_id
            self.log.line("pull_started", e.room, uuid=str(e.manifest.uuid), peer=e.peer)

    def _abandon(self, e: fx.AbandonPull) -> None:
        """Into the graveyard, which is bounded in time and, for each peer, in bytes."""
        pull_id = self._pull_ids.get((e.room, e.attempt))
        if pull_id is None:  # it has ended already
            return
        self.ports.transport.abandon(pull_id)
        pull = self._pulls[pull_id]
        pull.abandoned = True
        with self._lock:
            self._arm(("graveyard", pull_id), self.ports.clock() + self.settings.graveyard_timeout_s)
        peer = (pull.start.peer, pull.start.epoch)
        buried_bytes = sum(
            p.start.manifest.nbytes
            for p in self._pulls.values()
            if p.abandoned and (p.start.peer, p.start.epoch) == peer
        )
        if buried_bytes > self.settings.max_graveyard_bytes:
            self._replace_server(pull.start)

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
