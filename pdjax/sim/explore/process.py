"""One process of the model: the real SenderSide or ReceiverSide, driven as the manager drives it, as a pure function.

``Processes.step(node, state, op) → Outcome``: the state is a tuple from which the side is built anew, the operation is
one thing that happens to it, the outcome is the next tuple and what leaves the process. Because it is pure it is
computed once for each (state, operation) of a search. Time is abstracted away: a timer is armed or not, and whoever
drives the process says when it fires. Must never decide what the table decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdjax.core import effects as fx
from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.budget import Budget
from pdjax.core.receiver import Candidate, Notice, PeerLife, ReceiverRoom, ReceiverSide
from pdjax.core.room import Event, IllegalEvent, Room, Transition
from pdjax.core.sender import Early, Limbo, LimboKey, Offer, SenderRoom, SenderSide
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Leg
from pdjax.sim.explore.config import Config
from pdjax.sim.explore.messages import FIRST, PARTS, POOLS, manifest, pack, unpack

PAGES = (1,)  # what the scheduler takes at a start
LATER = 1e9  # a time at which everything armed is over
NEVER = 1e18
GOT_LIFE_BITS = 24  # epoch = (life, node): attempts and uuids minted by different lives never meet

Frozen = tuple[Any, ...]
Op = tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """state: the next one. effects: what leaves the process, in order. lines: what the table decided.

    error: what must never happen inside a process ("" when all is well), as "PROPERTY: text".
    """

    state: Frozen
    effects: tuple[tuple[Any, ...], ...] = ()
    lines: tuple[Transition, ...] = ()
    error: str = ""


def record_state(node: Frozen, room: int) -> int:
    """State of a room on a frozen node (ABSENT: no record, or the node is down)."""
    if not node[1]:
        return t.ABSENT
    return next((r[1] for r in node[4] if r[0] == room), t.ABSENT)


# A frozen node: (role, up, life, links, rooms, minted, …). links: ((peer, newest epoch seen), …).
# P: …, early, limbo, charged.    D: …, peers.
ROLE, UP, LIFE, LINKS, ROOMS, MINTED = range(6)
EARLY, LIMBO, CHARGED = 6, 7, 8
PEERS = 6

# Fields of a frozen sender room.
(S_ROOM, S_STATE, S_ATTEMPT, S_DIGEST, S_PEER, S_PEER_EPOCH, S_CHARGED, S_UUID, S_OFFER, S_REGISTERED,
 S_TIMERS) = range(11)  # fmt: skip
# Fields of a frozen receiver room.
(R_ROOM, R_STATE, R_ATTEMPT, R_DIGEST, R_CANDIDATES, R_BOUND, R_BOUND_EPOCH, R_MANIFEST, R_PULLING, R_NOTICES,
 R_TIMERS) = range(11)  # fmt: skip


def room_of(node: Frozen, room: int) -> tuple[Any, ...] | None:
    return next((r for r in node[ROOMS] if r[0] == room), None) if node[UP] else None


class Processes:
    """The processes of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings = PDSettings(prefill_gate="gated" if config.gated else "eager")
        self.names = config.nodes
        self.index = {n: i for i, n in enumerate(self.names)}
        self._memo: dict[tuple[Frozen, str, Op], Outcome] = {}

    def epoch(self, node: str, life: int) -> int:
        return (life << GOT_LIFE_BITS) | (self.index[node] << 20)

    def role(self, node: str) -> str:
        return t.SENDER if node in self.config.prefills else t.RECEIVER

    def fingerprint(self, node: str) -> str:
        return "g" if node in self.config.alien else "f"

    def born(self, node: str, life: int) -> Frozen:
        if self.role(node) == t.SENDER:
            return (t.SENDER, True, life, (), (), 0, (), (), 0)
        return (t.RECEIVER, True, life, (), (), 0, ())

    def dead(self, node: str, life: int) -> Frozen:
        return (self.role(node), False, life, (), ())

    def step(self, node: str, state: Frozen, op: Op) -> Outcome:
        key = (state, node, op)
        found = self._memo.get(key)
        if found is None:
            run = _SenderRun if state[ROLE] == t.SENDER else _ReceiverRun
            found = self._memo[key] = run(self, node, state).perform(op)
        return found


