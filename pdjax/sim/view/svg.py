"""A run as a space-time picture: a vertical line for each process, downwards is later, messages are arrows.

Instants stand at equal distances, with their time beside them: a hand-off takes milliseconds, its timers seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import msgspec

from pdjax.sim.replay import Result
from pdjax.sim.view.story import LETTER, WORLD, Story, rooms_of, sentence, short_room

ROW, COLUMN, LEFT, TOP = 17, 230, 80, 46
COLORS = {
    "ready": "#1a7f37", "done": "#1a7f37", "done_ack": "#1a7f37", "abort": "#cf222e", "failed": "#cf222e",
}  # fmt: skip
STATE_COLORS = {"B": "#8c959f", "W": "#bf8700", "T": "#0969da", "S": "#1a7f37", "F": "#cf222e"}
STYLE = (
    "text{font:11px sans-serif;fill:#1f2328}.t{fill:#656d76;text-anchor:end}.h{font-weight:bold;text-anchor:middle}"
    ".m{font-size:10px}.x{fill:#cf222e}"
)


def svg(result: Result) -> str:
    """The picture as one SVG document; arrows end in a cross where the message was dropped."""
    lines = [msgspec.json.decode(line) for line in result.log_lines]
    steps = [sentence(step, i) for i, step in enumerate(result.trace.raw["steps"])]
    nodes = ["x0", *(spec.name for spec in result.trace.nodes), "b0"]
    arrows = _arrows(lines)
    story = Story(steps, rooms_of(lines) > 1)
    rows = {row.t: row for row in story.read(lines)}
    times = sorted({*rows, *(a["t"] for a in arrows), *(a["to_t"] for a in arrows)})
    y = {t: TOP + i * ROW for i, t in enumerate(times)}
    x = {name: LEFT + 60 + i * COLUMN for i, name in enumerate(nodes)}
    height, width = TOP + len(times) * ROW + 30, LEFT + len(nodes) * COLUMN + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="16">{escape(result.trace.name)}: {escape(result.trace.why)}</text>',
    ]
    for name in nodes:
        out.append(f'<text class="h" x="{x[name]}" y="{TOP - 14}">{name}</text>')
        out.append(
            f'<line x1="{x[name]}" y1="{TOP - 8}" x2="{x[name]}" y2="{height - 20}" stroke="#d0d7de"/>'
        )
    out += _bars(lines, x, y, height)
    for t, row in rows.items():
        out.append(f'<text class="t" x="{LEFT - 10}" y="{y[t] + 4}">{t:g}</text>')
        for name, texts in row.cells.items():
            told = [s for s in texts if "⇢" not in s]
            if not told:
                continue
            mark = ' class="x"' if name in row.marks else ""
            at = x.get(name, LEFT) + 9 if name != WORLD else LEFT
            out.append(f'<text{mark} x="{at}" y="{y[t] + 4}">{escape("; ".join(told))}</text>')
    out += [_arrow(a, x, y) for a in arrows if a["from"] in x and a["to"] in x]
    out.append("</svg>\n")
    return "\n".join(out)


def _arrows(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """sent lines with the delivered line that each became, oldest first on each way; dropped ones end nowhere."""
    open_: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    out = []
    for line in lines:
        if line["event"] == "sent":
            arrow = {
                "message": line["message"], "room": line["room"], "from": line["node"], "to": line["peer"],
                "t": line["t"], "to_t": line["t"], "arrived": False,
            }  # fmt: skip
            key = (line["message"], str(line["room"]), line["node"], line["peer"], line["attempt"])
            open_.setdefault(key, []).append(arrow)
            out.append(arrow)
        elif line["event"] == "delivered":
            key = (line["message"], str(line["room"]), line["peer"], line["node"], line["attempt"])
            waiting = open_.get(key)
            if waiting:
                arrow = waiting.pop(0)
                arrow["to_t"], arrow["arrived"] = line["t"], True
    return [a for a in out if a["message"] not in ("hello", "pending") or a["arrived"]]


def _arrow(a: Mapping[str, Any], x: Mapping[str, int], y: Mapping[float, int]) -> str:
    x1, x2, y1, y2 = x[a["from"]], x[a["to"]], y[a["t"]], y[a["to_t"]]
    color = COLORS.get(a["message"], "#656d76")
    label = f"{a['message']} {short_room(a['room'])}"
    if not a["arrived"]:
        x2 = x1 + (x2 - x1) // 3
        end = f'<text class="x" x="{x2 - 4}" y="{y1 + 4}">✗</text>'
    else:
        side = 6 if x1 < x2 else -6
        end = f'<path d="M{x2},{y2} l{-side},-3 l0,6 z" fill="{color}"/>'
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}"/>{end}'
        f'<text class="m" x="{(x1 + x2) // 2 - 20}" y="{(y1 + y2) // 2 - 3}" fill="{color}">{escape(label)}</text>'
    )


def _bars(
    lines: list[dict[str, Any]], x: Mapping[str, int], y: Mapping[float, int], height: int
) -> list[str]:
    """What state each room is in, as a coloured bar on its process; further rooms stand beside the first."""
    at: dict[tuple[str, str], tuple[str, float]] = {}
    lanes: dict[tuple[str, str], int] = {}
    out: list[str] = []

    def close(key: tuple[str, str], end: float | None) -> None:
        letter, began = at.pop(key)
        top, bottom = y.get(began), y.get(end) if end is not None else height - 22
        if letter in STATE_COLORS and top is not None and bottom is not None and letter not in "SF":
            left = x[key[0]] - 4 - 6 * lanes[key]
            out.append(
                f'<rect x="{left}" y="{top}" width="4" height="{max(bottom - top, 3)}" fill="{STATE_COLORS[letter]}"/>'
            )

    for line in lines:
        if "role" not in line or line["from"] == line["to"]:
            continue
        key = (line["node"], str(line["room"]))
        lanes.setdefault(key, sum(k[0] == line["node"] for k in lanes))
        if key in at:
            close(key, line["t"])
        at[key] = (LETTER[line["to"]], line["t"])
    for key in list(at):
        close(key, None)
    return out
