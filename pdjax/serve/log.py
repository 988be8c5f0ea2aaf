"""The server's own log: one line an event, as JSON or as text, on one stream; Python's loggers write into it too.

A request's lines share its room, on P and on D, and its rid. Must never write a token, a prompt or an output: only the
named fields of an event; and never two lines for one event, whatever a client's text holds.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

FORMATS = ("json", "text")
LEVELS = ("debug", "info", "warning", "error")

FIELDS = frozenset(
    (
        *("rid", "room", "role", "status", "reason", "message", "peer", "count"),
        *("prompt_tokens", "completion_tokens", "cached_tokens", "finish", "stream", "times", "seconds"),
        *("url", "zmq", "instance_id", "epoch", "model", "source", "target", "cause", "cut_off", "unheard"),
    )
)
# An event that is not here is "info".
LEVEL_OF = {
    "moved": "debug",
    "refused": "warning",
    "failed": "warning",
    "router_unreachable": "warning",
    "stuck": "warning",
}
_PLAIN = re.compile(r"[^\s\"=]+")


class ServerLog:
    """Thread-safe. A field that is not in FIELDS raises ValueError: adding one is a decision, not a slip.

    stream: None is the standard error of the moment. form: one of FORMATS. level: the least of LEVELS that is written.
    """

    def __init__(self, stream: TextIO | None = None, *, form: str = "json", level: str = "info") -> None:
        self.level = level
        self._least = LEVELS.index(level)
        self._line = _as_json if form == "json" else _as_text
        self._stream = stream
        self._lock = threading.Lock()
        self.lost_lines = 0  # the stream did not take them: a full disk, a reader that is gone

    def event(self, event: str, **fields: Any) -> None:
        unknown = fields.keys() - FIELDS
        if unknown:
            raise ValueError(f"log fields {sorted(unknown)} are not declared in serve/log.py")
        kept = {name: value for name, value in fields.items() if value is not None}
        self._write(LEVEL_OF.get(event, "info"), event, kept)

    def record(self, record: logging.LogRecord) -> None:
        """A line of one of Python's loggers; its traceback, if any, is a field of that line."""
        level = record.levelname.lower()
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        self._write(level if level in LEVELS else "error", "log", fields)

    def _write(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        if LEVELS.index(level) < self._least:
            return
        line = self._line(time.time(), level, event, fields)
        with self._lock:
            stream = self._stream or sys.stderr
            try:
                stream.write(line + "\n")
                stream.flush()
            except (OSError, ValueError):  # ValueError: it is closed. No request may fail for want of a log
                self.lost_lines += 1


def _as_json(now: float, level: str, event: str, fields: Mapping[str, Any]) -> str:
    whole = {"ts": round(now, 3), "level": level, "event": event, **fields}
    return json.dumps(whole, ensure_ascii=False, default=str)


def _as_text(now: float, level: str, event: str, fields: Mapping[str, Any]) -> str:
    """``TIME LEVEL EVENT name=value …``; a value that could be taken for something else is a JSON text."""
    when = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{name}.{key}" if key else name: one for key, one in inner}
    told = [f"{name}={_value(value)}" for name, value in flat.items()]
    return " ".join([when, level.upper(), event, *told])


def _value(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)


def hand_off_tap(log: ServerLog) -> Callable[[dict[str, Any]], None] | None:
    """For ``EventLog``: each move of a room between two states as a line, at debug; None at a higher level.

    The whole event log is a file of its own (--disaggregation-trace); this is for a person who reads along.
    """
    if log.level != "debug":
        return None

    def tap(record: dict[str, Any]) -> None:
        if record.get("from") == record.get("to"):
            return
        told = {name: record.get(name) for name in ("room", "role", "peer", "reason")}
        log.event("moved", source=record["from"], target=record["to"], cause=record["event"], **told)

    return tap


class _Handler(logging.Handler):
    def __init__(self, log: ServerLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.record(record)


def take_over(log: ServerLog) -> None:
    """From now on Python's loggers write into log: ours from its level on, those of libraries from warnings on."""
    logging.basicConfig(handlers=[_Handler(log)], level=logging.WARNING, force=True)
    logging.getLogger("pdjax").setLevel(log.level.upper())
