"""Driver: what one turn of the driver thread does (design §1.2, protocol §7).

It reads frames and transport events, fires due timers, and has the table's effects performed (``Performer``). It
computes nothing and waits for nothing. Must never call a port under the manager's lock, import JAX or start a thread.
"""

from __future__ import annotations

import heapq
from typing import Any

from pdjax.core import effects as fx
from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.room import Event
from pdjax.engine.base import Packed
from pdjax.engine.performer import Performer
from pdjax.engine.ports import FrameIn, LookupDone, PullDone, PullSettled, Refused, TransportEvent
from pdjax.engine.rooms import DropPeer, ForgetSilentPeers, TickTransport


class Driver(Performer):
    """``turn`` while ``next_deadline`` is due; every method is of the driver thread."""

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
        if isinstance(event, LookupDone):
            self._looked_up(event)
            return
        with self._lock:
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
        with self._lock:
            record = self.receiver.rooms.get(done.tag)
            if record is None or done.tag not in self._legs:
                return
            entries = done.entries
            if not entries and done.rejected and not record.candidates:
                why = "; ".join(f"{name}: {reason}" for name, reason in done.rejected.items())
                self._safely(
                    done.tag, Event("no_candidate", detail=f"no compatible prefill instance ({why})")
                )
                return
        if done.error:
            self.counters.add("lookups_failed")
        for e in (
            entries
        ):  # without the lock: a P with another address, or one too many, has its connection closed
            self.peers.learn(e.instance_id, e.zmq_addr, self.ports.clock())
        with self._lock:
            if done.tag in self.receiver.rooms:
                self._safely(done.tag, Event("candidates", data=[(e.instance_id, e.epoch) for e in entries]))

    # ------------------------------------------------------------------ timers

    def _fire_timers(self) -> None:
        now = self.ports.clock()
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                at, _, timer = heapq.heappop(self._timers)
                if self._armed.get(timer) != at:  # a sooner one of the same key has fired in its place
                    continue
                del self._armed[timer]
                try:
                    self._fire(*timer, now)
                except Exception as e:
                    self._timer_failed(*timer, now, e)

    def _timer_failed(self, kind: str, key: Any, now: float, error: Exception) -> None:
        """A fault of ours in one handler: the others fire, and this one again, for what it was to end or free (S11)."""
        room = key if kind in t.TIMER_EVENTS or kind == "early" else key.room if kind == "limbo" else None
        self._failed(f"{kind}_timer", room, error)
        record = self.rooms.get(key) if kind in t.TIMER_EVENTS else None
        if record is not None:
            record.timers.setdefault(kind, now + self._tick_s)
        self._arm((kind, key), now + self._tick_s)

    def _fire(self, kind: str, key: Any, now: float) -> None:
        if kind == "tick":
            self._arm(("tick", None), now + self._tick_s)
            self._keep([TickTransport(), ForgetSilentPeers(now - self.settings.withdrawn_life_s)])
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
