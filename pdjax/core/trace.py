"""The event log: one JSON object a line, the same from real processes and from the simulator.

Lines are numbered per process (``n``), so that a log from which a line is missing is refused. Checking lives in
``conform``. Must never open a file: writers are handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdjax.core.room import Transition
from pdjax.core.transitions import LETTERS, LIVE, SENDER, STATE_NAMES

_encoder = msgspec.json.Encoder()


def milestone(tr: Transition) -> str | None:
    """The name that scenarios wait for, where a transition reaches one: each has a plain line of its own."""
    if tr.source == tr.target:
        return None
    if tr.target == LETTERS["S"]:
        return "success"
    if tr.target == LETTERS["F"]:
        return "failed"
    if tr.target not in LIVE:
        return None
    if tr.role == SENDER:
        return {"admit": "admitted", "kv_ready": "prefilled"}.get(tr.event)
    return "peer_known" if tr.source == LETTERS["B"] else None


class EventLog:
    """Numbers and encodes lines. ``write`` gets one line of bytes with its newline; None: the log is off.

    tap: gets each line as the dict that was encoded (the simulator's checks).
    Not thread-safe by itself: the manager calls it under its lock, so the order is the order of decisions.
    """

    def __init__(
        self,
        node: str,
        epoch: int,
        clock: Callable[[], float],
        write: Callable[[bytes], object] | None = None,
        tap: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.node = node
        self.epoch = str(epoch)
        self._clock = clock
        self._write = write
        self._tap = tap
        self._n = 0
        self.error = ""  # why the log ended early (a full disk): its missing lines cannot pass as a whole run

    @property
    def on(self) -> bool:
        return self._write is not None

    def line(self, event: str, room: int | None = None, **fields: Any) -> None:
        """One event. room is omitted for events of the process; integers above 2^53 go as strings."""
        if self._write is None:
            return
        record: dict[str, Any] = {
            "n": self._n,
            "t": round(self._clock() * 1000, 3),
            "node": self.node,
            "epoch": self.epoch,
        }
        if room is not None:
            record["room"] = room if room < 1 << 53 else str(room)
        record["event"] = event
        record.update(fields)
        self._n += 1
        try:
            self._write(_encoder.encode(record) + b"\n")
        except OSError as error:  # serving goes on without its log (S11)
            self.error, self._write = str(error), None
        if self._tap is not None:
            self._tap(record)

    def transition(self, tr: Transition, **fields: Any) -> None:
        """A decision of the table. kind is logged only where it is not a plain row."""
        if self._write is None:
            return
        if tr.reason:
            fields["reason"] = tr.reason
        if tr.kind != "row":
            fields["kind"] = tr.kind
        self.line(
            tr.event,
            tr.room,
            role=tr.role,
            attempt=str(tr.attempt),
            **{"from": STATE_NAMES[tr.source], "to": STATE_NAMES[tr.target]},
            row=tr.row,
            effects=list(tr.effects),
            **fields,
        )
        reached = milestone(tr)
        if reached is not None:
            self.line(reached, tr.room, **({"reason": tr.reason} if tr.reason else {}))
