"""What a room waits for and which of its timers fires next, read from the table.

An operator asks why a request is stuck; the answer must be the rules that run, so it is made of the rows of
``transitions`` and of the record's own deadlines, and nothing here knows a rule of its own. Only looks: must never
change a record, and must never show a prompt or a token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pdjax.core import transitions as t
from pdjax.core.receiver_room import ReceiverRoom
from pdjax.core.room import Event, Room
from pdjax.core.sender import SenderRoom

_ONWARD = {
    (role, state): [r for r in t.ROWS if r.role == role and letter in r.states and r.to not in ("=", "F")]
    for role in (t.SENDER, t.RECEIVER)
    for letter, state in t.LETTERS.items()
}


@dataclass(frozen=True)
class Wait:
    """An event that would take the room on. needs: conditions of its row that do not hold yet, or that come with it."""

    event: str
    to: str
    why: str
    needs: dict[str, str]


@dataclass(frozen=True)
class Alarm:
    """A timer and what it would do if it fired now. to: the state it leads to, the same one when the room stays."""

    timer: str
    in_s: float
    event: str
    to: str
    reason: str
    why: str


@dataclass(frozen=True)
class RoomView:
    """One room. reason, detail: why it has failed, if it has. peer: "" while nobody is bound; asking: D's candidates that have not refused.

    held_bytes: P: charged to the unpulled budget; D: what P has stated, pulled or to be pulled. ends: the first alarm
    that would end the room.
    """

    room: int
    role: str
    state: str
    age_s: float
    state_s: float
    reason: str
    detail: str
    attempt: int
    peer: str
    peer_epoch: int
    asking: tuple[str, ...]
    held_bytes: int
    held_pages: int
    waits_for: tuple[Wait, ...]
    alarms: tuple[Alarm, ...]
    ends: Alarm | None

    def to_json(self) -> dict[str, Any]:
        """Numbers above 2^53 as text, as in the event log."""
        return {
            **asdict(self),
            "room": str(self.room),
            "attempt": str(self.attempt),
            "peer_epoch": str(self.peer_epoch),
        }


def asking_of(record: ReceiverRoom) -> tuple[str, ...]:
    """D's candidates that have not refused."""
    return tuple(c.peer for c in record.candidates.values() if not c.out)


def view(record: SenderRoom | ReceiverRoom, now: float) -> RoomView:
    """The room as it is at ``now``. Call it under the lock that guards the record."""
    asking: tuple[str, ...] = ()
    if isinstance(record, SenderRoom):
        peer, epoch = record.peer, record.peer_epoch
        held_bytes, held_pages = record.charged_bytes, record.offer.n_pages if record.offer else 0
    else:
        peer, epoch = record.bound, record.bound_epoch
        if not peer:
            asking = asking_of(record)
        stated = record.manifest
        held_bytes, held_pages = (stated.nbytes, stated.n_pages) if stated else (0, 0)
    alarms = _alarms(record, now)
    stays = t.STATE_NAMES[record.state]
    return RoomView(
        room=record.room,
        role=record.role,
        state=stays,
        age_s=round(now - record.opened, 3),
        state_s=round(now - record.since, 3),
        reason=record.reason,
        detail=record.detail,
        attempt=record.attempt,
        peer=peer,
        peer_epoch=epoch,
        asking=asking,
        held_bytes=held_bytes,
        held_pages=held_pages,
        waits_for=_waits(record),
        alarms=alarms,
        ends=next((a for a in alarms if a.to != stays), None),
    )


def _waits(record: Room) -> tuple[Wait, ...]:
    """The rows that lead on from here; of two for one event, the one that lacks less."""
    found: dict[str, Wait] = {}
    for row in _ONWARD[record.role, record.state]:
        needs = _lacking(record, row)
        if any(asked.lstrip("!") in t.FIXED for asked in needs):
            continue
        for event in row.event.split():
            if event not in found or len(needs) < len(found[event].needs):
                found[event] = Wait(event, t.STATE_NAMES[t.LETTERS[row.to]], row.why, needs)
    return tuple(found.values())


def _lacking(record: Room, row: t.Row) -> dict[str, str]:
    """Conditions of the row with their meaning, less those that the record alone shows to hold."""
    out: dict[str, str] = {}
    for asked in row.when:
        name = asked.lstrip("!")
        no = asked.startswith("!")
        if name in t.STANDING and record.holds(name, Event(row.event)) != no:
            continue
        out[asked] = f"not: {t.CONDITIONS[name]}" if no else t.CONDITIONS[name]
    return out


def _alarms(record: SenderRoom | ReceiverRoom, now: float) -> tuple[Alarm, ...]:
    """Every deadline of the room, the next first. D's patience with its P is kept for the instance, not for the room."""
    due = [(at, kind, Event(t.TIMER_EVENTS[kind])) for kind, at in record.timers.items()]
    if isinstance(record, ReceiverRoom):
        for peer in (record.bound,) if record.bound else asking_of(record):
            at = record.side.silent(peer, now)
            if at is not None:
                due.append((at, "silence", Event("peer_silence", peer)))
    return tuple(_alarm(record, kind, at - now, ev) for at, kind, ev in sorted(due, key=lambda d: d[:2]))


def _alarm(record: Room, kind: str, in_s: float, ev: Event) -> Alarm:
    choice = t.step(record.role, record.state, ev.name, lambda name: record.holds(name, ev))
    to = t.STATE_NAMES[choice.to if choice.to >= 0 else record.state]
    why = t.ROWS[choice.row].why if choice.row >= 0 else "no row: nothing happens"
    return Alarm(kind, round(in_s, 3), ev.name, to, choice.reason, why)
