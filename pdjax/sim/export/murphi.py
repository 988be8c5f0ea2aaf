"""A Murphi model of one room: rows become procedures; wire, transport and properties are written a second time.

Independent of the Python search but for the rows: each condition and effect is one function of murphi_text.py, written
from protocol §4–§7. Rumur's state and rule counts must equal ``explore``'s for the same bounds, so a slip in either
reading shows. Must never import the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdjax.core import transitions as t
from pdjax.sim.export import murphi_rules as rules
from pdjax.sim.export import murphi_text as text

_PREFIX = {t.SENDER: "s", t.RECEIVER: "r"}
_STATE = {t.SENDER: "p_st", t.RECEIVER: "d_st"}


@dataclass(frozen=True)
class Bounds:
    """What may happen in the model: the same meaning as the fields of explore.Config."""

    wire: int = 2
    lose: bool = True
    duplicate: bool = True
    abort_p: bool = True
    abort_d: bool = True
    part_fails: bool = True
    hangs: bool = True
    timers: bool = True
    crashes_p: int = 0
    crashes_d: int = 0


def model(bounds: Bounds, rows: Sequence[t.Row] | None = None) -> str:
    """The text of the model."""
    rows = list(rows if rows is not None else t.ROWS)
    out = [_constants(bounds), text.DECLARATIONS.replace("@EVENTS@", ", ".join(_events())), text.HELPERS]
    out += [text.CONDITIONS, text.EFFECTS]
    for role in (t.SENDER, t.RECEIVER):
        for event in sorted(t.WIRE_EVENTS[role] | t.LOCAL_EVENTS[role]):
            out.append(_procedure(role, event, rows))
    out += [rules.DRIVERS, rules.RULES, rules.PROPERTIES]
    return "\n".join(out)


def _events() -> list[str]:
    names: dict[str, None] = {}
    for role in (t.SENDER, t.RECEIVER):
        names.update(dict.fromkeys(sorted(t.WIRE_EVENTS[role] | t.LOCAL_EVENTS[role])))
    return ["e_" + n for n in names]


def _constants(b: Bounds) -> str:
    lives = 1 + max(b.crashes_p, b.crashes_d)
    flags = {
        "LOSE": b.lose, "DUPLICATE": b.duplicate, "ABORT_P": b.abort_p, "ABORT_D": b.abort_d,
        "PART_FAILS": b.part_fails, "HANGS": b.hangs, "TIMERS": b.timers,
    }  # fmt: skip
    lines = ["const", f"  WIRE: {b.wire};", f"  LIVES: {lives};", f"  CRASHES_P: {b.crashes_p};"]
    lines += [f"  CRASHES_D: {b.crashes_d};", *(f"  {k}: {str(v).lower()};" for k, v in flags.items())]
    return "\n".join(lines)


def _procedure(role: str, event: str, rows: list[t.Row]) -> str:
    """One event of one side: for each state its rows from top to bottom."""
    prefix, state = _PREFIX[role], _STATE[role]
    lines = [f"procedure {prefix}_{event}(e: ev);", "begin"]
    first = True
    for letter in t.LETTERS:
        mine = [r for r in rows if r.role == role and letter in r.states and event in r.event.split()]
        wire = event in t.WIRE_EVENTS[role]
        lines.append(f"  {'if' if first else 'elsif'} {state} = {letter} then")
        first = False
        lines += _rows(prefix, state, mine, wire)
    lines += ["  end;", f"  {prefix}_kept();", "end;", ""]
    return "\n".join(lines)


def _rows(prefix: str, state: str, rows: list[t.Row], wire: bool) -> list[str]:
    lines: list[str] = []
    open_if = total = False
    for row in rows:
        conditions = [("!" if c.startswith("!") else "") + f"{prefix}if_{c.lstrip('!')}(e)" for c in row.when]
        body = [f"      {state} := {row.to};"] if row.to != "=" else []
        body += [f"      {prefix}do_{e}(e);" for e in row.effects]
        if conditions:
            lines += [f"    {'elsif' if open_if else 'if'} {' & '.join(conditions)} then", *body]
            open_if = True
        else:
            lines += ["    else", *body] if open_if else [x[2:] for x in body]
            total = True
            break
    if not total and not wire:
        error = '      error "S6: a local event has no row here";'
        lines += ["    else", error] if open_if else [error]
    return [*lines, "    end;"] if open_if else lines
