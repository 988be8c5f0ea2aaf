"""How the program is made wrong for a while: another table, another attribute, another entry of a dispatch table.

Every patch is a context that puts back what it found. Must never leave anything behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pdjax.core import transitions as t

Patch = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """name: stable, of the row's own words. patch: applies it while the context is open.

    row: index, or -1. below: rows of the same cells that stand after it, where it may be chosen instead of them.
    anywhere: likewise instead of the default, which is no row. shown_by: the trace that is run first.
    """

    name: str
    what: str
    patch: Patch
    row: int = -1
    shown_by: str = ""
    below: frozenset[int] = frozenset()
    anywhere: bool = False

    def differs_in(self, rows: frozenset[int]) -> bool:
        """Whether a run or a search that meets these rows of the unchanged table can differ."""
        return self.row < 0 or self.anywhere or self.row in rows or bool(self.below & rows)


@contextlib.contextmanager
def rows_replaced(rows: list[t.Row]) -> Iterator[None]:
    """The whole program runs this table meanwhile. ValueError: the rows make no table."""
    old_rows, old_compiled = list(t.ROWS), t.COMPILED
    compiled = t.compile_rows(rows)
    try:
        t.ROWS[:] = rows
        t.COMPILED = compiled
        yield
    finally:
        t.ROWS[:] = old_rows
        t.COMPILED = old_compiled


def rows_where(change: Callable[[t.Row], t.Row | None]) -> Patch:
    """Every row through ``change``; None deletes."""
    rows = [new for row in t.ROWS if (new := change(row)) is not None]
    return lambda: rows_replaced(rows)


def swap(old: str, new: str, where: Callable[[t.Row], bool]) -> Patch:
    """Effects of some rows: old becomes new ("": nothing)."""

    def change(row: t.Row) -> t.Row:
        if not where(row):
            return row
        effects = tuple(e for x in row.effects for e in ((new,) if x == old else (x,)) if e)
        return dataclasses.replace(row, effects=effects)

    return rows_where(change)


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextlib.contextmanager
def table_entry(owner: Any, table: str, name: str, value: Any) -> Iterator[None]:
    """A condition or an effect of a room class, replaced in its dispatch table."""
    entries = getattr(owner, table)
    old = entries[name]
    entries[name] = value
    try:
        yield
    finally:
        entries[name] = old
