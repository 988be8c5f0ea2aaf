"""The watcher of one run: keeps the tracked state up to date and tells every property what it wants to hear.

The world calls ``on_line`` for each line of the event log as it is written, ``on_instant`` when everything of an
instant has happened, ``at_end`` when it has healed and is quiet. Must never change the world: the ports that it
looks through pass every call on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdjax.sim.properties import agreement, endings, membership, order, ownership, progress, robustness
from pdjax.sim.properties.base import (
    ENDED,
    LOOK_MS,
    Context,
    Decision,
    Life,
    LifeTrack,
    Offer,
    Property,
    PullTrack,
    Track,
    Violation,
    digest_of,
)
from pdjax.sim.properties.sometimes import Sometimes

Hear = Callable[[dict[str, Any], Track | None], None]

PROPERTIES: tuple[type[Property], ...] = (
    ownership.S1,
    agreement.S2,
    ownership.S3,
    ownership.S4,
    order.S5,
    order.S6,
    agreement.S7,
    agreement.S8,
    agreement.S10,
    robustness.S11,
    robustness.S12,
    agreement.S13,
    order.S15,
    ownership.S16,
    ownership.S17,
    order.S18,
    endings.V1,
    endings.V2,
    progress.V3,
    progress.V4,
    progress.V5,
    membership.V6,
    endings.V7,
    membership.V8,
    progress.V9,
    endings.V10,
    progress.V11,
    membership.V12,
)

# Properties that speak of several ranks. A world of single-rank instances has nothing that could break them, so
# nothing is claimed about them here.
NOT_SHOWN: dict[str, str] = {
    "S9": "pairs of ranks: every instance of the simulator has one rank. What one rank can show, the identity and the"
    " fingerprint of the peer, is S8's and S10's.",
    "S14": "agreement of several hosts on device collectives: every instance of the simulator is one host.",
}
SENTENCES: dict[str, tuple[str, str]] = {p.name: (p.sentence, p.bound) for p in PROPERTIES}


class Monitor:
    """All properties over one world."""

    def __init__(self, world: Any, only: Sequence[type[Property]] = PROPERTIES) -> None:
        self.ctx = Context(world)
        self.sometimes = Sometimes(self.ctx)
        self.properties = [p(self.ctx) for p in only]
        self._hears: dict[str, list[Hear]] = {}
        for prop in self.properties:
            for event in prop.hears:
                self._hears.setdefault(event, []).append(prop.on_line)
        self._deciding = [p for p in self.properties if "transition" in p.hears]
        self._wanted: dict[tuple[Any, ...], tuple[Hear, ...]] = {}  # kind of decision → who hears it
        self._instants = [p.on_instant for p in self.properties if p.instants]
        self._samples = [p.on_sample for p in self.properties if p.sampled]
        self._notes: dict[str, Callable[[LifeTrack, dict[str, Any]], None]] = {
            "delivered": self._delivered,
            "crashed": self._changed_life,
            "restarted": self._changed_life,
            "hit": self._hit,
            "step": self._stepped,
            "started": self._started,
            "sent": self.sometimes.sent,
            "evicted": self.sometimes.evicted,
            "recompute": self.sometimes.recomputed,
            "pages_shared": self.sometimes.shared,
            "pages_freed": self.sometimes.freed,
            "slot_taken": self.sometimes.slot_taken,
            "slot_freed": self._slot_freed,
        }
        self._next_look = 0.0
        self._frozen: dict[str, float] = {}
        self._known: dict[str, Any] = {}
        self._look = True
        self.attach()

    @property
    def violations(self) -> list[Violation]:
        return self.ctx.violations

    def violated(self) -> list[str]:
        """Names, in the order of first breach."""
        return list(dict.fromkeys(v.property for v in self.ctx.violations))

    # ---------------------------------------------------------------- what the world calls

    def on_line(self, line: dict[str, Any]) -> None:
        ctx = self.ctx
        ctx.now = line["t"]
        event = line["event"]
        key = (line["node"], line["epoch"])
        life = ctx.lives.get(key)
        if life is None:
            life = ctx.lives[key] = LifeTrack(*key)
        ctx.dirty[key] = life
        if "role" in line:
            track: Track | None = self._follow(life, line)
            kind = (event, line["role"], line["from"], line["to"], line["effects"])
            wanted = self._wanted.get(kind)
            if wanted is None:
                wanted = self._wanted[kind] = self._who_wants(Decision(*kind))
            for hear in wanted:
                hear(line, track)
            return
        note = self._notes.get(event)
        if note is not None:
            note(life, line)
        hears = self._hears.get(event)
        if hears is not None:
            track = life.rooms.get(int(line["room"])) if "room" in line else None
            for hear in hears:
                hear(line, track)

    def _who_wants(self, kind: Decision) -> tuple[Hear, ...]:
        """The moments first, then the properties in their order, those that wait for this event by its name last."""
        look = self.sometimes.looks.get(kind.event)
        return (
            self.sometimes.count_row,
            *((look,) if look is not None else ()),
            *(p.on_line for p in self._deciding if p.wants(kind)),
            *self._hears.get(kind.event, ()),
        )

    def on_instant(self, world: Any = None) -> None:
        ctx = self.ctx
        now = ctx.now = ctx.world.net.clock.now_s * 1000
        if self._look:
            self.attach()
        if ctx.deadlines and ctx.deadlines[0][0] <= now:
            ctx.run_deadlines()
        if ctx.dirty:
            self._resolve()
            for check in self._instants:
                check()
            ctx.touched.clear()
            ctx.dirty.clear()
        if now >= self._next_look:
            self._next_look = now + LOOK_MS
            ctx.up = [node for node in ctx.world.nodes.values() if node.alive]
            for check in self._samples:
                check()

    def _resolve(self) -> None:
        """What the touched tracks are about: the record and the node, looked up once for all properties."""
        ctx = self.ctx
        ctx.changed, ctx.active = [], []
        there: dict[Life, Any] = {}
        for life, track in ctx.dirty.items():
            node = ctx.node(*life)
            if node is not None:
                there[life] = node
                ctx.active.append((track, node))
        for (name, epoch, room), touched in ctx.touched.items():
            node = there.get((name, epoch))
            if node is not None:
                ctx.changed.append((touched, node.manager.rooms.get(room), node))

    def at_end(self, world: Any = None) -> None:
        ctx = self.ctx
        ctx.ending = True
        self.on_instant()
        for prop in self.properties:
            prop.at_end()

    def raised(self, node: str, error: BaseException) -> None:
        """A driver or a scheduler raised out of its loop: in a real process the thread would be dead (S11)."""
        for prop in self.properties:
            if prop.name == "S11":
                prop.breach(f"{node}: {type(error).__name__}: {error} left the loop")

    # ---------------------------------------------------------------- following the log

    def _follow(self, life: LifeTrack, line: dict[str, Any]) -> Track:
        """Move the room's record as this line says. A message of another attempt meets no record and moves nothing."""
        room = int(line["room"])
        track = life.rooms.get(room)
        if line["from"] == line["to"] == "Absent":
            track = track or Track(life.name, life.epoch, line["role"], room)
            track.n_decisions += 1
            return track
        if track is None or (line["from"] == "Absent" and track.state == "Absent"):
            track = life.rooms[room] = Track(life.name, life.epoch, line["role"], room, began_ms=line["t"])
            self._came(life, track, line["t"])
        track.n_decisions += 1
        track.before, track.state = track.state, line["to"]
        track.attempt = line["attempt"]
        if track.state in ENDED and track.before not in ENDED:
            track.ended_ms, track.reason = line["t"], line.get("reason", "")
        for effect in line["effects"]:
            track.seen[effect] = track.seen.get(effect, 0) + 1
            if effect == "reserve":
                track.reserved += 1
            elif effect in ("free_budget", "to_limbo"):
                track.released += 1
            elif effect in ("bind", "bind_peer"):
                if not track.peer and self.ctx.settings(life.name).gated:
                    self._came(life, track, line["t"])
                track.peer, track.peer_epoch = line.get("peer", track.peer), line.get("peer_epoch", "0")
            elif effect == "bind_early":
                record = self._record(life, room)
                if record is not None:
                    track.peer, track.peer_epoch = record.peer, str(record.peer_epoch)
        self.ctx.touched[life.name, life.epoch, room] = track
        return track

    def _came(self, life: LifeTrack, track: Track, now_ms: float) -> None:
        """From here on the scheduler may ask for the room's budget."""
        node = self.ctx.node(life.name, life.epoch)
        track.came_ms, track.came_turn = now_ms, node.host_turns if node is not None else 0

    def _record(self, life: LifeTrack, room: int) -> Any | None:
        node = self.ctx.node(life.name, life.epoch)
        return node.manager.rooms.get(room) if node is not None else None

    def _delivered(self, life: LifeTrack, line: dict[str, Any]) -> None:
        life.delivered = (line["message"], line["peer"], line["attempt"], int(line["room"]))

    def _changed_life(self, life: LifeTrack, line: dict[str, Any]) -> None:
        ctx = self.ctx
        ctx.disturbed_ms = max(ctx.disturbed_ms, line["t"])
        ctx.broken_ms = max(ctx.broken_ms, line["t"])
        self._look = True

    def _hit(self, life: LifeTrack, line: dict[str, Any]) -> None:
        if "message" in line:
            self.ctx.disturbed_ms = max(self.ctx.disturbed_ms, line["t"])
            if line["do"] != "duplicate":
                self.ctx.losses.setdefault(int(line["room"]), []).append(line["t"])

    def _slot_freed(self, life: LifeTrack, line: dict[str, Any]) -> None:
        self.sometimes.slot_freed(line)
        for offer in self.ctx.offers.values():
            where = (offer.node, offer.epoch, offer.room, offer.slot)
            offer.slot_is_back |= where == (life.name, life.epoch, int(line["room"]), line["slot"])

    def _stepped(self, life: LifeTrack, line: dict[str, Any]) -> None:
        if line["action"] in ("stop", "partition"):
            self._stands_still()

    def _started(self, life: LifeTrack, line: dict[str, Any]) -> None:
        self._look = True

    # ---------------------------------------------------------------- looking through the ports

    def attach(self) -> None:
        """Look through the transport of every node that is new."""
        self._look = False
        for name, node in self.ctx.world.nodes.items():
            if self._known.get(name) is not node:
                self._known[name] = node
                self._watch_transport(node)
                self.ctx.births[name, node.manager.log.epoch] = len(self.ctx.births) + 1
                self._tell({"node": name, "epoch": node.manager.log.epoch, "event": "born"})

    def _tell(self, seen: dict[str, Any]) -> None:
        """What no line of the log says: a node is born, a registration is asked for."""
        for hear in self._hears.get(seen["event"], ()):
            hear({**seen, "t": self.ctx.world.net.clock() * 1000}, None)

    def _stands_still(self) -> None:
        """A process was stopped or a link cut: for how long, and until when messages are disturbed."""
        net, ctx = self.ctx.world.net, self.ctx
        now_s = net.clock()
        for name, until in net._frozen_until.items():
            known = max(self._frozen.get(name, 0.0), now_s)
            if until > known:
                ctx.stops[name] = ctx.stops.get(name, 0.0) + (until - known) * 1000
                self._frozen[name] = until
        latest_s = max([*net._frozen_until.values(), *net._cut_until.values()], default=0.0)
        ctx.disturbed_ms = max(ctx.disturbed_ms, latest_s * 1000)
        ctx.broken_ms = max(ctx.broken_ms, latest_s * 1000)

    def _watch_transport(self, node: Any) -> None:
        ctx, transport, life = self.ctx, node.transport, f"{node.name}@{node.manager.epoch}"
        offer, withdraw, pull, sink = transport.offer, transport.withdraw, transport.pull, transport._sink
        by_id: dict[int, PullTrack] = {}

        def watched_offer(peer: str, uuid: int, packed: Any) -> None:
            room = next((r for r, t in node.manager.sender.rooms.items() if t.uuid == uuid), -1)
            self._tell({"node": node.name, "event": "offer", "uuid": str(uuid), "room": room})
            record = node.manager.sender.rooms.get(room)
            attempt = str(record.attempt) if record is not None else "0"
            epoch = node.manager.log.epoch
            slots = ctx.lives[node.name, epoch].slots if (node.name, epoch) in ctx.lives else {}
            slot = next((number for number, holder in slots.items() if holder == room), 0)
            made = Offer(node.name, epoch, room, peer, packed, digest_of(packed), attempt, slot=slot)
            ctx.offers.setdefault(uuid, made)
            offer(peer, uuid, packed)

        def watched_withdraw(peer: str, uuid: int, life_s: float) -> None:
            entry = ctx.offers.get(uuid)
            if entry is not None and entry.withdrawn_ms < 0:
                entry.withdrawn_ms = ctx.world.net.clock() * 1000
            withdraw(peer, uuid, life_s)

        def watched_pull(peer: str, address: str, uuid: int, parts: Sequence[Any]) -> int:
            entry = ctx.offers.get(uuid)
            now = ctx.world.net.clock() * 1000
            late = entry is not None and entry.withdrawn_ms >= 0
            pull_id: int = pull(peer, address, uuid, parts)
            room = next((r for r, t in node.manager.receiver.rooms.items() if _pulls(t, uuid)), -1)
            by_id[pull_id] = ctx.pulls[life, uuid] = PullTrack(room, tuple(parts), now, late)
            return pull_id

        def watched_sink(event: Any) -> None:
            track = by_id.get(event.pull_id)
            if track is not None:
                track.done = event
            sink(event)

        transport.offer, transport.withdraw, transport.pull = watched_offer, watched_withdraw, watched_pull
        transport._sink = watched_sink


def _pulls(record: Any, uuid: int) -> bool:
    return record.manifest is not None and record.manifest.uuid == uuid