class _Run:
    """One operation on one process: what KVManager does around the side, without ports and without time."""

    def __init__(self, processes: Processes, node: str, state: Frozen) -> None:
        self.ps, self.node, self.frozen = processes, node, state
        self.epoch = processes.epoch(node, state[LIFE])
        self.links: dict[str, int] = dict(state[LINKS])
        self.effects: list[tuple[Any, ...]] = []
        self.lines: list[Transition] = []

    def perform(self, op: Op) -> Outcome:
        try:
            self._perform(op)
            return Outcome(self.freeze(), tuple(self.effects), tuple(self.lines))
        except IllegalEvent as error:
            return Outcome(self.frozen, (), tuple(self.lines), f"S6: illegal: {error}")
        except ValueError as error:
            return Outcome(self.frozen, (), tuple(self.lines), f"S3: {error}")
        except Exception as error:  # a handler that raises stops the driver in real life
            return Outcome(self.frozen, (), tuple(self.lines), f"S11: {type(error).__name__}: {error}")

    def freeze(self) -> Frozen:
        raise NotImplementedError

    def handle(self, room: int, ev: Event, now: float = 0.0, leg: Leg | None = None) -> None:
        raise NotImplementedError

    def rooms_to_tell(self, peer: str, epoch: int) -> list[int]:
        raise NotImplementedError

    def _perform(self, op: Op) -> None:
        getattr(self, "_op_" + op[0])(*op[1:])

    def keep(self, effects: list[fx.Effect], line: Transition) -> None:
        self.lines.append(line)
        for e in effects:
            if isinstance(e, fx.Send):
                self.effects.append(("send", e.peer, self.links.get(e.peer, 0), pack(e.message)))
            elif isinstance(e, fx.Register):
                self.effects.append(("register", e.peer, e.epoch, e.room, e.uuid))
            elif isinstance(e, fx.Withdraw):
                self.effects.append(("withdraw", e.uuid))
            elif isinstance(e, fx.StartPull):
                self.effects.append(("pull", e.room, e.attempt, e.peer, e.epoch, e.manifest.uuid))
            elif isinstance(e, fx.AbandonPull):
                self.effects.append(("abandon", e.room, e.attempt))
            elif isinstance(e, fx.Deliver):
                self.effects.append(("deliver", e.room, e.attempt))
            elif isinstance(e, fx.Ended):
                self.effects.append(("ended", e.room))
            elif isinstance(e, fx.Answer):
                self.effects.append(("answer", e.room, e.status))
            elif isinstance(e, fx.Lookup):
                self.effects.append(("lookup", e.room))

    # ---- what happens on both sides

    def _op_frame(self, peer: str, epoch: int, message: tuple[Any, ...] | None) -> None:
        """A fresh frame of a life of the peer; message None: a bare stamp."""
        newest = self.links.get(peer, 0)
        if epoch < newest:
            return
        if 0 < newest < epoch:
            for room in self.rooms_to_tell(peer, epoch):
                self.handle(room, Event("peer_reborn", peer, epoch))
            self.effects.append(("drop", peer, newest))
        self.links[peer] = epoch
        self.heard(peer)
        if message is not None:
            m = unpack(message)
            self.handle(m.room, Event(wire.EVENT_OF[type(m)], peer, epoch, m))

    def heard(self, peer: str) -> None:
        pass

    def _op_leg(self, room: int, event: str, digest: str) -> None:
        reason = {"leg": "", "leg_bad": "bad_request", "leg_refused": "queue_full"}[event]
        self.handle(room, Event(event, reason=reason), leg=Leg(room, "r", digest, 1, "", None))

    def _op_local(self, room: int, event: str) -> None:
        self.handle(room, Event(event, reason="client_abort" if event == "abort_local" else ""))

    def _op_timer(self, room: int, kind: str) -> None:
        record = self.record(room)
        assert record is not None
        del record.timers[kind]
        self.handle(room, Event(t.TIMER_EVENTS[kind]))

    def record(self, room: int) -> Room | None:
        raise NotImplementedError

    def frozen_links(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(self.links.items()))


