"""The event log: one JSON object a line, the same from real processes and from the simulator.

Lines are numbered per process (``n``), so that a log from which a line is missing is refused. Checking lives in
``conform``. Must never open a file: writers are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdjax.core.room import Transition
from pdjax.core.transitions import LETTERS, LIVE, SENDER, STATE_NAMES

# Token of the pages that a prefix cache holds, in pages_shared (it keeps them) and pages_freed (it has evicted them).
CACHE_TOKEN = 0

_encoder = msgspec.json.Encoder()
_EXACT = 1 << 53  # the first integer that a JSON reader may round


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
        self._at, self._at_ms = -1.0, 0.0  # the newest reading of the clock, and what stands for it in a line
        self.error = ""  # why the log ended early (a full disk): its missing lines cannot pass as a whole run

    @property
    def on(self) -> bool:
        return self._write is not None

    def line(self, event: str, room: int | None = None, **fields: Any) -> None:
        """One event. room is omitted for events of the process; integers above 2^53 go as strings."""
        if self._write is None:
            return
        record = self._begun()
        if room is not None:
            record["room"] = room if room < _EXACT else str(room)
        record["event"] = event
        if fields:
            record.update(fields)
        self._put(record)

    def transition(self, tr: Transition, fields: Mapping[str, Any]) -> None:
        """A decision of the table, with what else is known of it. kind is logged only where it is not a plain row."""
        if self._write is None:
            return
        record = self._begun()
        record["room"] = tr.room if tr.room < _EXACT else str(tr.room)
        record["event"] = tr.event
        record["role"] = tr.role
        record["attempt"] = str(tr.attempt)
        record["from"] = STATE_NAMES[tr.source]
        record["to"] = STATE_NAMES[tr.target]
        record["row"] = tr.row
        record["effects"] = tr.effects
        if fields:
            record.update(fields)
        if tr.reason:
            record["reason"] = tr.reason
        if tr.kind != "row":
            record["kind"] = tr.kind
        self._put(record)
        if tr.source != tr.target:
            reached = milestone(tr)
            if reached is not None:
                self.line(reached, tr.room, **({"reason": tr.reason} if tr.reason else {}))

    def _begun(self) -> dict[str, Any]:
        """What every line begins with. Lines of one moment share its rounding: it costs as much as the rest."""
        now = self._clock()
        if now != self._at:
            self._at, self._at_ms = now, round(now * 1000, 3)
        return {"n": self._n, "t": self._at_ms, "node": self.node, "epoch": self.epoch}

    def _put(self, record: dict[str, Any]) -> None:
        self._n += 1
        assert self._write is not None
        try:
            self._write(_encoder.encode(record) + b"\n")
        except OSError as error:  # serving goes on without its log (S11)
            self.error, self._write = str(error), None
        if self._tap is not None:
            self._tap(record)
