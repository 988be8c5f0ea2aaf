"""A run as a ladder in the terminal: a line for each instant in which something changed, a column for each node."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdjax.core import transitions as t
from pdjax.sim.replay import Result
from pdjax.sim.view.story import WORLD, Row, Story, rooms_of, sentence

_decode = msgspec.json.Decoder().decode


def rows_of(result: Result) -> list[Row]:
    lines = [_decode(line) for line in result.log_lines]
    steps = [sentence(step, i) for i, step in enumerate(result.trace.raw["steps"])]
    return Story(steps, rooms_of(lines) > 1).read(lines)


def columns_of(rows: list[Row], nodes: list[str]) -> list[str]:
    """The columns that have anything in them, in the order of the file."""
    used = {node: None for row in rows for node in row.cells}
    order = [WORLD, "x0", *nodes, "b0"]
    return [n for n in order if n in used]


def ladder(result: Result) -> RenderableType:
    """The table. ``result.trace`` names the nodes."""
    rows = rows_of(result)
    columns = columns_of(rows, [spec.name for spec in result.trace.nodes])
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    table.add_column("ms", justify="right", style="dim", no_wrap=True)
    for name in columns:
        table.add_column("steps" if name == WORLD else name, overflow="fold")
    for row in rows:
        cells: list[Text] = []
        for name in columns:
            text = "; ".join(row.cells.get(name, ()))
            style = "" if name not in row.marks else "yellow" if name == WORLD else "red"
            cells.append(Text(text, style=style))
        table.add_row(f"{row.t:.2f}".rstrip("0").rstrip("."), *cells)
    return table


def summary(result: Result) -> list[Text]:
    """Outcomes, what differs, what broke with its row and its step, and what never happened."""
    out = []
    for rid, o in result.outcomes.items():
        why = f" {o.reason}" if o.reason else ""
        out.append(
            Text(
                f"{rid}: {o.outcome}{why} after {o.ms:g} ms", style="green" if o.outcome == "ok" else "yellow"
            )
        )
    for text in result.mismatches:
        out.append(Text(f"differs: {text}", style="red"))
    for v in result.violations:
        known = " (the file says that it is broken)" if v.property in result.trace.violations else ""
        out.append(Text(f"{v.property} broken at {v.t:g} ms: {v.text}{known}", style="red"))
        out.append(Text(f"    {v.property}: {v.sentence}", style="red"))
        if v.row >= 0:
            out.append(Text(f"    row {v.row}: {row_text(v.row)}", style="red"))
        step = last_step(result, v.t)
        if step:
            out.append(Text(f"    after {step}", style="red"))
    for name in result.trace.violations:
        if name not in result.broken:
            out.append(Text(f"differs: the file expects {name} to be broken, and it held", style="red"))
    steps = result.trace.raw["steps"]
    for i in result.unfired:
        out.append(Text(f"never fired: {sentence(steps[i], i)}", style="dim"))
    for i in result.skipped:
        out.append(Text(f"no target: {sentence(steps[i], i)}", style="dim"))
    for i in result.idle_rules:
        out.append(Text(f"never acted: {sentence(steps[i], i)}", style="dim"))
    if result.graveyard:
        out.append(Text(f"pulls left in a graveyard: {result.graveyard}", style="dim"))
    quiet = f"free again at {result.quiet_ms:g} ms, " if result.quiet_ms is not None else ""
    out.append(Text(f"{quiet}{result.events} events, {len(result.log_lines)} lines", style="dim"))
    return out


def row_text(index: int) -> str:
    row = t.ROWS[index]
    to = "stays" if row.to == "=" else f"→ {row.to}"
    when = f" when {' '.join(row.when)}" if row.when else ""
    return f"{row.role} in {row.states}, {row.event}{when}: {to}; {' '.join(row.effects)} ({row.why})"


def last_step(result: Result, t_ms: float) -> str:
    """The newest step at that time, as the event log has it."""
    found = ""
    for raw in result.log_lines:
        line: dict[str, Any] = _decode(raw)
        if line["t"] > t_ms:
            break
        if line["node"] == WORLD and line["event"] == "step":
            found = sentence(result.trace.raw["steps"][line["step"]], line["step"])
    return found


def show(result: Result, console: Console) -> None:
    title = Text(result.trace.name or "trace", style="bold")
    if result.trace.why:
        title.append(f": {result.trace.why}", style="not bold")
    console.print(Group(title, ladder(result), Text(""), *summary(result)))
