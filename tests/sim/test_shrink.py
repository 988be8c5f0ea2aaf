"""Shrinking keeps the failure and loses the rest; explaining names property, row and owner."""

import json
import time

import pytest
from typer.testing import CliRunner

from pdjax.sim import mutate
from pdjax.sim.cli import app
from pdjax.sim.draw import draw
from pdjax.sim.replay import run_trace
from pdjax.sim.shrink import shrink, signature_of
from pdjax.sim.trace_file import dumps


def mistake(name):
    return next(m for m in mutate.mistakes() if m.name == name).patch()


def failing_seed(name, wanted):
    for seed in range(400):
        trace = draw(seed)
        if wanted in signature_of(trace):
            return trace
    raise AssertionError(f"{name} breaks {wanted} in no world")


@pytest.mark.parametrize(
    "name, wanted, steps",
    [("free on send", "S3", 2), ("count instead of set", "S7", 3), ("budget freed without quiet", "S1", 5)],
)
def test_a_failing_world_becomes_a_few_steps(name, wanted, steps):
    with mistake(name):
        trace = failing_seed(name, wanted)
        began = time.process_time()
        small = shrink(trace, signature=(wanted,), limit_s=8.0)
        assert time.process_time() - began < 12
        assert wanted in signature_of(small.trace)
    assert len(small.trace["steps"]) <= steps < len(trace["steps"])
    assert signature_of(small.trace) == ()  # it was the mistake


def test_a_trace_that_passes_is_not_shrunk():
    with pytest.raises(ValueError, match="passes"):
        shrink(draw(0))


def test_commands(tmp_path):
    path = tmp_path / "t.json"
    trace = {
        "format": "pdjax.trace/1",
        "name": "wrong-on-purpose",
        "steps": [
            {"at": 0, "request": {"rid": "a", "room": 7, "prompt": 9, "output": 3}},
            {"at": 40, "request": {"rid": "b", "room": 8, "prompt": 9, "output": 3}},
        ],
        "expect": {"outcomes": {"a": "failed"}},
    }
    path.write_text(dumps(trace))
    done = CliRunner().invoke(app, ["shrink", str(path)])
    assert done.exit_code == 0, done.output
    small = json.loads((tmp_path / "t.small.json").read_text())
    assert len(small["steps"]) == 1 and small["steps"][0]["request"]["prompt"] == 1
    said = CliRunner().invoke(app, ["explain", str(path)])
    assert said.exit_code == 0 and "a: failed expected" in said.output
    assert CliRunner().invoke(app, ["shrink", str(tmp_path / "none.json")]).exit_code == 2
    assert CliRunner().invoke(app, ["explain", "S77"]).exit_code == 2
    assert "not shown" in CliRunner().invoke(app, ["explain", "S9"]).output


def test_a_violation_is_explained_with_its_row_its_room_and_the_owners():
    from pdjax.sim.explain import explain

    with mistake("budget freed without quiet"):
        trace = failing_seed("quiet", "S1")
        text = explain(run_trace(trace))
    assert "S1: a page, a packed byte" in text and "row " in text and "until then:" in text
    assert explain(run_trace(draw(0))).startswith("Nothing to explain")
