"""Event logs of real processes, laid side by side: lives, clocks, and which sent message became which delivered one.

The clocks of two machines are compared by the messages between them, for the times of steps only. Must never conclude
more than the lines say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pdjax.core import log_lines
from pdjax.core import transitions as t

Line = log_lines.Line


class NoRun(ValueError):
    """These logs cannot become a trace. The text says why."""


@dataclass
class Life:
    """One process: its log in order, and what to add to its times (ms) to compare them with the first node's."""

    node: str  # as logged
    epoch: str
    lines: list[Line] = field(default_factory=list)

    @cached_property
    def by_room(self) -> dict[int | None, list[Line]]:
        found: dict[int | None, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.room, []).append(line)
        return found

    @cached_property
    def pages(self) -> dict[str, dict[str, int]]:
        """Token → how many pages it took, and gave back."""
        found: dict[str, dict[str, int]] = {}
        for line in self.lines:
            if line.event in ("pages_taken", "pages_freed"):
                found.setdefault(str(line.get("token")), {})[line.event] = len(line.get("pages"))
        return found

    def decoding(self, cut: Line) -> tuple[str, Line | None]:
        """Of a request that was cut short: its attempt, and the line since which this D could decode it."""
        token = str(cut.get("token"))
        for line in self.by_room[cut.room]:
            if line.event == "recompute" and str(line.get("token")) == token:
                return str(line.get("attempt")), line
            if line.event == "scattered" and str(line.get("attempt")) == token:
                return token, line
        return token, None

    @cached_property
    def role(self) -> str:
        for line in self.lines:
            if line.event == "started" and "mode" in line.raw:
                return t.SENDER if line.get("mode") == "prefill" else t.RECEIVER
            if line.get("role"):
                return str(line.get("role"))
        return ""


class RunLogs:
    """The logs of one run: lives, names of nodes in a trace, clocks laid over each other, messages matched.

    start: the time (ms, on the first node's clock) that ``at`` counts from.
    """

    def __init__(self, lines: list[Line]) -> None:
        self.lives: dict[log_lines.Life, Life] = {}
        for line in lines:
            key = line.life
            self.lives.setdefault(key, Life(*key)).lines.append(line)
        self.lives = {k: v for k, v in self.lives.items() if v.role}  # b0, x0 and sim wrote for people
        if not self.lives:
            raise NoRun("no line of these files is a decision of a P or a D")
        self.names = self._names()
        self.offsets = self._offsets()
        self.start = 0.0

    # ---------------------------------------------------------------- names and clocks

    def _names(self) -> dict[str, str]:
        """Logged name → name in the trace, in order of first appearance."""
        out: dict[str, str] = {}
        for life in self.lives.values():
            if life.node not in out:
                letter = "p" if life.role == t.SENDER else "d"
                out[life.node] = f"{letter}{sum(v[0] == letter for v in out.values())}"
        return out

    def _offsets(self) -> dict[str, float]:
        """Node → ms to add to its times. A way in both directions gives the middle; else the clocks are taken as one.

        Only kinds of messages of which as many arrived as were sent: which of them were lost, clocks have to tell.
        """
        trips: dict[tuple[str, str], float] = {}
        for (sender, receiver), kinds in self._kinds.items():
            ms = [
                b.get("t") - a.get("t")
                for x, y in kinds
                if len(x) == len(y)
                for a, b in zip(x, y, strict=True)
            ]
            if ms:
                trips[sender, receiver] = min(ms)
        offsets = {next(iter(self.names)): 0.0}
        for _ in self.names:
            for a, b in list(trips):
                if a in offsets and b not in offsets and (b, a) in trips:
                    offsets[b] = offsets[a] - (trips[a, b] - trips[b, a]) / 2
                elif b in offsets and a not in offsets and (b, a) in trips:
                    offsets[a] = offsets[b] + (trips[a, b] - trips[b, a]) / 2
        return {name: offsets.get(name, 0.0) for name in self.names}

    @cached_property
    def _kinds(self) -> dict[tuple[str, str], list[tuple[list[Line], list[Line]]]]:
        """(from, to) → for each kind, room and attempt of messages: the sent lines and the delivered ones."""
        kinds: dict[tuple[Any, ...], tuple[list[Line], list[Line]]] = {}
        for life in self.lives.values():
            for line in life.lines:
                about = (line.get("message"), line.room, line.get("attempt"))
                if line.event == "sent":
                    kinds.setdefault((life.node, line.get("peer"), *about), ([], []))[0].append(line)
                elif line.event == "delivered":
                    kinds.setdefault((line.get("peer"), life.node, *about), ([], []))[1].append(line)
        out: dict[tuple[str, str], list[tuple[list[Line], list[Line]]]] = {}
        for key, both in kinds.items():
            out.setdefault(key[:2], []).append(both)
        return out

    @cached_property
    def pairs(self) -> dict[tuple[str, str], list[tuple[Line, Line | None]]]:
        """(from, to) → sent lines, each with the delivered line that it became (None: none that fits)."""
        return {
            ends: [pair for sent, got in kinds for pair in self._fitted(*ends, sent, got)]
            for ends, kinds in self._kinds.items()
        }

    def _fitted(
        self, sender: str, receiver: str, sent: list[Line], got: list[Line]
    ) -> list[tuple[Line, Line | None]]:
        """In order, each delivered line with the newest sent one that is not later; more of them than that were lost."""
        shift = self.offsets.get(receiver, 0.0) - self.offsets.get(sender, 0.0)
        arrived = got[: len(sent)]
        out: list[tuple[Line, Line | None]] = []
        for line in reversed(sent):
            spare = len(sent) - len(out) > len(arrived)
            if not arrived or (spare and line.get("t") > arrived[-1].get("t") + shift):
                out.append((line, None))
            else:
                out.append((line, arrived.pop()))
        return out[::-1]

    def at(self, line: Line) -> float:
        """Ms since the start of the trace."""
        return max(0.0, round(float(line.get("t")) + self.offsets[line.life[0]] - self.start, 3))
