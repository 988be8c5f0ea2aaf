"""The rooms of one side, and which of them a peer's end or rebirth can change.

That is asked under the manager's lock at every refusal, silence and rebirth, when the table may be full of tombstones
(S12): walking all of them takes longer than protocol §7 lets an answer take. So it is noted whenever a room changes, in
``keep`` alone. Must never decide anything: what a room does with the event stands in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from pdjax.core import transitions as t


class _Kept(Protocol):
    room: int
    state: int
    serial: int
    noted: Mapping[str, None]

    def concerns(self) -> Mapping[str, None]: ...


R = TypeVar("R", bound=_Kept)


class RoomsByPeer(Generic[R]):
    """rooms: live ones and tombstones, in the order in which they came; everybody may read it, ``keep`` alone writes it."""

    def __init__(self, rooms: dict[int, R]) -> None:
        self._rooms = rooms
        self._of: dict[str, dict[int, R]] = {}
        self._serial = 0

    def keep(self, record: R) -> None:
        """After each event of that room: into the table, out of it once it is absent, and under the peers of now."""
        old = self._rooms.get(record.room)
        if record.state == t.ABSENT:
            if old is record:
                del self._rooms[record.room]
                self._note(record, {})
            return
        if old is not record:
            self._serial += 1
            record.serial = self._serial
            if old is not None:  # a dict keeps the place of what is replaced
                record.serial = old.serial
                self._note(old, {})
            self._rooms[record.room] = record
        self._note(record, record.concerns())

    def _note(self, record: R, peers: Mapping[str, None]) -> None:
        if peers == record.noted:
            return
        for peer in record.noted:
            if peer not in peers:
                rooms = self._of[peer]
                del rooms[record.room]
                if not rooms:
                    del self._of[peer]
        for peer in peers:
            self._of.setdefault(peer, {})[record.room] = record
        record.noted = peers

    def of(self, peer: str) -> list[R]:
        """In the order of ``rooms``, whenever each of them met that peer: runs are repeated event by event."""
        return sorted(self._of.get(peer, {}).values(), key=lambda record: record.serial)
