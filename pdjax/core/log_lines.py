"""The lines of recorded event logs, decoded and sorted once for all rules of ``conform``.

Must never judge a line beyond its form: whatever is no line of an event log is a finding, the rest is up to the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from pdjax.core import transitions as t

Life = tuple[str, str]  # (node, epoch)


@dataclass(frozen=True)
class Finding:
    """One breach. rule: a property of protocol §10, or "log" for a file that is no log."""

    rule: str
    text: str
    line: int = 0  # 1-based, in the order given; 0: about the whole

    def __str__(self) -> str:
        return f"{self.rule}{f' line {self.line}' if self.line else ''}: {self.text}"


class Line:
    """A decoded line with its place. role: "" for a line that is no decision of the table."""

    __slots__ = ("event", "get", "life", "number", "raw", "role", "room")

    def __init__(self, number: int, raw: dict[str, Any]) -> None:
        self.number, self.raw = number, raw
        self.life: Life = (str(raw["node"]), str(raw["epoch"]))
        self.room = int(raw["room"]) if "room" in raw else None
        self.event = str(raw["event"])
        self.role = str(raw.get("role", ""))
        self.get: Callable[[str], Any] = raw.get


class Log:
    """The lines of some processes, sorted once for all rules."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self._named: dict[str, list[Line]] = {}
        self.sender: list[Line] = []  # decisions
        self.receiver: list[Line] = []
        by_role = {t.SENDER: self.sender, t.RECEIVER: self.receiver}
        for line in lines:
            if line.role in by_role:
                by_role[line.role].append(line)
            if line.event in _RULED:
                self._named.setdefault(line.event, []).append(line)

    def of(self, *events: str) -> list[Line]:
        """Lines of these events, in the order of the log."""
        found = [line for event in events for line in self._named.get(event, ())]
        return sorted(found, key=_number) if len(events) > 1 else found


def read(data: Iterable[bytes]) -> tuple[list[Line], list[Finding]]:
    """NDJSON lines → Lines; whatever is not a line of an event log is a finding."""
    lines: list[Line] = []
    wrong: list[Finding] = []
    for number, text in enumerate(data, 1):
        if not text.strip():
            continue
        try:
            raw = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong.append(Finding("log", f"not JSON: {error}", number))
            continue
        except RecursionError:
            wrong.append(Finding("log", "not a line of an event log: nested too deep", number))
            continue
        if not _is_line(raw):
            said = "a line has n, t, node, epoch and event; t is a number, rooms are exact integers"
            wrong.append(Finding("log", said, number))
            continue
        lines.append(Line(number, raw))
    return lines, wrong


def _is_whole(text: str) -> bool:
    """A number below 2^64 has at most 20 digits, and int() refuses thousands of them."""
    return text.isdecimal() and len(text) <= 20


def _is_line(raw: Any) -> bool:
    if not isinstance(raw, dict) or not {"n", "t", "node", "epoch", "event"} <= raw.keys():
        return False
    room, token, pages = raw.get("room", 0), raw.get("token", 0), raw.get("pages", [])
    slots = raw["event"] in ("slot_taken", "slot_freed")
    return (
        type(raw["n"]) is int
        and type(raw["t"]) in (int, float)
        and _is_whole(str(raw["epoch"]))
        and (type(room) is int or (isinstance(room, str) and _is_whole(room)))
        and isinstance(pages, list)
        and (not pages or ("token" in raw and _is_whole(str(token))))
        and all(type(page) is int for page in pages)
        and (not slots or ("room" in raw and type(raw.get("slot")) is int))
    )


# Events that a rule asks for by name.
_RULED = frozenset(
    [
        "pages_taken",
        "pages_shared",
        "pages_freed",
        "slot_taken",
        "slot_freed",
        "registered",
        "pull_started",
        "scattered",
        "first_token",
        "recompute",
        "done",
        "illegal",
        "effect_failed",
    ]
)


def _number(line: Line) -> int:
    return line.number