class _SenderRun(_Run):
    def __init__(self, processes: Processes, node: str, state: Frozen) -> None:
        super().__init__(processes, node, state)
        self.side = side = SenderSide(
            processes.settings, self.epoch, processes.fingerprint(node), 1,
            Budget(processes.config.budget_rooms, state[CHARGED]),
        )  # fmt: skip
        side.minter._next += state[MINTED]
        for r in state[ROOMS]:
            record = SenderRoom(r[S_ROOM], side)
            (_, record.state, record.attempt, record.digest, record.peer, record.peer_epoch,
             record.charged_bytes, record.uuid, _, record.registered, _) = r  # fmt: skip
            record.reason = "lost"
            record.offer = _offer(r[S_OFFER])
            record.timers = dict.fromkeys(r[S_TIMERS], 0.0)
            side.keep(record)
        for room, entries in state[EARLY]:
            side.early[room] = {
                (peer, attempt, digest): Early(kind, peer, epoch, attempt, digest, NEVER)
                for kind, peer, epoch, attempt, digest in entries
            }
            side.n_early += len(entries)
        for room, peer, attempt, epoch, uuid, n_bytes in state[LIMBO]:
            side.limbo[LimboKey(room, peer, attempt)] = Limbo(epoch, uuid, n_bytes, 0.0)

    def record(self, room: int) -> Room | None:
        return self.side.rooms.get(room)

    def rooms_to_tell(self, peer: str, epoch: int) -> list[int]:
        return self.side.rooms_of_older_life(peer, epoch)

    def handle(self, room: int, ev: Event, now: float = 0.0, leg: Leg | None = None) -> None:
        self.keep(*self.side.handle(room, ev, now, leg.digest if leg is not None else ""))

    def _op_admit(self, room: int) -> None:
        self.handle(room, Event("admit", data=1))

    def _op_kv_ready(self, room: int) -> None:
        self.handle(room, Event("kv_ready", data=Offer(object(), PARTS, 1, 1, FIRST)))

    def _op_limbo(self, room: int, peer: str, attempt: int) -> None:
        self.handle(room, Event("limbo_timer", data=LimboKey(room, peer, attempt)))

    def _op_early(self, room: int, key: tuple[str, int, str]) -> None:
        self.side.early[room][key].until = 0.0
        if room in self.side.rooms:
            self.side.forget_early(room, 0.0)
        else:
            self.handle(room, Event("early_timer"))

    def freeze(self) -> Frozen:
        side = self.side
        rooms = tuple(
            (r.room, r.state, r.attempt, r.digest, r.peer, r.peer_epoch, r.charged_bytes, r.uuid,
             _offer_code(r.offer), r.registered, tuple(sorted(r.timers)))
            for _, r in sorted(side.rooms.items())
        )  # fmt: skip
        early = tuple(
            (room, tuple(sorted((e.kind, e.peer, e.epoch, e.attempt, e.digest) for e in entries.values())))
            for room, entries in sorted(side.early.items())
        )
        limbo = tuple(
            sorted((k.room, k.peer, k.attempt, v.epoch, v.uuid, v.n_bytes) for k, v in side.limbo.items())
        )
        minted = side.minter._next - type(side.minter)(self.epoch)._next
        return (
            t.SENDER, True, self.frozen[LIFE], self.frozen_links(), rooms, minted, early, limbo,
            side.budget.charged_bytes,
        )  # fmt: skip


def _offer(code: int) -> Offer | None:
    return Offer(object() if code == 2 else None, PARTS, 1, 1, FIRST) if code else None


def _offer_code(offer: Offer | None) -> int:
    return 0 if offer is None else 1 if offer.packed is None else 2


