"""The sim command: exit codes, and the page that must not grow stale."""

import pathlib

from typer.testing import CliRunner

from pdjax.sim.cli import app
from pdjax.sim.docs import protocol_page
from pdjax.sim.world import World

ROOT = pathlib.Path(__file__).parent.parent.parent


def sim(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_the_protocol_page_is_fresh():
    assert (ROOT / "docs" / "protocol.md").read_text() == protocol_page(), "run `make docs`"


def test_a_log_is_checked(tmp_path):
    world = World()
    p, d = world.request(1, [1, 2, 3], 2)
    world.run(lambda: p.end is not None and d.end is not None, 5)
    good = tmp_path / "good.ndjson"
    good.write_bytes(b"".join(world.lines))
    assert sim("check-log", good).exit_code == 0
    bad = tmp_path / "bad.ndjson"
    bad.write_bytes(b"".join(world.lines[:8] + world.lines[9:]))
    result = sim("check-log", bad)
    assert result.exit_code == 2 and "n=" in result.output
    assert sim("check-log", tmp_path / "none").exit_code == 2


def test_a_mutant_that_is_not_there_is_told_with_those_near_it(tmp_path):
    """A row mutant's name has colons, that of a written-out mistake ends before the one of the page's table."""
    file = tmp_path / "a.json"
    file.write_text('{"format": "pdjax.trace/1", "steps": []}')
    for name in ("no epoch chek", "no epoch check: messages of an older life and of any age act"):
        told = CliRunner().invoke(app, ["replay", "--mutant", name, str(file)])
        assert told.exit_code == 2 and "near it: 'no epoch check'" in told.output


def test_diagrams():
    assert "Bootstrapping --> WaitingForInput" in sim("diagram", "receiver").output
    assert sim("diagram", "bystander").exit_code == 2
