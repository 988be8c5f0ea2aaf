"""An event log as a story: rows of (time, node → what changed there), for the ladder and the picture.

Leaves out what changes nothing: renewals, repeats, stamps. Must never conclude more than the lines say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdjax.core import transitions as t
from pdjax.core.trace import CACHE_TOKEN
from pdjax.core.wire import MAX_ROOM

LETTER = {t.STATE_NAMES[value]: letter for letter, value in t.LETTERS.items()}
WORLD = "sim"  # the column of what is done to the world
_PAGES = {"pages_taken": "+", "pages_shared": "reads ", "pages_freed": "−"}
_SLOTS = {"slot_taken": "+", "slot_freed": "−"}
_CACHE_PAGES = {"pages_shared": "cache keeps ", "pages_freed": "cache drops "}
QUIET = frozenset(
    {"started", "listed", "admitted", "prefilled", "peer_known", "success", "failed", "draining"}
)


@dataclass
class Row:
    """One instant. cells: node → what changed; marks: nodes at which something broke or was broken."""

    t: float
    cells: dict[str, list[str]] = field(default_factory=dict)
    marks: dict[str, None] = field(default_factory=dict)


def short_room(room: int | str) -> str:
    """A room in a few characters: rooms of routers have nineteen digits."""
    text = str(room)
    return text if len(text) <= 8 else f"…{text[-4:]}"


@dataclass
class Story:
    """Reads lines one by one. steps: a sentence for each step of the trace file. messages: whether to tell them, too."""

    steps: list[str]
    many_rooms: bool
    messages: bool = True
    rows: list[Row] = field(default_factory=list)
    _seen: dict[tuple[Any, ...], None] = field(default_factory=dict)
    _room_said: dict[str, str] = field(default_factory=dict)  # node → room of the newest text of its cell

    def read(self, lines: Iterable[Mapping[str, Any]]) -> list[Row]:
        for line in lines:
            told = self._tell(line)
            if told is None:
                continue
            node, text, marked = told
            if not self.rows or self.rows[-1].t != line["t"]:
                self.rows.append(Row(line["t"]))
                self._room_said.clear()
            row = self.rows[-1]
            row.cells.setdefault(node, []).append(self._room(line) + text)
            if marked:
                row.marks[node] = None
        return self.rows

    def _room(self, line: Mapping[str, Any]) -> str:
        """Whose line it is, where the line before it in the same cell does not say so already."""
        node, room = str(line["node"]), str(line.get("room", ""))
        before, self._room_said[node] = self._room_said.get(node, ""), room
        told = room and node not in (WORLD, "x0") and self.many_rooms and room != before
        return f"{short_room(room)} " if told else ""

    def _tell(self, line: Mapping[str, Any]) -> tuple[str, str, bool] | None:
        node, event = str(line["node"]), str(line["event"])
        if node == WORLD:
            return self._done_to_world(line, event)
        if "role" in line:
            return self._transition(line, node, event)
        if event in QUIET or (event == "started" and line["n"] == 0):
            return None
        if event in ("sent", "delivered"):
            return self._message(line, node, event) if self.messages else None
        if event in _PAGES:
            words = _CACHE_PAGES if line["token"] == str(CACHE_TOKEN) else _PAGES
            return node, f"{words[event]}{len(line['pages'])} pages", False
        if event in _SLOTS:
            return node, f"{_SLOTS[event]}slot {line['slot']}", False
        if event == "finished":
            reason = f" {line['reason']}" if line.get("reason") else ""
            return node, f"{line['rid']}: {line['outcome']}{reason}", line["outcome"] != "ok"
        if event in ("request", "retry"):
            return (
                node,
                f"{line['rid']} {'posted' if event == 'request' else 'again'} ({short_room(line['room'])})",
                False,
            )
        text = {
            "pull_started": "pull", "first_token": "first token", "released": "free", "crashed": "DIES",
            "restarted": "new life", "evicted": f"evicts {line.get('instance')}",
        }.get(event, event.replace("_", " "))  # fmt: skip
        if event in ("effect_failed", "illegal"):
            text = f"{text}: {line.get('detail')}"
        return node, text, event in ("crashed", "effect_failed", "illegal")

    def _done_to_world(self, line: Mapping[str, Any], event: str) -> tuple[str, str, bool] | None:
        if event == "step":
            return WORLD, self.steps[line["step"]] + (" (no target)" if line.get("skipped") else ""), True
        what = line.get("message") or "pull"
        return WORLD, f"#{line['step']} {line['do']} {what}", True

    def _transition(self, line: Mapping[str, Any], node: str, event: str) -> tuple[str, str, bool] | None:
        source, target = line["from"], line["to"]
        if source == target:
            if event == "landed":
                return node, "landed", False
            return None
        reason = f" ({line['reason']})" if line.get("reason") else ""
        arrow = f"{LETTER[source]}→{LETTER[target]}"
        if event == "tombstone_timer":
            return None
        return node, f"{arrow} {event}{reason}", target == "Failed"

    def _message(self, line: Mapping[str, Any], node: str, event: str) -> tuple[str, str, bool] | None:
        """The first of its kind on each way and, of those that carry an end, every one."""
        key = (node, line["epoch"], event, line["message"], line["peer"], line.get("room"))
        if key in self._seen and line["message"] in ("hello", "pending", "unknown", "ready"):
            return None
        self._seen[key] = None
        arrow = (
            f"{line['message']} ⇢ {line['peer']}"
            if event == "sent"
            else f"{line['peer']} ⇢ {line['message']}"
        )
        return node, arrow, False


def sentence(step: Mapping[str, Any], index: int) -> str:
    """A step of a file in a few words."""
    from pdjax.sim.trace_types import ACTIONS

    action = next(a for a in ACTIONS if a in step)
    value = step[action]
    if isinstance(value, str):
        what = f"{action} {value}"
    elif action in ("message", "transfer"):
        match = " ".join(f"{v}" if k == "type" else f"{k} {v}" for k, v in value["match"].items())
        nth = f" from the {value['nth']}th" if value.get("nth", 1) > 1 else ""
        what = f"{value['do']} {match or action}{nth}"
    elif action in ("abort", "disconnect"):
        what = f"{action} {value['rid']}" + (f" at {' and '.join(value['to'])}" if "to" in value else "")
    elif action == "partition":
        what = f"cut {' | '.join(value['between'])} for {value['for']:g}"
    elif action == "inject":
        what = f"inject {value.get('message', {}).get('type', 'bytes')} to {value['to']}"
    elif action == "error":
        what = f"{value['node']}: {value['in']} raises"
    elif action == "stop":
        what = f"stop {value['node']} for {value['for']:g}"
    elif action == "pages":
        what = f"{value['node']}: " + (
            "pages back" if value["free"] is None else f"{value['free']} pages left"
        )
    elif action == "drain":
        what = f"drain {value['node']} within {value['within']:g}"
    elif action == "clock":
        what = f"{value['node']}: wall clock {value['jump']:+g}"
    else:
        what = f"{action} {value.get('rid', '')}"
    return f"#{index} {what}"


def rooms_of(lines: Iterable[Mapping[str, Any]]) -> int:
    """How many rooms a log speaks of."""
    return len({int(line["room"]) & MAX_ROOM for line in lines if "room" in line})