class _ReceiverRun(_Run):
    def __init__(self, processes: Processes, node: str, state: Frozen) -> None:
        super().__init__(processes, node, state)
        self.side = side = ReceiverSide(processes.settings, self.epoch, processes.fingerprint(node), 1, POOLS)
        side.minter._next += state[MINTED]
        for r in state[ROOMS]:
            record = ReceiverRoom(r[R_ROOM], side)
            record.state, record.attempt, record.digest = r[R_STATE], r[R_ATTEMPT], r[R_DIGEST]
            record.bound, record.bound_epoch, record.pulling = r[R_BOUND], r[R_BOUND_EPOCH], r[R_PULLING]
            record.n_tokens, record.reason = 1, "lost"
            record.hello_gap_s = (
                processes.settings.hello_interval_s
            )  # looks in the registry at every repetition
            record.candidates = {c[0]: Candidate(*c) for c in r[R_CANDIDATES]}
            record.manifest = manifest(*r[R_MANIFEST]) if r[R_MANIFEST] else None
            record.notices = {peer: Notice(kind, peer, epoch, 0.0) for peer, kind, epoch in r[R_NOTICES]}
            record.timers = dict.fromkeys(r[R_TIMERS], 0.0)
            side.keep(record)
        for peer, waiting, answered in state[PEERS]:
            side.peers[peer] = PeerLife(0.0 if waiting else None, 0.0 if answered else float("-inf"))

    def record(self, room: int) -> Room | None:
        return self.side.rooms.get(room)

    def rooms_to_tell(self, peer: str, epoch: int) -> list[int]:
        return self.side.rooms_of(peer)

    def heard(self, peer: str) -> None:
        self.side.answered(peer, 0.0)

    def handle(self, room: int, ev: Event, now: float = 0.0, leg: Leg | None = None) -> None:
        self.keep(*self.side.handle(room, ev, now, leg))

    def _op_candidates(self, room: int, found: tuple[tuple[str, int], ...]) -> None:
        self.handle(room, Event("candidates", data=list(found)))

    def _op_start(self, room: int) -> None:
        self.handle(room, Event("start", data=PAGES))

    def _op_notice_life(self, room: int) -> None:
        """The notice timer, at a time when the life of every notice is over."""
        self.side.rooms[room].timers.pop("notice")
        self.handle(room, Event("notice_timer"), LATER)

    def _op_down(self, peer: str, event: str) -> None:
        """refused or peer_silence, as KVManager._peer_down."""
        self.side.gone(peer)
        for room in self.side.rooms_of(peer):
            self.handle(room, Event(event, peer))
        self.effects.append(("drop", peer, self.links.get(peer, 0)))

    def _op_graveyard(self, peer: str, epoch: int) -> None:
        for room in self.side.rooms_of(peer):
            record = self.side.rooms[room]
            if record.state == t.LETTERS["T"] and record.bound == peer:
                self.handle(room, Event("peer_failed", peer=peer))
        self.effects.append(("drop", peer, epoch))

    def _op_settled(self, room: int, attempt: int, ok: bool) -> None:
        """The pull has ended (KVManager._inbox_event): landed, failed, or an abandoned one is quiet."""
        record = self.side.rooms.get(room)
        if record is None or record.attempt != attempt:
            return
        if record.state == t.LETTERS["T"]:
            self.handle(room, Event("landed" if ok else "peer_failed", peer=record.bound))
        elif record.state == t.LETTERS["F"]:
            self.handle(room, Event("pull_settled"))

    def freeze(self) -> Frozen:
        side = self.side
        rooms = tuple(
            (r.room, r.state, r.attempt, r.digest,
             tuple(sorted((c.peer, c.noted_epoch, c.out) for c in r.candidates.values())),
             r.bound, r.bound_epoch, (r.manifest.uuid, r.manifest.digest) if r.manifest else (), r.pulling,
             tuple(sorted((n.peer, n.kind, n.epoch) for n in r.notices.values())), tuple(sorted(r.timers)))
            for _, r in sorted(side.rooms.items())
        )  # fmt: skip
        peers = tuple(
            (peer, life.waiting_since is not None, life.last_answer > float("-inf"))
            for peer, life in sorted(side.peers.items())
        )
        minted = side.minter._next - type(side.minter)(self.epoch)._next
        return (t.RECEIVER, True, self.frozen[LIFE], self.frozen_links(), rooms, minted, peers)
