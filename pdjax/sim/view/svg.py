"""A run as a space-time picture: a vertical line for each process, downwards is later, messages are arrows.

Instants stand at equal distances, with their time beside them: a hand-off takes milliseconds, its timers seconds. What a
P does stands left of its line and what a D does right of its own, so that the arrows between them have the middle.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from html import escape
from math import inf
from typing import Any

import msgspec

from pdjax.sim.replay import Result
from pdjax.sim.view.spans import Arrow, Stay, arrows_of, stays_of
from pdjax.sim.view.story import LETTER, WORLD, Row, Story, rooms_of, sentence, short_room

LINE, ROW_GAP, CHAR, WRAP = (
    14,
    5,
    6.1,
    42,
)  # px of a line of text, between rows, of a character; characters of a line
TIMES, TOP, MIDDLE, GAP, LANE = (
    70,
    62,
    190,
    28,
    6,
)  # px: time column, first row, P to D, between columns, a room's bar
COLORS = {
    "ready": "#1a7f37", "done": "#1a7f37", "done_ack": "#1a7f37", "abort": "#cf222e", "failed": "#cf222e",
}  # fmt: skip
STATE_COLORS = {"B": "#8c959f", "W": "#bf8700", "T": "#0969da"}
STATE_WORDS = {"B": "Bootstrapping", "W": "WaitingForInput", "T": "Transferring"}
STYLE = (
    "text{font:11px sans-serif;fill:#1f2328;paint-order:stroke;stroke:#fff;stroke-width:3px}"
    ".t{fill:#656d76;text-anchor:end}.h{font-weight:bold;text-anchor:middle}.l{text-anchor:end}"
    ".m{font-size:10px;text-anchor:middle}.x{fill:#cf222e}"
)


def svg(result: Result) -> str:
    """The picture as one SVG document; an arrow that ends in a cross was dropped on its way."""
    return _Picture(result).text()


class _Picture:
    def __init__(self, result: Result) -> None:
        self.title = f"{result.trace.name or 'trace'}: {result.trace.why}".removesuffix(": ")
        lines = [msgspec.json.decode(line) for line in result.log_lines]
        steps = [sentence(step, i) for i, step in enumerate(result.trace.raw["steps"])]
        self.rows = {row.t: row for row in Story(steps, rooms_of(lines) > 1, messages=False).read(lines)}
        arrows = arrows_of(lines, result.trace.timing.link)
        said = {name for row in self.rows.values() for name in row.cells}
        nodes = [spec.name for spec in result.trace.nodes]
        self.nodes = [n for n in ("x0", *nodes, "b0") if n in said or n in nodes]
        self.arrows = [a for a in arrows if a.source in self.nodes and a.target in self.nodes]
        self.stays = [s for s in stays_of(lines) if LETTER[s.state] in STATE_COLORS]
        self._lay_out()

    # ---------------------------------------------------------------- places

    def _lay_out(self) -> None:
        """x of each process and y of each instant, by what is written there."""
        self.cells = {
            (t, name): _wrapped(row, name) for t, row in self.rows.items() for name in (WORLD, *self.nodes)
        }
        self.lanes = _lanes(self.stays)
        at = TIMES + self._text_px(WORLD) + GAP
        self.x: dict[str, int] = {}
        before = ""
        for name in self.nodes:
            text, bars = (
                self._text_px(name) + 10,
                LANE * max((i + 1 for (n, _), i in self.lanes.items() if n == name), default=0) + 8,
            )
            left, right = (text, bars) if name[0] == "p" else (bars, text)
            at += MIDDLE if before[:1] == "p" and name[0] == "d" else GAP
            self.x[name] = at + left
            at += left + right
            before = name
        self.width = max(at + GAP, int(len(self.title) * CHAR) + GAP, 620)
        self.y: dict[float, int] = {}
        y = TOP
        for t in sorted({*self.rows, *(a.t for a in self.arrows), *(a.to_t for a in self.arrows)}):
            self.y[t] = y
            y += LINE * max([1, *(len(self.cells.get((t, n), ())) for n in (WORLD, *self.nodes))]) + ROW_GAP
        self.height = y + 16

    def _text_px(self, name: str) -> int:
        longest = max((len(s) for (_, n), texts in self.cells.items() if n == name for s in texts), default=0)
        return max(int(longest * CHAR), 0 if name == WORLD else 24)

    # ---------------------------------------------------------------- ink

    def text(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {self.height}">',
            f"<style>{STYLE}</style>",
            f'<rect {size} fill="white"/>',
            f'<text x="10" y="16">{escape(self.title)}</text>',
            *self._legend(),
        ]
        for name, x in self.x.items():
            out.append(f'<line x1="{x}" y1="{TOP - 10}" x2="{x}" y2="{self.height - 10}" stroke="#d0d7de"/>')
            out.append(f'<text class="h" x="{x}" y="{TOP - 16}">{name}</text>')
        out += [self._bar(stay) for stay in self.stays]
        out += self._arrows()
        for t, y in self.y.items():
            out.append(f'<text class="t" x="{TIMES - 12}" y="{y + 4}">{t:g}</text>')
        for (t, name), texts in self.cells.items():
            out += self._cell(name, texts, self.y[t], name in self.rows[t].marks)
        return "\n".join([*out, "</svg>\n"])

    def _legend(self) -> Iterable[str]:
        x = 10
        for letter, color in STATE_COLORS.items():
            yield f'<rect x="{x}" y="24" width="4" height="11" fill="{color}"/>'
            yield f'<text x="{x + 8}" y="33">{letter} {STATE_WORDS[letter]}</text>'
            x += int(len(STATE_WORDS[letter]) * CHAR) + 44

    def _cell(self, name: str, texts: list[str], y: int, marked: bool) -> Iterable[str]:
        left = name[0] == "p"
        x = TIMES if name == WORLD else self.x[name] + (-9 if left else 9)
        kind = " ".join(k for k, on in (("l", left), ("x", marked)) if on)
        for i, text in enumerate(texts):
            yield f'<text class="{kind}" x="{x}" y="{y + 4 + i * LINE}">{escape(text)}</text>'

    def _bar(self, stay: Stay) -> str:
        top = self.y[stay.t]
        bottom = self.y[stay.to_t] if stay.to_t is not None else self.height - 12
        lane = LANE * self.lanes[stay.node, stay.room]
        x = self.x[stay.node] + (2 + lane if stay.node[0] == "p" else -6 - lane)
        color = STATE_COLORS[LETTER[stay.state]]
        return f'<rect x="{x}" y="{top}" width="4" height="{max(bottom - top, 3)}" fill="{color}"/>'

    def _arrows(self) -> Iterable[str]:
        """Messages of one kind that leave and arrive together are one arrow with all their rooms."""
        together: dict[tuple[Any, ...], list[Arrow]] = {}
        for a in self.arrows:
            together.setdefault((a.message, a.source, a.target, a.t, a.to_t, a.arrived), []).append(a)
        ends: dict[tuple[str, bool, float], int] = {}  # where the labels beside a sender end, in px from it
        for same in together.values():
            rooms = list(dict.fromkeys(short_room(a.room) for a in same))
            shown = ", ".join(rooms[:4]) + (f" and {len(rooms) - 4} more" if len(rooms) > 4 else "")
            label, first = f"{same[0].message} {shown}", same[0]
            key = (first.source, self.x[first.source] < self.x[first.target], first.t)
            yield self._arrow(first, label, ends.get(key, 0))
            ends[key] = ends.get(key, 0) + int(len(label) * CHAR)

    def _arrow(self, a: Arrow, label: str, taken_px: int) -> str:
        x1, x2, y1, y2 = self.x[a.source], self.x[a.target], self.y[a.t], self.y[a.to_t]
        color = COLORS.get(a.message, "#656d76")
        side = 1 if x1 < x2 else -1
        if a.arrived:
            end = f'<path d="M{x2},{y2} l{-6 * side},-3 l0,6 z" fill="{color}"/>'
        else:
            x2 = x1 + side * (MIDDLE * 2 // 3)
            end = f'<text class="m x" x="{x2 + side * 4}" y="{y1 + 4}">✗</text>'
        # The label stands near the sender, beyond those that left with it: labels of ways that cross keep apart.
        at = x1 + side * min(taken_px + int(len(label) * CHAR / 2) + 12, abs(x2 - x1) - 10)
        y = y1 + (y2 - y1) * (at - x1) // (x2 - x1)
        return (
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}"/>{end}'
            f'<text class="m" x="{at}" y="{y - 4}" style="fill:{color}">{escape(label)}</text>'
        )


def _wrapped(row: Row, name: str) -> list[str]:
    """What a process did at an instant, in lines of at most WRAP characters if they can be broken between its parts."""
    out: list[str] = []
    for text in row.cells.get(name, ()):
        if out and len(out[-1]) + len(text) + 2 <= WRAP:
            out[-1] += f"; {text}"
        else:
            out += textwrap.wrap(text, WRAP, break_long_words=False)
    return out


def _lanes(stays: list[Stay]) -> dict[tuple[str, str], int]:
    """(node, room) → which bar of its process: the first that is free while the room lives there."""
    lives: dict[tuple[str, str], tuple[float, float]] = {}
    for stay in stays:
        began, ended = lives.get((stay.node, stay.room), (stay.t, 0.0))
        lives[stay.node, stay.room] = began, max(ended, inf if stay.to_t is None else stay.to_t)
    free_at: dict[str, list[float]] = {}
    out: dict[tuple[str, str], int] = {}
    for key, (began, ended) in lives.items():
        ends = free_at.setdefault(key[0], [])
        lane = next((i for i, end in enumerate(ends) if end <= began), len(ends))
        ends[lane : lane + 1] = [ended]
        out[key] = lane
    return out
