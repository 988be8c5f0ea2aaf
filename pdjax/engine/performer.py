"""Performer: what the table's effects do to the world, and what is due now and then (design §1.2).

Each is performed alone and outside of the manager's lock: a port runs native code, and a claim must not wait for it.
What raises is counted, written down and costs its own room at most (S11). Must never import JAX or start a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdjax.core import effects as fx
from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.identity import peer_key
from pdjax.core.pools import KVArgs
from pdjax.core.room import Event, IllegalEvent
from pdjax.core.settings import PDSettings
from pdjax.core.trace import EventLog
from pdjax.engine.peers import PeerBook
from pdjax.engine.ports import FrameIn, LookupDone, Refused, TransportEvent
from pdjax.engine.rooms import DropPeer, ForgetSilentPeers, LockedRooms, Ports, TickTransport, Upkeep

# The transport's lazy timeouts fire only when its tables are touched (peer-servers rule 2); it may name its own tick_s.
TICK_S = 0.25


@dataclass(eq=False)
class _Pull:
    """One pull under way in the transport, and the room that asked for it."""

    start: fx.StartPull
    abandoned: bool = False


class Performer(LockedRooms):
    """``_perform`` empties the queue of effects; every method is of the driver thread."""

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

    def _perform_one(self, e: fx.Effect | Upkeep) -> None:
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
        elif isinstance(e, TickTransport):
            transport.tick()
        elif isinstance(e, ForgetSilentPeers):
            self._forget_silent_peers(e.since)

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

    def _effect_failed(self, effect: fx.Effect | Upkeep, error: Exception) -> None:
        """A port raised: the room that needed it fails, the driver goes on (S11)."""
        self._failed(type(effect).__name__, getattr(effect, "room", None), error)
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

    def _failed(self, what: str, room: int | None, error: Exception) -> None:
        """Nothing of it is silent: a number, a line of the event log, and what a real process adds to these."""
        self.counters.add(f"effect_failed_{what}")
        self.note("effect_failed", room, effect=what, detail=f"{type(error).__name__}: {error}")

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

    def _forget_silent_peers(self, since: float) -> None:
        """A peer that came back under another name never says that its old one is over (peer-servers rule 4)."""
        for peer, epoch in self.peers.silent(since):
            with self._lock:
                if self.role == t.SENDER:
                    used = bool(self.sender.rooms_of_older_life(peer, epoch + 1))
                else:
                    used = bool(self.receiver.rooms_of(peer))
            if not used:
                self.counters.add("peers_forgotten")
                self.peers.forget(peer)

    def _safely(self, room: int, ev: Event) -> None:
        """Wire input and timers never stop the driver (S11)."""
        try:
            self._handle(room, ev)
        except IllegalEvent as e:
            self.counters.add("illegal")
            self.log.line("illegal", room, detail=str(e))
