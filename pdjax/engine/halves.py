"""Sender and Receiver: one room's half as a scheduler holds it (RFC-2 §5.1).

Scheduler thread only; a call runs the table through the manager and never waits. Must never touch a port.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdjax.core import transitions as t
from pdjax.core.errors import PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.reasons import explain
from pdjax.core.receiver import ReceiverRoom
from pdjax.core.room import Event
from pdjax.core.sender import Offer, SenderRoom
from pdjax.engine.base import BaseKVReceiver, BaseKVSender, FirstToken

if TYPE_CHECKING:
    from pdjax.engine.rooms import LockedRooms


class _Half:
    """What a sender and a receiver share: the record may outlive its place in the table, so it is held."""

    _record: SenderRoom | ReceiverRoom

    def __init__(self, manager: LockedRooms, room: int) -> None:
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
        return PDError(r.detail or explain(r.reason), reason=r.reason, status=r.status, room=r.room)


class Sender(_Half, BaseKVSender):
    """P's half of one room, for the scheduler thread."""

    def __init__(self, manager: LockedRooms, room: int, record: SenderRoom) -> None:
        super().__init__(manager, room)
        self._record: SenderRoom = record

    def wanted(self) -> bool:
        return self._record.wanted

    def admit(self, n_bytes: int) -> bool:
        manager, record = self._manager, self._record
        with manager._lock:  # else the slot could come back before the log says that it was taken
            manager.event(self.room, Event("admit", data=n_bytes))
            if record.slot is not None:
                manager.note("slot_taken", self.room, slot=record.slot.number, nbytes=record.slot.n_bytes)
            return record.state == t.LETTERS["W"]

    def send(self, kv_indices: Sequence[int], first: FirstToken) -> bool:
        if self._record.state != t.LETTERS["W"]:
            return False
        manager = self._manager
        packed = manager._runner.gather(kv_indices, self._record.slot)
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

    def __init__(self, manager: LockedRooms, bootstrap_addr: str, room: int, record: ReceiverRoom) -> None:
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
