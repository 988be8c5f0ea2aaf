"""The event logs of one fleet, which many files and cells share: each breach is charged to the one in which it came.

Must never decode a line twice, nor charge a file with what an older one has left open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pdjax.campaign.fleet import Fleet
from pdjax.core import conform, log_lines
from pdjax.core import transitions as t
from pdjax.core.log_lines import Finding, Line
from pdjax.faults.work import INJECTED

LIVE = frozenset(t.STATE_NAMES[state] for state in t.LIVE)


class Logs:
    """lines: all that was read, as it is. decoded: those of them that are lines of an event log, numbered from 1."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._read: dict[str, int] = {}
        self._not_lines: list[Finding] = []
        self.lines: list[bytes] = []
        self.decoded: list[Line] = []

    def more(self) -> int:
        """Read what is new; the number of lines before it."""
        before = len(self.lines)
        for path in self._fleet.log_files():
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path.name] = self._read.get(path.name, 0) + len(whole)
            self.add(whole.splitlines())
        return before

    def add(self, new: list[bytes]) -> None:
        n_before = len(self.lines)
        lines, wrong = log_lines.read(new)
        for line in lines:
            line.number += n_before
        self.lines += new
        self.decoded += lines
        self._not_lines += [replace(finding, line=finding.line + n_before) for finding in wrong]

    def since(self, after: int) -> list[Line]:
        """The lines after that one."""
        return [line for line in self.decoded if line.number > after]

    def breaches(self, after: int) -> list[str]:
        """Of the lines after that one; at the end nothing that they opened may be open on a process that lives."""
        found = [f for f in self._not_lines + conform.broken(self.decoded) if f.line > after]
        alive = {name for name in self._fleet.instances if self._fleet.seats[name].alive}
        found += conform.all_closed(
            [line for line in opened_after(self.decoded, after) if line.life[0] in alive]
        )
        return [str(f) for f in found if INJECTED not in f.text]


def opened_after(lines: Iterable[Line], after: int) -> Iterator[Line]:
    """The lines after that one, without what becomes of a room that was live by then: it is an older file's.

    Pages and slots need no such care: one that was taken before is merely freed by the lines after.
    """
    older = set()
    for line in lines:
        room = (line.life, line.role, line.room)
        is_decision, is_live = line.role in (t.SENDER, t.RECEIVER), line.get("to") in LIVE
        if line.number <= after:
            if is_decision:
                older.discard(room)
                older |= {room} if is_live else set()
        elif not (is_decision and room in older):
            yield line
        elif not is_live:
            older.discard(room)
