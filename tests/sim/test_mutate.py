"""A protocol made wrong on purpose is noticed by a named property, in a trace that a stranger can follow."""

import contextlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdjax.core import transitions as t
from pdjax.sim import campaigns, mutate
from pdjax.sim.cli import app
from pdjax.sim.explore import explore, saved
from pdjax.sim.mutate import page, record, runs, survivors, worlds
from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import dumps

ROOT = Path(__file__).parents[2]
LEAST = 0.917  # of the mutants are noticed; it only goes up
KEPT = record.recorded()
MUTANTS = {m.name: m for m in mutate.all_mutants()}
MISTAKES = [m.name for m in mutate.mistakes()]
ROWS = [name for name in KEPT["killed"] if name not in MISTAKES]
MODEL = [name for name in ROWS if Path(KEPT["killed"][name][1]).parent.name == "mutants"]
SAMPLE = [*ROWS[::40], *MODEL[::16]]


def file_of(name):
    """The property, and the counterexample that is kept for a mutant."""
    rule, path = KEPT["killed"][name]
    return rule, json.loads((ROOT / path).read_text(encoding="utf-8"))


def broken(trace):
    return saved.walk(trace["model"]).broken if "model" in trace else runs.broken(trace)


@pytest.mark.parametrize("name", dict.fromkeys([*MISTAKES, *SAMPLE]))
def test_a_mutant_breaks_its_property_in_its_trace_and_nothing_breaks_without_it(name):
    rule, trace = file_of(name)
    assert broken(trace) == []
    with MUTANTS[name].patch():
        assert rule in broken(trace)


def test_every_counterexample_is_a_short_trace_file_and_none_is_left_over():
    paths = {path for _, path in KEPT["killed"].values()}
    for path in paths:
        assert len(json.loads((ROOT / path).read_text(encoding="utf-8"))["steps"]) <= runs.MAX_STEPS, path
    assert {p for p in paths if "/mutants/" in p} == {
        p.relative_to(ROOT).as_posix() for p in (ROOT / record.FOLDER).glob("*.json")
    }


def test_the_page_is_the_record_and_the_score_has_not_fallen():
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == page.page(KEPT)
    assert set(KEPT["killed"]) | set(KEPT["survived"]) == set(MUTANTS), (
        "run make mutate: the table has changed"
    )
    assert len(KEPT["killed"]) >= LEAST * len(MUTANTS), "the score has fallen"
    assert set(MISTAKES) <= set(KEPT["killed"])


def test_every_survivor_is_argued_and_nothing_else_is():
    assert set(survivors.SURVIVORS) == set(KEPT["survived"])
    assert set(survivors.SURVIVORS.values()) == set(survivors.REASONS)


def test_a_survivor_with_the_same_graph_changes_nothing_that_a_search_can_see():
    name = next(n for n, fate in KEPT["survived"].items() if page.same_graph(fate))
    small = [w for w in map(known, worlds.searches()[:6]) if MUTANTS[name].row in w.rows]
    assert small
    with MUTANTS[name].patch():
        found = worlds.search(MUTANTS[name], small)
    assert found.same == found.met == len(small)
    named = "sender T done [uuid_mine]: without release_arrays"
    calm = known(worlds.CALM)
    with MUTANTS[named].patch():
        assert explore(worlds.CALM, stop_at=0).graph != calm.graph


def known(config):
    report = explore(config)
    return worlds.Known(config, frozenset(report.coverage), report.graph)


def test_mutants_of_a_row_are_what_they_say():
    mutants = mutate.row_mutants()
    assert len({m.name for m in mutants}) == len(mutants) > 500
    assert {m.row for m in mutants} == set(range(len(t.ROWS)))
    one = next(m for m in mutants if m.name.startswith("sender T done [uuid_mine]: without free_budget"))
    before = t.COMPILED
    with one.patch():
        assert "free_budget" not in t.ROWS[one.row].effects and t.COMPILED is not before
    assert t.COMPILED is before and "free_budget" in t.ROWS[one.row].effects


# ---------------------------------------------------------------- the commands


def replayed(*args):
    done = CliRunner().invoke(app, ["replay", *map(str, args)])
    return done.exit_code, done.output


@pytest.mark.parametrize("in_model", [False, True])
def test_replay_shows_a_mutant_and_the_program_without_it(in_model):
    names = [n for n in [*MODEL, *ROWS] if ("model" in file_of(n)[1]) == in_model]
    rule, path = KEPT["killed"][names[0]]
    code, text = replayed("--mutant", names[0], ROOT / path)
    assert code == 1 and rule in text
    assert replayed(ROOT / path)[0] == 0


def test_replay_refuses_a_mutant_and_a_model_that_do_not_exist(tmp_path):
    code, text = replayed("--mutant", "nothing at all", ROOT / KEPT["killed"][ROWS[0]][1])
    assert code == 2 and "nothing at all" in text
    trace = next(trace for _, trace in map(file_of, MODEL) if "model" in trace)
    trace["model"]["bounds"]["no_such"] = 1
    path = tmp_path / "wrong.json"
    path.write_text(dumps(trace))
    code, text = replayed(path)
    assert code == 2 and "no_such" in text


def test_a_scenario_beside_a_model_runs_in_the_simulator_too():
    trace = next(trace for _, trace in map(file_of, MODEL) if "model" in trace)
    assert not run_trace(trace).violations


def test_the_command_lists_what_survives(monkeypatch):
    monkeypatch.setattr(worlds, "known", lambda: [])
    trace = json.loads((ROOT / "tests" / "traces" / "B97-slow-prefill.json").read_text())
    monkeypatch.setattr(
        campaigns, "recorded_traces", lambda *folders: [("B97-slow-prefill", "B97-slow-prefill.json", trace)]
    )
    monkeypatch.setattr(mutate, "mistakes", lambda: [MUTANTS["pages at intake"]])
    done = CliRunner().invoke(app, ["mutate", "--mistakes", "--seeds", "0"])
    assert done.exit_code == 0 and "1 of 1 mutants" in done.output, done.output
    nothing = mutate.Mutant("nothing at all", "nothing", contextlib.nullcontext)
    monkeypatch.setattr(mutate, "mistakes", lambda: [nothing])
    done = CliRunner().invoke(app, ["mutate", "--mistakes", "--seeds", "0"])
    assert done.exit_code == 1 and "not argued: nothing at all" in done.output
