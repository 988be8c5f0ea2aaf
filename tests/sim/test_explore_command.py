"""``sim check`` and ``sim diagram``: what they print, and their exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdjax.sim import trace_file
from pdjax.sim.cli import app
from pdjax.sim.explore import menu

runner = CliRunner()


def test_check_names_states_edges_and_rows() -> None:
    done = runner.invoke(app, ["check", "calm", "alien"])
    assert done.exit_code == 0, done.output
    states, edges = menu.SEARCHES["calm"].pinned
    assert f"calm: {states} states, {edges} edges" in done.output
    assert "rows reached" in done.output


def test_check_says_when_a_size_is_not_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(menu.PINNED, "calm", (1, 2))
    done = runner.invoke(app, ["check", "calm"])
    assert done.exit_code == 1
    assert "not the pinned size (1, 2)" in done.output


def test_check_prints_a_counterexample_in_words() -> None:
    done = runner.invoke(app, ["check", "one-room", "--drop", "limbo"])
    assert done.exit_code == 1
    assert " 12. p0: the limbo timer of room 7 fires" in done.output
    assert "⇒ S4: a pull of uuid" in done.output


def test_a_counterexample_is_written_as_a_scenario_that_replays(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    runner.invoke(app, ["check", "one-room", "--drop", "limbo", "--trace", str(file)])
    read = trace_file.load(file)
    assert [next(iter(s.keys() & {"request", "abort"})) for s in read.raw["steps"]] == ["request", "abort"]
    done = runner.invoke(app, ["replay", str(file)])
    assert done.exit_code == 0, done.output


def test_check_that_is_cut_short_does_not_pass() -> None:
    done = runner.invoke(app, ["check", "calm", "--max-states", "10"])
    assert done.exit_code == 1
    assert "NOT complete" in done.output


@pytest.mark.parametrize(
    "arguments", [["check", "nothing"], ["check", "--drop", "gravity"], ["diagram", "x"]]
)
def test_a_wrong_call_is_exit_2(arguments: list[str]) -> None:
    assert runner.invoke(app, arguments).exit_code == 2


def test_the_list_says_what_is_checked_and_what_is_not() -> None:
    out = runner.invoke(app, ["check", "--list"]).output
    assert "one-room " in out
    assert "S13  D's success" in out
    assert "Not expressible here" in out


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("mermaid", "Transferring --> Success: done"),
        ("dot", 'T -> S [label="done"];'),
        ("md", "| `kv_ready` |  |  | T |  |  |  |"),
    ],
)
def test_the_table_as_a_picture(form: str, line: str) -> None:
    done = runner.invoke(app, ["diagram", "sender", "--format", form])
    assert done.exit_code == 0
    assert line in done.output
