"""P's side of the hand-off: sender rooms, early entries, limbo, the unpulled budget (protocol §4, §6).

Pure: events and times come in, effects go out. Must never call a port.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.budget import Budget, Slot
from pdjax.core.by_peer import RoomsByPeer
from pdjax.core.effects import (
    Answer,
    ArmTimer,
    BudgetFreed,
    Count,
    Effect,
    Register,
    ReturnSlot,
    Send,
    Wanted,
    Withdraw,
)
from pdjax.core.identity import Minter
from pdjax.core.pools import Manifest, Part
from pdjax.core.reasons import REASONS
from pdjax.core.room import STATUS_OF_PEERS_WORD, Event, Room, Transition
from pdjax.core.settings import PDSettings

_F, _T = t.LETTERS["F"], t.LETTERS["T"]


@dataclass(frozen=True)
class LimboKey:
    """Bytes that a life of D may still be reading: they belong to its attempt, not to the room record."""

    room: int
    peer: str
    attempt: int


@dataclass
class Limbo:
    epoch: int
    uuid: int
    n_bytes: int
    until: float
    slot: Slot | None = None


@dataclass
class Early:
    """A hello or abort whose leg has not come. An abort replaces a hello, never the reverse. reason: the abort's."""

    kind: str
    peer: str
    epoch: int
    attempt: int
    digest: str
    until: float
    reason: str = ""


@dataclass
class Offer:
    """What kv_ready brings: private packed arrays and what D must know of them."""

    packed: Any
    parts: tuple[Part, ...]
    n_tokens: int
    n_pages: int
    first: wire.FirstToken


