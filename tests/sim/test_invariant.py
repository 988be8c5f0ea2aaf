"""The inductive invariant holds for the table, and a broken row leaves it in a state that can be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from broken_rows import d, p, strip

from pdjax.core import transitions as t
from pdjax.sim.export import invariant


def test_every_step_keeps_the_invariant() -> None:
    assert [str(f) for f in invariant.prove()] == []


def test_the_proof_is_about_steps_that_can_happen() -> None:
    possible = set(invariant.possible())
    assert len(possible) >= 140
    for needed in (
        "T done [uuid_mine]", "T abort [quiet !attempt_newer]", "T abort", "T expire_lease", "F abort [quiet]",
        "F limbo_timer", "T scattered", "W start [has_uuid pages_taken fresh]", "T landed", "T expire_transfer",
    ):  # fmt: skip
        assert any(needed in name for name in possible), needed
    assert "a pull meets the registration" in possible


def _swap(match: Callable[[t.Row], bool], old: str, new: str) -> list[t.Row]:
    rows = [
        dataclasses.replace(r, effects=tuple(new if e == old else e for e in r.effects)) if match(r) else r
        for r in t.ROWS
    ]
    assert rows != t.ROWS
    return rows


BROKEN: list[tuple[str, list[t.Row], str, str]] = [
    ("bytes stay registered after an abort", strip("withdraw", p("T", "abort_local")), "S1", "P in T"),
    ("budget freed at the lease, not at quiet", _swap(p("T", "expire_lease"), "to_limbo", "free_budget"), "S4", "reading"),
    ("budget kept after done", strip("free_budget", p("T", "done")), "S3", "charged"),
    ("no budget before the prefill", strip("reserve", p("B", "admit")), "S3", "P in B"),
    ("pages kept after the transfer timer", strip("engine_stop", d("T", "expire_transfer")), "S1", "pages"),
    (
        "done before the scatter",
        [
            dataclasses.replace(r, to="S", effects=("notice_done", "bury")) if d("T", "landed")(r) else r
            for r in t.ROWS
        ],
        "S2", "D in T",
    ),
    (
        "limbo freed by an abort that is not quiet",
        [
            dataclasses.replace(r, when=()) if p("F", "abort")(r) and "quiet" in r.when else r
            for r in t.ROWS
            if not (p("F", "abort")(r) and not r.when)
        ],
        "S4", "limbo",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "rule", "word"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_broken_row_fails_with_the_state_before_it(rows: list[t.Row], rule: str, word: str) -> None:
    failures = invariant.prove(rows)
    assert failures
    assert any(f.clause.startswith(rule) and word in f.before for f in failures), [str(f) for f in failures]
    assert all(f.step.startswith("row ") for f in failures)
