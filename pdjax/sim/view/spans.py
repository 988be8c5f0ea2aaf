"""What has a length in a log, for the pictures: messages under way, and states of rooms. Must never conclude more than the lines say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SLACK_MS = 1e-6  # times of a log are rounded


@dataclass
class Arrow:
    """One message. Times in ms; to_t equals t where it did not arrive."""

    message: str
    room: int | str
    source: str
    target: str
    t: float
    to_t: float
    arrived: bool = False


@dataclass
class Stay:
    """A room in one state on one process. Times in ms; to_t None: until the end of the log."""

    node: str
    room: str
    role: str
    state: str
    t: float
    event: str
    row: int
    to_t: float | None = None


def stays_of(lines: Sequence[dict[str, Any]]) -> list[Stay]:
    """Every stay in a state but Absent, in order of its beginning. The death of a process ends its stays."""
    now: dict[tuple[str, str], Stay] = {}
    out: list[Stay] = []
    for line in lines:
        if line["event"] == "crashed":
            for key in [k for k in now if k[0] == line["node"]]:
                now.pop(key).to_t = line["t"]
        elif "role" in line and line["from"] != line["to"]:
            key = (line["node"], str(line["room"]))
            if key in now:
                now.pop(key).to_t = line["t"]
            if line["to"] != "Absent":
                now[key] = Stay(*key, line["role"], line["to"], line["t"], line["event"], line["row"])
                out.append(now[key])
    return out


def arrows_of(lines: Sequence[dict[str, Any]], link_ms: float) -> list[Arrow]:
    """The sent messages, in order. A delivered line belongs to the newest sent one that can have come so far by then.

    link_ms: the least time of a way. A second delivery of one message has no arrow of its own. A hello or pending that
    came to nothing is left out unless a step dropped it: P takes no word of a D that has not yet proved its age.
    """
    hit = {
        (line["message"], str(line["room"]), line["t"])
        for line in lines
        if line["event"] == "hit" and "message" in line
    }
    open_: dict[tuple[Any, ...], list[Arrow]] = {}
    out: list[Arrow] = []
    for line in lines:
        event = line["event"]
        if event not in ("sent", "delivered"):
            continue
        ends = (line["node"], line["peer"]) if event == "sent" else (line["peer"], line["node"])
        waiting = open_.setdefault((*ends, line["message"], str(line["room"]), line["attempt"]), [])
        if event == "sent":
            arrow = Arrow(line["message"], line["room"], *ends, line["t"], line["t"])
            waiting.append(arrow)
            out.append(arrow)
        elif waiting:
            in_time = [i for i, a in enumerate(waiting) if a.t + link_ms <= line["t"] + SLACK_MS]
            arrow = waiting.pop(in_time[-1] if in_time else 0)
            arrow.to_t, arrow.arrived = line["t"], True
    return [
        a
        for a in out
        if a.arrived or a.message not in ("hello", "pending") or (a.message, str(a.room), a.t) in hit
    ]