class SenderRoom(Room):
    """One room on P. peer, peer_epoch and attempt are set when a hello binds it."""

    role = t.SENDER

    def __init__(self, room: int, side: SenderSide) -> None:
        super().__init__(room, side.settings)
        self.side = side
        self.peer = ""
        self.peer_epoch = 0
        self.charged_bytes = 0
        self.slot: Slot | None = None  # of the bytes, where they are staged
        self.uuid = 0
        self.offer: Offer | None = None
        self.registered = False

    @property
    def wanted(self) -> bool:
        """Its prompt may be prefilled as far as D is concerned: gated, only once D has said hello."""
        return bool(self.peer) or not self.settings.gated

    def concerns(self) -> dict[str, None]:
        """Bytes in limbo outlive the room: they are looked up beside (``rooms_of_older_life``)."""
        return {self.peer: None} if self.live and self.peer else {}

    # conditions

    def _early(self) -> Early | None:
        """The newest early entry for this leg; a leg without a digest (a bad one) takes any."""
        entries = self.side.early.get(self.room, {}).values()
        return max(
            (e for e in entries if self.digest in ("", e.digest)), key=lambda e: e.attempt, default=None
        )

    def _if_early_hello(self, ev: Event) -> bool:
        early = self._early()
        return early is not None and early.kind == "hello"

    def _if_early_abort(self, ev: Event) -> bool:
        early = self._early()
        return early is not None and early.kind == "abort"

    def _if_ack_none(self, ev: Event) -> bool:
        return isinstance(ev.msg, wire.Hello) and ev.msg.ack_epoch == 0

    def _if_ack_foreign(self, ev: Event) -> bool:
        return isinstance(ev.msg, wire.Hello) and ev.msg.ack_epoch not in (0, self.side.epoch)

    def _if_foreign_fingerprint(self, ev: Event) -> bool:
        return isinstance(ev.msg, wire.Hello) and ev.msg.fingerprint != self.side.fingerprint

    def _if_foreign_digest(self, ev: Event) -> bool:
        if isinstance(ev.msg, wire.Abort) and self.peer == ev.peer and self.attempt == ev.msg.attempt:
            return False  # our own D's abort; it may not know the digest any more
        said = getattr(ev.msg, "digest", "")
        return bool(self.digest) and said != self.digest

    def _if_bound(self, ev: Event) -> bool:
        if ev.name == "peer_reborn":
            return self.peer == ev.peer and self.peer_epoch < ev.epoch
        return bool(self.peer)

    def _if_gated(self, ev: Event) -> bool:
        return self.settings.gated

    def _if_budget_free(self, ev: Event) -> bool:
        return self.side.budget.can(int(ev.data))

    def _if_attempt_newer(self, ev: Event) -> bool:
        return bool(self.peer) and ev.msg is not None and ev.msg.attempt > self.attempt

    def _if_attempt_older(self, ev: Event) -> bool:
        if not self.peer or ev.msg is None:
            return False
        return ev.msg.attempt < self.attempt or (ev.msg.attempt == self.attempt and ev.peer != self.peer)

    def _if_uuid_mine(self, ev: Event) -> bool:
        return self.registered and getattr(ev.msg, "uuid", 0) == self.uuid

    def _if_uuid_of_my_epoch(self, ev: Event) -> bool:
        return self.side.minter.minted(getattr(ev.msg, "uuid", 0))

    def _if_quiet(self, ev: Event) -> bool:
        return bool(getattr(ev.msg, "quiet", False))

    # effects: early entries and binding

    def _do_remember_early(self, ev: Event, now: float) -> list[Effect]:
        return self.side.remember_early(ev, now)

    def _do_forget_early(self, ev: Event, now: float) -> None:
        self.side.forget_early(self.room, now if ev.name == "early_timer" else None)

    def _do_answer_refused(self, ev: Event, now: float) -> Effect:
        """In D's words, if D has ended it already: wrong or aborted on both legs, else as worth another try as D said."""
        early = self._early()
        if early is None or early.kind != "abort" or early.reason not in REASONS:
            return super()._do_answer_refused(ev, now)
        return Answer(self.room, STATUS_OF_PEERS_WORD.get(early.reason, 503), early.reason)

    def _do_bind(self, ev: Event, now: float) -> list[Effect]:
        assert ev.msg is not None
        waited = not self.wanted  # for this hello (V11)
        self.peer, self.peer_epoch, self.attempt = ev.peer, ev.epoch, ev.msg.attempt
        self.timers.pop("bootstrap", None)  # D is there: from here the lease says whether it stays
        lease = self._arm("lease", now, self.settings.lease_s)
        return [lease, Wanted(self.room)] if waited else [lease]

    def _do_bind_early(self, ev: Event, now: float) -> Effect:
        early = self._early()
        assert early is not None
        self.peer, self.peer_epoch, self.attempt = early.peer, early.epoch, early.attempt
        return self._arm("lease", now, self.settings.lease_s)

    def _do_renew(self, ev: Event, now: float) -> Effect:
        self.peer_epoch = max(self.peer_epoch, ev.epoch)
        return self._arm("lease", now, self.settings.lease_s)

    # effects: messages

    def _reply(self, ev: Event, kind: Callable[..., wire.AnyMessage], **fields: Any) -> Effect | None:
        """To whoever sent ev, or to the bound D when nothing was sent."""
        peer = ev.peer if ev.msg is not None else self.peer
        attempt = ev.msg.attempt if ev.msg is not None else self.attempt
        return Send(peer, kind(room=self.room, attempt=attempt, **fields)) if peer else None

    def _do_say_unknown(self, ev: Event, now: float) -> Effect | None:
        return self._reply(ev, wire.Unknown)

    def _do_say_pending(self, ev: Event, now: float) -> Effect | None:
        return self._reply(ev, wire.Pending)

    def _do_say_ready(self, ev: Event, now: float) -> Effect | None:
        assert self.offer is not None
        manifest = Manifest(
            uuid=self.uuid,
            transfer_address="",  # the driver fills in that D's own server
            n_tokens=self.offer.n_tokens,
            n_pages=self.offer.n_pages,
            page_size=self.side.page_size,
            fingerprint=self.side.fingerprint,
            digest=self.digest,
            parts=self.offer.parts,
        )
        return self._reply(
            ev, wire.Ready, manifest=manifest, lease_s=self.settings.lease_s, first=self.offer.first
        )

    def _failed(self, ev: Event, echo: bool) -> Effect | None:
        return self._reply(
            ev, wire.Failed, echo=echo, reason=self.reason or "lost", message=self.detail[:512]
        )

    def _do_say_failed(self, ev: Event, now: float) -> Effect | None:
        return self._failed(ev, False)

    def _do_say_failed_echo(self, ev: Event, now: float) -> Effect | None:
        return self._reply(ev, wire.Failed, echo=True, reason=self.reason or self.row_reason or "lost")

    def _do_answer_abort(self, ev: Event, now: float) -> Effect | None:
        return self._failed(ev, self._if_quiet(ev))

    def _do_say_done_ack(self, ev: Event, now: float) -> Effect | None:
        return self._reply(ev, wire.DoneAck, uuid=getattr(ev.msg, "uuid", self.uuid))

    # effects: bytes

    def _do_reserve(self, ev: Event, now: float) -> None:
        self.slot = self.side.budget.charge(int(ev.data))
        self.charged_bytes = int(ev.data)

    def _do_keep_arrays(self, ev: Event, now: float) -> Effect:
        assert isinstance(ev.data, Offer)
        self.offer = ev.data
        self.uuid = self.side.minter.mint()
        return self._arm("lease", now, self.settings.lease_s)

    def _do_register(self, ev: Event, now: float) -> Effect:
        assert self.offer is not None
        self.registered = True
        packed, self.offer.packed = self.offer.packed, None  # from here the transport alone holds the arrays
        return Register(self.peer, self.peer_epoch, self.room, self.uuid, packed)

    def _do_drop_arrays(self, ev: Event, now: float) -> None:
        self.offer = None

    def _do_release_arrays(self, ev: Event, now: float) -> Effect:
        self.offer = None
        return Withdraw(self.peer, self.peer_epoch, self.room, self.uuid)

    def _do_withdraw(self, ev: Event, now: float) -> Effect:
        self.offer = None
        return Withdraw(self.peer, self.peer_epoch, self.room, self.uuid)

    def _do_withdraw_again(self, ev: Event, now: float) -> Effect | None:
        uuid = getattr(ev.msg, "uuid", 0)
        return Withdraw(ev.peer, ev.epoch, self.room, uuid) if self.side.minter.minted(uuid) else None

    def _do_free_budget(self, ev: Event, now: float) -> list[Effect]:
        freed, self.charged_bytes = self.charged_bytes, 0
        slot, self.slot = self.slot, None
        self.side.budget.give_back(freed)
        out: list[Effect] = [BudgetFreed(self.room, freed)]
        if slot is not None:
            out.append(ReturnSlot(self.room, slot, not self.registered or _says_quiet(ev)))
        return out

    def _do_to_limbo(self, ev: Event, now: float) -> Effect:
        until = now + self.settings.limbo_timeout_s
        key = LimboKey(self.room, self.peer, self.attempt)
        self.side.limbo[key] = Limbo(self.peer_epoch, self.uuid, self.charged_bytes, until, self.slot)
        self.charged_bytes, self.slot = 0, None
        return ArmTimer(("limbo", key), until)

    def _do_free_limbo(self, ev: Event, now: float) -> list[Effect]:
        if ev.name == "limbo_timer":
            return self.side.free_limbo([ev.data], quiet=False)
        if ev.name == "peer_reborn":
            keys = [
                k
                for k, v in self.side.limbo.items()
                if k.room == self.room and k.peer == ev.peer and v.epoch < ev.epoch
            ]
            return self.side.free_limbo(keys, quiet=False)
        assert ev.msg is not None
        return self.side.free_limbo([LimboKey(self.room, ev.peer, ev.msg.attempt)], quiet=_says_quiet(ev))

    def _do_count_late_done(self, ev: Event, now: float) -> Effect:
        return Count("late_done")


