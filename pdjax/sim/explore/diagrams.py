"""One side of the table as a dot graph and as a Markdown table of (state, event). Must never state a rule of its own."""

from __future__ import annotations

from pdjax.core import transitions as t


def arrows(role: str) -> dict[tuple[str, str], list[str]]:
    """(from, to), as letters, with the events that take that way, in the order of the rows."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in t.ROWS:
        if row.role == role and row.to != "=":
            for letter in row.states:
                names = found.setdefault((letter, row.to), [])
                names += [e for e in row.event.split() if e not in names]
    return found


def dot(role: str) -> str:
    """Graphviz text: one arrow for each pair of states, with every event that takes it."""
    lines = [f"digraph {role} {{", "  rankdir=LR;", "  node [shape=box, style=rounded];"]
    for letter, value in t.LETTERS.items():
        more = ", peripheries=2" if value in t.TERMINAL else ", style=dashed" if letter == "N" else ""
        lines.append(f'  {letter} [label="{t.STATE_NAMES[value]}"{more}];')
    for (a, b), events in arrows(role).items():
        lines.append(f'  {a} -> {b} [label="{", ".join(events)}"];')
    return "\n".join([*lines, "}"])


def markdown(role: str) -> str:
    """Event by state: where each row leads ("·": stays, "": STALE or ILLEGAL)."""
    letters = list(t.LETTERS)
    lines = [f"| event | {' | '.join(letters)} |", f"|---|{'---|' * len(letters)}"]
    for event in sorted(t.WIRE_EVENTS[role] | t.LOCAL_EVENTS[role]):
        cells = []
        for letter in letters:
            rows = [r for r in t.ROWS if r.role == role and letter in r.states and event in r.event.split()]
            cells.append(", ".join(dict.fromkeys("·" if r.to == "=" else r.to for r in rows)))
        lines.append(f"| `{event}` | {' | '.join(cells)} |")
    return "\n".join(lines)
