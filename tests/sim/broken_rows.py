"""The table with one mistake in it, for tests that a check sees the mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pdjax.core import transitions as t

Match = Callable[[t.Row], bool]


def without(match: Match) -> list[t.Row]:
    rows = [r for r in t.ROWS if not match(r)]
    assert len(rows) < len(t.ROWS)
    return rows


def strip(effect: str, match: Match) -> list[t.Row]:
    """The rows that match no longer have the effect."""
    rows = [
        dataclasses.replace(r, effects=tuple(e for e in r.effects if e != effect)) if match(r) else r
        for r in t.ROWS
    ]
    assert rows != t.ROWS
    return rows


def p(state: str, event: str) -> Match:
    return lambda r: r.role == t.SENDER and state in r.states and event in r.event.split()


def d(state: str, event: str) -> Match:
    return lambda r: r.role == t.RECEIVER and state in r.states and event in r.event.split()