def _says_quiet(ev: Event) -> bool:
    """D itself says that no pull of its attempt can touch the bytes any more: it has scattered them, or gave them up."""
    return isinstance(ev.msg, wire.Done) or bool(getattr(ev.msg, "quiet", False))


@dataclass
class SenderSide:
    """All of P's protocol state. ``rooms`` holds live rooms and tombstones."""

    settings: PDSettings
    epoch: int
    fingerprint: str
    page_size: int
    budget: Budget
    rooms: dict[int, SenderRoom] = field(default_factory=dict)  # written by ``keep``
    early: OrderedDict[int, dict[tuple[str, int, str], Early]] = field(default_factory=OrderedDict)
    limbo: dict[LimboKey, Limbo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.minter = Minter(self.epoch)
        self.n_early = 0
        self._by_peer = RoomsByPeer(self.rooms)

    def handle(self, room: int, ev: Event, now: float, digest: str = "") -> tuple[list[Effect], Transition]:
        """One event for one room, which may not exist. digest: the leg's, for events that create a record."""
        record = self.rooms.get(room)
        if record is None:
            record = SenderRoom(room, self)
            record.digest = digest
        effects, line = record.handle(ev, now)
        self.keep(record)
        return effects, line

    def keep(self, record: SenderRoom) -> None:
        """After each event, and for a record that is set up in a state."""
        self._by_peer.keep(record)

    def rooms_of_older_life(self, peer: str, epoch: int) -> list[int]:
        """Rooms bound to, or in limbo for, a life of that peer before epoch."""
        bound = [r.room for r in self._by_peer.of(peer) if r.peer_epoch < epoch]
        limbo = [k.room for k, v in self.limbo.items() if k.peer == peer and v.epoch < epoch]
        return list(dict.fromkeys(bound + limbo))

    def free_limbo(self, keys: list[LimboKey], *, quiet: bool) -> list[Effect]:
        """quiet: nothing reads these bytes any more. After the timer, or a rebirth, that is hoped and not known."""
        freed: list[Effect] = []
        for key in keys:
            entry = self.limbo.pop(key, None)
            if entry is not None:
                self.budget.give_back(entry.n_bytes)
                freed.append(BudgetFreed(key.room, entry.n_bytes))
                if entry.slot is not None:
                    freed.append(ReturnSlot(key.room, entry.slot, quiet))
        return freed

    def remember_early(self, ev: Event, now: float) -> list[Effect]:
        """Bounded, least recently said goes first (S12)."""
        assert isinstance(ev.msg, wire.Hello | wire.Abort)
        msg, kind = ev.msg, wire.EVENT_OF[type(ev.msg)]
        entries = self.early.setdefault(msg.room, {})
        self.early.move_to_end(msg.room)
        key = (ev.peer, msg.attempt, msg.digest)
        old = entries.get(key)
        if old is not None and old.kind == "abort":
            kind = "abort"
        reason = msg.reason if isinstance(msg, wire.Abort) else old.reason if old is not None else ""
        until = now + self.settings.bootstrap_timeout_s
        entries[key] = Early(kind, ev.peer, ev.epoch, msg.attempt, msg.digest, until, reason)
        self.n_early += old is None
        out: list[Effect] = [ArmTimer(("early", msg.room), until)]
        while self.n_early > self.settings.max_early:
            victim = next(iter(self.early))
            self.n_early -= len(self.early.pop(victim))
            out.append(Count("early_dropped"))
        return out

    def forget_early(self, room: int, now: float | None) -> None:
        """All entries of a room (now None: its leg has come), or those that are due."""
        entries = self.early.get(room, {})
        due = [k for k, e in entries.items() if now is None or e.until <= now]
        for key in due:
            del entries[key]
        self.n_early -= len(due)
        if not entries:
            self.early.pop(room, None)
