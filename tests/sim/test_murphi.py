"""A second model, in another language and run by another checker, has the same states and edges as ours."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from pdjax.core import transitions as t
from pdjax.sim.explore import SEARCHES
from pdjax.sim.export import murphi, rumur

# In CI a missing checker is a failure; elsewhere it is a skip that says what to install.
pytestmark = pytest.mark.skipif(
    bool(rumur.missing()) and not os.environ.get("CI"), reason=rumur.missing() or "-"
)

CALM_BOUNDS = murphi.Bounds(wire=8, lose=False, duplicate=False, part_fails=False, hangs=False, timers=False)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("one-room", murphi.Bounds()),
        ("one-room-crashes", murphi.Bounds(wire=1, crashes_p=1, crashes_d=1)),
    ],
)
def test_states_and_edges_are_equal(name: str, bounds: murphi.Bounds, tmp_path: Path) -> None:
    """Ours are the pinned ones, which test_explore finds again."""
    counts = rumur.run(murphi.model(bounds), tmp_path)
    assert counts.error == ""
    assert (counts.states, counts.rules_fired) == SEARCHES[name].pinned


def test_rumur_finds_a_broken_property(tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(r, effects=tuple(e for e in r.effects if e != "withdraw"))
        if r.role == t.SENDER and r.event == "abort_local" and r.states == "T"
        else r
        for r in t.ROWS
    ]
    counts = rumur.run(murphi.model(CALM_BOUNDS, rows), tmp_path)
    assert "S1 registered bytes belong to a live room" in counts.error
