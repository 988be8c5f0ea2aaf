"""The server's own log: one JSON line an event, on one stream.

Must never write a token, a prompt or an output: only the named fields of an event.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, TextIO

FIELDS = frozenset(
    (
        *("rid", "room", "role", "status", "reason", "message", "peer", "count"),
        *("prompt_tokens", "completion_tokens", "cached_tokens", "finish", "stream", "times", "seconds"),
        *("url", "zmq", "instance_id", "epoch", "model"),
    )
)


class JsonLog:
    """Thread-safe. A field that is not in FIELDS raises ValueError: adding one is a decision, not a slip.

    stream: None is the standard error of the moment.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def event(self, event: str, **fields: Any) -> None:
        unknown = fields.keys() - FIELDS
        if unknown:
            raise ValueError(f"log fields {sorted(unknown)} are not declared in serve/log.py")
        kept = {name: value for name, value in fields.items() if value is not None}
        line = json.dumps(
            {"ts": round(time.time(), 3), "event": event, **kept}, ensure_ascii=False, default=str
        )
        with self._lock:
            stream = self._stream or sys.stderr
            stream.write(line + "\n")
            stream.flush()
