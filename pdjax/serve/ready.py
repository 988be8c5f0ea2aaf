"""The line that a process prints on standard output when it serves, so that a parent needs no port of its own choice.

One JSON object on one line: {"pdjax": "ready", "url": ..., "role": ..., ...}. Must never hold more than addresses.
"""

from __future__ import annotations

import json
from typing import Any


def print_ready(*, url: str, **more: Any) -> None:
    """Say once that requests are taken at url. more: role, instance_id, bootstrap, zmq; empty ones are left out."""
    kept = {name: value for name, value in more.items() if value not in (None, "")}
    print(json.dumps({"pdjax": "ready", "url": url, **kept}), flush=True)


def parse_ready(line: str) -> dict[str, Any] | None:
    """The fields of a ready line, or None for any other line."""
    if not line.startswith('{"pdjax"'):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    ready = isinstance(fields, dict) and fields.get("pdjax") == "ready" and isinstance(fields.get("url"), str)
    return fields if ready else None
