"""Every ``sim`` command runs where JAX, and all that only serving needs, cannot be imported: no import hides behind one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdjax.sim.cli import app
from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import dumps, load

TRACES = Path(__file__).parent.parent / "traces"
PLAIN = TRACES / "plain.json"

# What docs/simulation.md says can be left out.
SERVING_ONLY = [
    "jax", "jaxlib", "libtpu", "zmq", "httpx", "fastapi", "uvicorn", "safetensors", "tokenizers", "jinja2",
    "gguf",
]  # fmt: skip

# A process in which importing these fails as on a machine that has none of them; then the commands, one by one.
PROCESS = f"""
import importlib.abc, json, sys
SERVING_ONLY = {SERVING_ONLY}
"""
PROCESS += """

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in SERVING_ONLY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from typer.testing import CliRunner
from pdjax.sim.cli import app

told = {}
for call in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, call)
    raised = done.exception if not isinstance(done.exception, SystemExit) else None
    told[" ".join(call)] = [done.exit_code, repr(raised or ""), done.output]
assert not set(SERVING_ONLY) & set(sys.modules)
print(json.dumps(told))
"""


def without_jax(calls: list[list[str]], cwd: Path) -> dict[str, list]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, json.dumps(calls)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture
def calls(tmp_path) -> list[tuple[list[str], int, str]]:
    """(call, exit code, what its output has), every command at least once."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests" / "traces").mkdir(parents=True)
    broken = json.loads(PLAIN.read_text())
    broken["expect"] = {"outcomes": {"a": "failed"}}
    (tmp_path / "broken.json").write_text(dumps(broken))
    lines = [line for line in run_trace(load(PLAIN)).log_lines if json.loads(line)["node"] in ("p0", "d0")]
    (tmp_path / "run.ndjson").write_bytes(b"".join(lines))
    return [
        (["replay", str(PLAIN), "--svg", "a.svg", "--perfetto", "a.json", "--log", "a.ndjson"], 0, "a: ok"),
        (["replay", str(PLAIN), "--engine", "jax"], 2, "jax is not installed"),
        (["replay", str(PLAIN), "--json"], 0, '"a": {"outcome": "ok"'),
        (["check-log", "a.ndjson"], 0, "0 findings"),
        (["import", "run.ndjson", "-o", "imported.json"], 0, "sim replay imported.json"),
        (["replay", "imported.json"], 0, "ok after"),
        (["fuzz", "--seeds", "2", "--coverage"], 0, "2 seeds, 0 failed"),
        (["check", "alien"], 0, "alien: 520 states"),
        (["shrink", "broken.json", "--limit", "0.2"], 0, "steps became"),
        (["explain", "broken.json"], 0, "failed"),
        (["explain", "S1"], 0, "S1"),
        (["diagram", "sender"], 0, "stateDiagram"),
        (["docs", "--write"], 0, ""),
        (["mutate", "--mistakes", "--seeds", "0"], 1, "mutants noticed"),
    ]


def test_every_command_works_without_jax_and_what_only_serving_needs(calls, tmp_path):
    assert {call[0] for call, _, _ in calls} == {
        command.name or command.callback.__name__ for command in app.registered_commands
    }, "a new command is run here, too"
    told = without_jax([call for call, _, _ in calls], tmp_path)
    for call, code, has in calls:
        found, raised, output = told[" ".join(call)]
        assert (found, raised) == (code, "''"), (call, output[-500:])
        assert has in output, (call, output[-500:])


def test_a_hidden_import_would_be_seen(tmp_path):
    told = subprocess.run(
        [sys.executable, "-c", PROCESS.replace("from pdjax.sim.cli import app", "import jax"), "[]"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "No module named 'jax'" in told.stderr
