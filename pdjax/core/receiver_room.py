"""One room on D: its candidates, its P, its notices (protocol §5).

Pure: events and times come in, effects go out. Must never call a port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.effects import (
    AbandonPull,
    ArmTimer,
    Deliver,
    Effect,
    Lookup,
    PageQueue,
    Send,
    StartPull,
)
from pdjax.core.pools import Manifest, carries, pages_for
from pdjax.core.room import Event, Room, Transition

if TYPE_CHECKING:
    from pdjax.core.receiver import ReceiverSide

FIRST_GAP_S = 0.02  # first gap of the hello and notice backoff (protocol §3)


@dataclass
class Candidate:
    """A P that may have the room, and the life of it that the registry showed at intake."""

    peer: str
    noted_epoch: int
    out: bool = False


@dataclass
class Notice:
    """done or abort, to one P: repeated until answered (protocol §3)."""

    kind: str
    peer: str
    epoch: int  # the life of P that it is for, 0: not known
    since: float
    gap_s: float = FIRST_GAP_S
    due: float = 0.0


class ReceiverRoom(Room):
    """One room on D. ``attempt`` is also the token that owns the pages."""

    role = t.RECEIVER

    def __init__(self, room: int, side: ReceiverSide) -> None:
        super().__init__(room, side.settings)
        self.side = side
        self.n_tokens = 0  # of the prompt
        self.candidates: dict[str, Candidate] = {}
        self.fresh_candidates: list[str] = []  # of the latest look-up
        self.bound = ""
        self.bound_epoch = 0
        self.manifest: Manifest | None = None
        self.pulling = False
        self.notices: dict[str, Notice] = {}
        self.n_noted = 0  # of them in ReceiverSide.n_notices
        self.hello_gap_s = FIRST_GAP_S

    def concerns(self) -> dict[str, None]:
        """A tombstone has only its notices to lose (the table's rows for S and F: end_notice)."""
        if not self.live:
            return dict.fromkeys(self.notices)
        bound = (self.bound,) if self.bound else ()
        return dict.fromkeys((*bound, *self.candidates, *self.notices))

    # conditions

    def _if_from_candidate(self, ev: Event) -> bool:
        c = self.candidates.get(ev.peer)
        return c is not None and not c.out

    def _if_last_candidate(self, ev: Event) -> bool:
        return all(c.out or c.peer == ev.peer for c in self.candidates.values())

    def _if_from_bound(self, ev: Event) -> bool:
        return bool(self.bound) and ev.peer == self.bound

    def _if_newer_life(self, ev: Event) -> bool:
        if self.bound:
            return ev.epoch > self.bound_epoch
        c = self.candidates.get(ev.peer)
        return c is not None and ev.epoch > c.noted_epoch

    def _if_agrees(self, ev: Event) -> bool:
        return isinstance(ev.msg, wire.Ready) and not self._disagreement(ev.msg.manifest)

    def _disagreement(self, m: Manifest) -> str:
        """What the manifest states that this request does not need; "" when it fits (S7, S10)."""
        side = self.side
        n_pages = pages_for(self.n_tokens, side.page_size)
        for name, theirs, ours in (
            ("digest", m.digest, self.digest),
            ("fingerprint", m.fingerprint, side.fingerprint),
            ("page_size", m.page_size, side.page_size),
            ("n_tokens", m.n_tokens, self.n_tokens),
            ("n_pages", m.n_pages, n_pages),
        ):
            if theirs != ours:
                return f"{name} is {theirs}, this request needs {ours}"
        if not m.parts or not carries(m.parts, side.pools, n_pages):
            return "the parts do not carry exactly this request's pages"
        return ""

    def _if_has_uuid(self, ev: Event) -> bool:
        return self.manifest is not None

    def _if_same_uuid(self, ev: Event) -> bool:
        return (
            self.manifest is not None
            and isinstance(ev.msg, wire.Ready)
            and ev.msg.manifest.uuid == self.manifest.uuid
        )

    def _if_uuid_mine(self, ev: Event) -> bool:
        return self.manifest is not None and getattr(ev.msg, "uuid", 0) == self.manifest.uuid

    def _if_pages_taken(self, ev: Event) -> bool:
        return ev.data is not None and len(ev.data) > 0

    def _if_fresh(self, ev: Event) -> bool:
        return self.side.fresh(self.bound)

    def _if_quiet(self, ev: Event) -> bool:
        return not self.pulling

    def _if_echo(self, ev: Event) -> bool:
        return isinstance(ev.msg, wire.Failed) and ev.msg.echo

    def _if_noticed(self, ev: Event) -> bool:
        return ev.peer in self.notices

    def _if_notice_epoch(self, ev: Event) -> bool:
        n = self.notices.get(ev.peer)
        return n is not None and ev.epoch >= n.epoch

    def _if_no_notice(self, ev: Event) -> bool:
        return not self.notices

    # effects: finding P

    def _do_mint_attempt(self, ev: Event, now: float) -> None:
        self.attempt = self.side.minter.mint()

    def _do_lookup(self, ev: Event, now: float) -> Effect:
        return Lookup(self.room)

    def _do_note_candidates(self, ev: Event, now: float) -> None:
        self.fresh_candidates = [peer for peer, _ in ev.data if peer not in self.candidates]
        for peer, epoch in ev.data:
            self.candidates.setdefault(peer, Candidate(peer, epoch))
        self.hello_gap_s = min(self.hello_gap_s, FIRST_GAP_S * 4)

    def _do_drop_candidate(self, ev: Event, now: float) -> None:
        self.candidates[ev.peer].out = True

    def _do_say_hello(self, ev: Event, now: float) -> list[Effect]:
        """To the bound P, or to every candidate; looks again in the registry while none has answered pending."""
        targets = [self.bound] if self.bound else [c.peer for c in self.candidates.values() if not c.out]
        hello = wire.Hello(
            room=self.room,
            attempt=self.attempt,
            ack_epoch=self.bound_epoch,
            fingerprint=self.side.fingerprint,
            digest=self.digest,
        )
        gap = self.settings.renew_s if self.bound else self.hello_gap_s
        self.hello_gap_s = min(self.hello_gap_s * 2, self.settings.hello_interval_s)
        out: list[Effect] = [Send(peer, hello) for peer in targets]
        for peer in targets:
            out += self.side.hello_sent(peer, now)
        # Only the timer looks again: an answer that led to the next look-up at once would never end (decision 0004).
        again = not targets or gap >= self.settings.hello_interval_s
        if ev.name == "hello_timer" and not self.bound and again:
            out.append(Lookup(self.room))
        return [*out, self._arm("hello", now, gap)]

    def _do_bind_peer(self, ev: Event, now: float) -> Effect:
        self.bound, self.bound_epoch = ev.peer, ev.epoch
        self.timers.pop("bootstrap", None)
        return self._arm("hello", now, self.settings.renew_s)

    # effects: notices

    def _notify(self, kind: str, peers: list[str], now: float) -> list[Effect]:
        out: list[Effect] = []
        for peer in peers:
            epoch = self.bound_epoch if peer == self.bound else 0
            self.notices[peer] = Notice(kind, peer, epoch, now)
            out += self._send_notice(self.notices[peer], now)
        return [*out, *self._arm_notice()]

    def _send_notice(self, n: Notice, now: float) -> list[Effect]:
        n.due, n.gap_s = now + n.gap_s, min(n.gap_s * 2, self.settings.hello_interval_s)
        uuid = self.manifest.uuid if self.manifest is not None and n.peer == self.bound else 0
        if n.kind == "done":
            return [Send(n.peer, wire.Done(room=self.room, attempt=self.attempt, uuid=uuid))]
        return [Send(n.peer, self._abort(uuid))]

    def _abort(self, uuid: int) -> wire.Abort:
        return wire.Abort(
            room=self.room,
            attempt=self.attempt,
            uuid=uuid,
            quiet=not self.pulling,
            reason=self.reason or "client_abort",
            digest=self.digest,
        )

    def _arm_notice(self) -> list[Effect]:
        if not self.notices:
            self.timers.pop("notice", None)
            return []
        due = min(n.due for n in self.notices.values())
        self.timers["notice"] = due
        return [ArmTimer(("notice", self.room), due)]

    def _others(self) -> list[str]:
        return [c.peer for c in self.candidates.values() if c.peer != self.bound and not c.out]

    def _do_abort_others(self, ev: Event, now: float) -> list[Effect]:
        return self._notify("abort", self._others(), now)

    def _do_abort_dropped(self, ev: Event, now: float) -> list[Effect]:
        return self._notify("abort", [ev.peer], now)

    def _do_notice_abort(self, ev: Event, now: float) -> list[Effect]:
        if ev.name == "candidates":  # the room ended before anybody could be told
            peers = [] if self.bound else self.fresh_candidates
        else:
            peers = [self.bound] if self.bound else self._others()
        return self._notify("abort", peers, now)

    def _do_notice_done(self, ev: Event, now: float) -> list[Effect]:
        self.pulling = False
        return self._notify("done", [self.bound], now)

    def _do_notice_again(self, ev: Event, now: float) -> list[Effect]:
        """The peer shows that it has not heard: say it again, now for the life that spoke."""
        n = self.notices.get(ev.peer)
        if n is None:
            kind = "done" if self.state == t.LETTERS["S"] else "abort"
            n = self.notices[ev.peer] = Notice(kind, ev.peer, ev.epoch, now)
        n.epoch = max(n.epoch, ev.epoch)
        return [*self._send_notice(n, now), *self._arm_notice()]

    def _do_notice_quiet(self, ev: Event, now: float) -> list[Effect]:
        self.pulling = False
        out: list[Effect] = []
        for n in self.notices.values():
            n.gap_s = FIRST_GAP_S
            out += self._send_notice(n, now)
        return [*out, *self._arm_notice()]

    def _do_repeat_notice(self, ev: Event, now: float) -> list[Effect]:
        out: list[Effect] = []
        for n in list(self.notices.values()):
            if n.due > now:
                continue
            if not self.pulling and now - n.since > self.settings.notice_life_s:
                del self.notices[n.peer]
            else:
                out += self._send_notice(n, now)
        return [*out, *self._arm_notice()]

    def _do_end_notice(self, ev: Event, now: float) -> list[Effect]:
        n = self.notices.get(ev.peer)
        if n is None or (ev.name == "peer_reborn" and ev.epoch <= n.epoch):
            return []
        del self.notices[ev.peer]
        return self._arm_notice()

    def _do_reply_abort(self, ev: Event, now: float) -> Effect:
        """Once, not a notice: whoever it is holds a room for us that we do not have."""
        assert ev.msg is not None
        uuid = ev.msg.manifest.uuid if isinstance(ev.msg, wire.Ready) else 0
        digest = ev.msg.manifest.digest if isinstance(ev.msg, wire.Ready) else self.digest
        return Send(
            ev.peer,
            wire.Abort(
                room=self.room, attempt=ev.msg.attempt, uuid=uuid, quiet=True, reason="lost", digest=digest
            ),
        )

    def _do_renew_tombstone(self, ev: Event, now: float) -> Effect:
        return self._arm("tombstone", now, self.settings.tombstone_life_s)

    # effects: bytes

    def _do_note_ready(self, ev: Event, now: float) -> Effect:
        assert isinstance(ev.msg, wire.Ready)
        self.manifest = ev.msg.manifest
        return PageQueue(self.room, ev.msg.manifest, ev.msg.first)

    def _do_start_pull(self, ev: Event, now: float) -> list[Effect]:
        assert self.manifest is not None
        self.pulling = True
        m = self.manifest
        pull = StartPull(self.room, self.attempt, self.bound, self.bound_epoch, m, m.parts)
        return [pull, self._arm("transfer", now, self.settings.transfer_timeout_s)]

    def _do_deliver(self, ev: Event, now: float) -> Effect:
        self.pulling = False  # settled: nothing of this attempt can touch P's bytes any more
        return Deliver(self.room, self.attempt, ev.data)

    def _do_abandon_pull(self, ev: Event, now: float) -> Effect | None:
        return AbandonPull(self.room, self.attempt) if self.pulling else None

    def handle(self, ev: Event, now: float) -> tuple[list[Effect], Transition]:
        if ev.name == "peer_failed":
            self.pulling = False  # every part of the pull has ended
        if isinstance(ev.msg, wire.Ready) and self.live and not ev.detail:
            ev.detail = self._disagreement(ev.msg.manifest)
        return super().handle(ev, now)
