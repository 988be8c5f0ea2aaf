"""Row mutants: every row of the table deleted, retargeted, without one effect, without one condition.

Must never make a mutant that is no table.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from pdjax.core import transitions as t
from pdjax.sim.mutate.patches import Mutant, Patch, rows_replaced


def _with_row(index: int, row: t.Row | None) -> Patch:
    """The table with one row changed; a deleted row becomes what its cell would be without it, and keeps its index."""
    rows = list(t.ROWS)
    if row is None:
        return lambda: _deleted(rows, index)
    rows[index] = row
    return lambda: rows_replaced(rows)


@contextlib.contextmanager
def _deleted(rows: list[t.Row], index: int) -> Iterator[None]:
    with rows_replaced(rows[:index] + rows[index + 1 :]):
        yield


def label(index: int, row: t.Row | None = None) -> str:
    """A row in few words: role, states, event, conditions."""
    row = row or t.ROWS[index]
    when = "+".join(row.when)
    return f"{row.role} {row.states} {row.event.replace(' ', ',')}{f' [{when}]' if when else ''}"


def row_mutants() -> list[Mutant]:
    """Every row: deleted; moved to each plausible other state; each effect and each condition stripped."""
    out: list[Mutant] = []
    for i, row in enumerate(t.ROWS):
        name = label(i)
        out.append(Mutant(f"{name}: deleted", "the row is gone", _with_row(i, None), i))
        for target in _targets(row):
            changed = dataclasses.replace(row, to=target)
            out.append(
                Mutant(f"{name}: to {target}", f"goes to {target}, not {row.to}", _with_row(i, changed), i)
            )
        for k, effect in enumerate(row.effects):
            changed = dataclasses.replace(row, effects=row.effects[:k] + row.effects[k + 1 :])
            out.append(Mutant(f"{name}: without {effect}", f"does not {effect}", _with_row(i, changed), i))
        for k, condition in enumerate(row.when):
            changed = dataclasses.replace(row, when=row.when[:k] + row.when[k + 1 :])
            below = [_after(i, state, event) for state in row.states for event in row.event.split()]
            out.append(
                Mutant(
                    f"{name}: not asking {condition}", "the condition is gone", _with_row(i, changed), i,
                    below=frozenset().union(*below), anywhere=not all(map(_decides, below)),
                )
            )  # fmt: skip
    return [m for m in out if _makes_a_table(m)]


def _after(index: int, state: str, event: str) -> frozenset[int]:
    """Rows of a cell that are tried after this one."""
    role = t.ROWS[index].role
    later = enumerate(t.ROWS[index + 1 :], index + 1)
    return frozenset(i for i, r in later if r.role == role and state in r.states and event in r.event.split())


def _decides(rows: frozenset[int]) -> bool:
    """One of them always applies, so that the default never does."""
    return any(not t.ROWS[i].when for i in rows)


def _targets(row: t.Row) -> list[str]:
    if row.to == "=":
        return ["F"] if set(row.states) & set("BWT") else []
    return ["="] if row.to != "N" else []


def _makes_a_table(mutant: Mutant) -> bool:
    """A stripped condition may leave a row that none can reach: that is no mutant, it is another row's deletion."""
    try:
        with mutant.patch():
            return True
    except ValueError:
        return False
