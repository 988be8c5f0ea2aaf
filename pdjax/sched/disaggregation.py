"""What the schedulers of P and D share: the table of live rooms and the manager's events about them.

Must never end a room that it was not told about, and never let an event about an unknown room change anything:
it is counted (S5).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdjax.core.errors import ConfigError, PDError
from pdjax.engine.base import BaseKVManager, KVEnded, KVEvent
from pdjax.sched.batch import Seq
from pdjax.sched.request import Failure, Output, Request

if TYPE_CHECKING:
    from pdjax.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """For who asks why a request waits: its queue, how long it has stood there, what it holds."""

    queue: str
    queue_s: float
    pages: int
    prompt_tokens: int
    output_tokens: int


class RoomTable(_Scheduler):
    """Mixin. A room is in the table from intake until the request or its hand-off ends, whichever is first."""

    manager: BaseKVManager
    _rooms: dict[int, Seq]

    def _init_rooms(self) -> None:
        if self._manager is None:
            raise ConfigError(f"{type(self).__name__} needs a KV manager")
        self.manager = self._manager
        self._rooms = {}
        self.counts["stray_events"] = 0  # events about a room that is not in the table any more

    def check(self, req: Request) -> None:
        if req.room is None:
            message = "this server runs one half of a request: send it through the router (no bootstrap_room)"
            raise PDError(message, reason="bad_request", status=400)
        super().check(req)

    def _refused(self, req: Request, reason: str) -> None:
        if req.room is None or req.room in self._rooms:
            return
        try:
            self._abort_claim(req, req.room, reason)
        except Exception:
            self.counts["engine_errors"] += 1
            log.exception("room %s of a refused request did not end", req.room)

    @abstractmethod
    def _abort_claim(self, req: Request, room: int, reason: str) -> None:
        """End a claimed room whose request the scheduler never took in."""

    def _enter_room(self, seq: Seq) -> bool:
        """False: the room is taken, and the newcomer is closed. The first one goes on (protocol §1)."""
        assert seq.req.room is not None
        if seq.req.room in self._rooms:
            message = f"room {seq.req.room} is in use: draw a fresh bootstrap_room"
            self._close(seq, Output(failure=Failure(400, "duplicate_room", message)))
            return False
        self._rooms[seq.req.room] = seq
        return True

    def _leave_room(self, seq: Seq) -> None:
        if seq.req.room is not None and self._rooms.get(seq.req.room) is seq:
            del self._rooms[seq.req.room]

    def _close(self, seq: Seq, output: Output) -> None:
        self._leave_room(seq)
        super()._close(seq, output)

    def place(self, room: int) -> Place | None:
        """Where that room's request stands in this scheduler; None: it is not here (any more). From any thread."""
        seq = self._rooms.get(room)
        queue = seq.queue if seq is not None else None
        if seq is None or queue is None:
            return None
        return Place(
            queue.name, self.clock() - seq.since, len(seq.req.pages), seq.n_prompt, len(seq.req.output_ids)
        )

    def _take_events(self) -> bool:
        events = self.manager.take_events()
        for event in events:
            self._handle_event(event)
        return bool(events)

    def _handle_event(self, event: KVEvent) -> None:
        if not isinstance(event, KVEnded):
            self.counts["stray_events"] += 1
            return
        seq = self._rooms.get(event.room)
        if seq is None:
            self.counts["stray_events"] += 1
            return
        self._hand_off_failed(seq, Failure(event.status, event.reason, event.message))

    def _hand_off_failed(self, seq: Seq, failure: Failure) -> None:
        """The room has ended already: nothing to tell the manager."""
        self._close(seq, Output(failure=failure))
