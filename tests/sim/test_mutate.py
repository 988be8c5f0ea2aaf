"""A protocol made wrong on purpose is noticed by a named property, in a trace that a stranger can follow."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdjax.core import transitions as t
from pdjax.sim import mutate
from pdjax.sim.cli import app
from pdjax.sim.replay import run_trace

TRACES = Path(__file__).parents[1] / "traces"
LEAST = 0.43  # of the recorded mutants are noticed; it only goes up
OPEN = 42  # survivors without an argument; it only goes down
MISTAKES = {m.name: m for m in mutate.mistakes()}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_written_out_mistake_is_noticed_in_its_trace(name):
    mutant = MISTAKES[name]
    trace = json.loads((TRACES / f"{mutant.shown_by}.json").read_text())
    assert len(trace["steps"]) <= 12
    assert run_trace(trace).ok
    with mutant.patch():
        broken = run_trace(trace, conformance=False).broken
    assert broken, f"{mutant.what}: nothing notices"


def test_a_sample_of_row_mutants_is_noticed_where_it_was_noticed_before():
    mutants = {m.name: m for m in mutate.row_mutants()}
    recorded = [(name, trace) for name, (_, trace) in mutate.recorded()["killed"].items() if name in mutants]
    sample = [(name, trace) for name, trace in recorded if (TRACES / f"{trace}.json").exists()]
    sample = sample[:: max(1, len(sample) // 20)]
    assert len(sample) >= 15
    alive = []
    for name, trace in sample:
        text = json.loads((TRACES / f"{trace}.json").read_text())
        with mutants[name].patch():
            try:
                broken = run_trace(text, conformance=False).broken
            except Exception:  # it left the loop: S11
                broken = ["S11"]
        if not broken:
            alive.append((name, trace))
    assert alive == []


def test_the_page_is_the_record_and_the_score_has_not_fallen():
    kept = mutate.recorded()
    page = (TRACES.parents[1] / "docs" / "mutation.md").read_text()
    assert page == mutate.page(kept)
    assert len([name for name in kept["survived"] if not mutate.argument(name)]) <= OPEN
    assert all(m.name in kept["killed"] for m in mutate.mistakes())
    n = len(kept["killed"]) + len(kept["survived"])
    assert len(kept["killed"]) >= LEAST * n, "the score has fallen"


def test_mutants_of_a_row_are_what_they_say():
    mutants = mutate.row_mutants()
    assert len({m.name for m in mutants}) == len(mutants) > 500
    assert {m.row for m in mutants} == set(range(len(t.ROWS)))
    one = next(m for m in mutants if m.name.startswith("sender T done [uuid_mine]: without free_budget"))
    before = t.COMPILED
    with one.patch():
        assert "free_budget" not in t.ROWS[one.row].effects and t.COMPILED is not before
    assert t.COMPILED is before and "free_budget" in t.ROWS[one.row].effects


def test_the_command_lists_what_survives(monkeypatch):
    from pdjax.sim import campaigns

    monkeypatch.setattr(campaigns, "TRACES", TRACES)
    monkeypatch.setattr(mutate, "mistakes", lambda: [MISTAKES["pages at intake"]])
    monkeypatch.setattr(
        mutate,
        "fixed_traces",
        lambda folder, seeds: [
            (n, json.loads((folder / f"{n}.json").read_text())) for n in ("B97-slow-prefill",)
        ],
    )
    done = CliRunner().invoke(app, ["mutate", "--mistakes"])
    assert done.exit_code == 0 and "1 of 1 mutants" in done.output, done.output
    monkeypatch.setattr(mutate, "mistakes", lambda: [mutate.Mutant("nothing at all", "nothing", _nothing)])
    done = CliRunner().invoke(app, ["mutate", "--mistakes"])
    assert done.exit_code == 1 and "not argued: nothing at all" in done.output


def _nothing():
    import contextlib

    return contextlib.nullcontext()
