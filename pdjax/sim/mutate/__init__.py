"""Mutants: the protocol made wrong on purpose, one way at a time, to see that a named property notices."""

from pdjax.sim.mutate.mistakes import mistakes
from pdjax.sim.mutate.patches import Mutant, attribute, rows_replaced, rows_where, table_entry
from pdjax.sim.mutate.rows import label, row_mutants

__all__ = [
    "Mutant", "all_mutants", "attribute", "label", "mistakes", "row_mutants", "rows_replaced", "rows_where", "table_entry",
]  # fmt: skip


def all_mutants() -> list[Mutant]:
    return [*mistakes(), *row_mutants()]
