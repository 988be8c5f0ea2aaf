"""One attempt at one room, on either side: the record that the table drives.

``handle(event, now) → effects``: conditions are asked of the record, the row says what follows, and each
effect's name is a method that changes the record and returns what the driver must do. No rule stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from pdjax.core import transitions as t
from pdjax.core.effects import Answer, ArmTimer, Effect, Ended
from pdjax.core.errors import CLIENT_LEFT, PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.reasons import explain
from pdjax.core.settings import PDSettings
from pdjax.core.wire import AnyMessage

_FAILED = t.LETTERS["F"]

# What the other side calls wrong is wrong on both legs, and what was aborted there is aborted here: routers would try
# a 503 again (facts/router §0.7, §3.4).
STATUS_OF_PEERS_WORD = {"bad_request": 400, "client_abort": CLIENT_LEFT}


@dataclass(slots=True)
class Event:
    """Something that happened to a room. peer and epoch: who said it, for messages and peer events.

    data: what the event brings (see the effect that reads it). reason: why, for ends from this side.
    """

    name: str
    peer: str = ""
    epoch: int = 0
    msg: AnyMessage | None = None
    reason: str = ""
    detail: str = ""
    data: Any = None


class Transition(msgspec.Struct, frozen=True):
    """One line of the event log: the table's decision, before the driver acts on it."""

    role: str
    room: int
    attempt: int
    event: str
    source: int
    target: int
    effects: tuple[str, ...]
    kind: str
    row: int
    reason: str = ""


class IllegalEvent(PDError):
    """A local event in a state where the program must never raise it. The state is unchanged."""


class Room:
    """The part that both roles share. Subclasses name their conditions ``_if_x`` and their effects ``_do_x``."""

    role: ClassVar[str]
    _conditions: ClassVar[dict[str, Callable[[Any, Event], bool]]]
    _effects: ClassVar[dict[str, Callable[[Any, Event, float], Effect | list[Effect] | None]]]

    def __init_subclass__(cls) -> None:
        mine = {n for r in t.ROWS if r.role == cls.role for n in r.effects}
        asked = {c.lstrip("!") for r in t.ROWS if r.role == cls.role for c in r.when}
        cls._effects = {n: getattr(cls, "_do_" + n) for n in mine}
        cls._conditions = {n: getattr(cls, "_if_" + n) for n in asked}

    def __init__(self, room: int, settings: PDSettings) -> None:
        self.room = room
        self.settings = settings
        self.state: int = t.ABSENT
        self.opened = self.since = (
            0.0  # when the leg came, and when the state was entered; no rule reads them
        )
        self.attempt = 0
        self.digest = ""
        self.reason = ""
        self.detail = ""
        self.status = 503  # of the answer to the client, once the room has failed
        self.row_reason = ""  # of the row being performed
        self.timers: dict[str, float] = {}  # kind → deadline; the driver's heap may hold older ones
        self.serial = 0  # its place in the table, and the peers it is noted under there (core.by_peer)
        self.noted: Mapping[str, None] = {}

    @property
    def poll(self) -> KVPoll:
        return KVPoll(self.state) if self.state != t.ABSENT else KVPoll.Failed

    @property
    def live(self) -> bool:
        return self.state in t.LIVE

    def concerns(self) -> Mapping[str, None]:
        """The peers whose end or rebirth can change something here."""
        raise NotImplementedError

    def holds(self, condition: str, ev: Event) -> bool:
        """What the table would be told of this condition; changes nothing."""
        return self._conditions[condition](self, ev)

    def handle(self, ev: Event, now: float) -> tuple[list[Effect], Transition]:
        """Run the table on one event. Raises IllegalEvent for a local event that has no row here."""
        source = self.state
        conditions = self._conditions
        choice = t.step(self.role, source, ev.name, lambda c: conditions[c](self, ev))
        self.row_reason = choice.reason
        if choice.kind == "illegal":
            raise IllegalEvent(
                f"{ev.name} in {t.STATE_NAMES[source]} of the {self.role}",
                reason="engine_error",
                room=self.room,
                peer=ev.peer,
            )
        if choice.to >= 0:
            self.state, self.since = choice.to, now
            self.opened = now if source == t.ABSENT else self.opened
            if choice.to == _FAILED:
                self.reason, self.detail = self._end_reason(ev, choice.reason)
        out: list[Effect] = []
        perform = self._effects
        for name in choice.effects:
            done = perform[name](self, ev, now)
            if done is None:
                continue
            if isinstance(done, list):
                out += done
            else:
                out.append(done)
        return out, Transition(
            self.role, self.room, self.attempt, ev.name, source, self.state, choice.effects, choice.kind, choice.row,
            self.reason if self.state == _FAILED else "",
        )  # fmt: skip

    def _end_reason(self, ev: Event, row_reason: str) -> tuple[str, str]:
        """The row's reason or the event's own; what the peer said becomes the detail."""
        said = getattr(ev.msg, "reason", "")
        self.status = STATUS_OF_PEERS_WORD.get(said, 503)
        detail = ev.detail or (f"the peer says: {explain(said)}" if said else "")
        return ev.reason or row_reason or said or "engine_error", detail

    def _arm(self, kind: str, now: float, delay_s: float) -> ArmTimer:
        at = self.timers[kind] = now + delay_s
        return ArmTimer((kind, self.room), at)

    # effects of both roles

    def _do_answer_duplicate(self, ev: Event, now: float) -> Effect:
        return Answer(self.room, 400, "duplicate_room")

    def _do_answer_bad(self, ev: Event, now: float) -> Effect:
        return Answer(self.room, 400, self.reason)

    def _do_answer_refused(self, ev: Event, now: float) -> Effect:
        return Answer(self.room, 503, self.reason)

    def _do_arm_request(self, ev: Event, now: float) -> Effect:
        return self._arm("request", now, self.settings.request_timeout_s)

    def _do_arm_bootstrap(self, ev: Event, now: float) -> Effect:
        return self._arm("bootstrap", now, self.settings.bootstrap_timeout_s)

    def _do_engine_stop(self, ev: Event, now: float) -> Effect:
        return Ended(self.room, self.reason, self.detail or explain(self.reason), self.status)

    def _do_bury(self, ev: Event, now: float) -> Effect | list[Effect]:
        for kind in ("request", "bootstrap", "lease", "transfer", "hello"):
            self.timers.pop(kind, None)
        return self._arm("tombstone", now, self.settings.tombstone_life_s)

    def _do_forget(self, ev: Event, now: float) -> None:
        self.timers.clear()
