"""Random worlds in CI: each twice, nothing violated, and everything that must sometimes happen does."""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from last_resort import LAST_RESORT
from typer.testing import CliRunner

from pdjax.core import transitions as t
from pdjax.sim import fuzz
from pdjax.sim.cli import app
from pdjax.sim.draw import draw
from pdjax.sim.draw_faults import MAX_FAULTS, MAX_REQUESTS
from pdjax.sim.mutate import label
from pdjax.sim.properties.sometimes import MOMENTS
from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import dumps, parse

TRACES = Path(__file__).parents[1] / "traces"
SEEDS, CHUNKS = 160, 4


@pytest.fixture(scope="module")
def reached():
    return {"rows": Counter(), "moments": Counter(), "seeds": set()}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_worlds_violate_nothing_and_run_the_same_way_twice(chunk, reached):
    size = SEEDS // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        found = fuzz.run_seed(seed)
        assert not found.signature, f"sim fuzz --first {seed} --seeds 1: {found.text}"
        again = run_trace(draw(seed), conformance=False)
        assert again.digest == found.digest, f"seed {seed} ran in two ways"
        reached["rows"] += found.rows
        reached["moments"] += found.moments
        reached["seeds"].add(seed)


def test_every_row_and_every_moment_is_reached(reached):
    for seed in set(range(SEEDS)) - reached["seeds"]:  # when this test runs alone
        found = fuzz.run_seed(seed)
        reached["rows"] += found.rows
        reached["moments"] += found.moments
    for path in sorted(TRACES.glob("*.json")):
        result = run_trace(json.loads(path.read_text()), conformance=False)
        reached["rows"].update(result.coverage["rows"])
        reached["moments"].update(result.coverage["moments"])
    missing = {label(i) for i in range(len(t.ROWS)) if i not in reached["rows"]}
    assert missing == set(LAST_RESORT)
    assert [name for name in MOMENTS if name not in reached["moments"]] == []


def test_another_process_with_another_hash_seed_runs_the_same_worlds():
    seeds = range(5, SEEDS, 16)
    code = f"from pdjax.sim import fuzz\nfor s in {seeds}: print(fuzz.run_seed(s).digest)"
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == [fuzz.run_seed(s).digest for s in seeds]


def test_the_draw_covers_what_is_promised():
    """1-3 P and 1-3 D in every pair, 1 to 20 requests, 0 to 10 faults, and every kind of fault with every one of them."""
    worlds, requests, faults, clocks = Counter(), Counter(), Counter(), Counter()
    for seed in range(3000):
        trace = draw(seed)
        steps = trace["steps"]
        healed_ms = max(s["at"] for s in steps if "restart" in s and "at" in s)
        chaos = [s for s in steps if s.get("at") != healed_ms and not asks(s, "probe")]
        worlds[len(trace["world"]["prefill"]), len(trace["world"]["decode"])] += 1
        requests[sum(asks(s, "") for s in chaos)] += 1
        faults[sum(not asks(s, "") and "restart" not in s for s in chaos)] += 1
        crashed = {s["crash"] for s in chaos if "crash" in s}
        clocks.update(s["clock"]["jump"] < 0 for s in chaos if "clock" in s and s["clock"]["node"] in crashed)
    assert set(worlds) == {(p, d) for p in (1, 2, 3) for d in (1, 2, 3)} and min(worlds.values()) > 100
    assert set(requests) == set(range(1, MAX_REQUESTS + 1)) and min(requests.values()) >= 5
    assert set(faults) == set(range(MAX_FAULTS + 1)) and min(faults.values()) > 100
    assert set(clocks) == {True, False}  # also set back before a start: docs/decisions/0006


def asks(step, prefix):
    return "request" in step and step["request"]["rid"].startswith(prefix)


def test_a_seed_draws_one_file_and_every_file_is_valid():
    kinds, staging = Counter(), Counter()
    for seed in range(300):
        trace = draw(seed)
        assert dumps(trace) == dumps(draw(seed))
        parsed = parse(json.loads(dumps(trace)))
        assert all(not spec.settings.check() for spec in parsed.nodes)
        requests = [
            s for s in parsed.steps if s.action == "request" and not s.value["rid"].startswith("probe")
        ]
        assert 1 <= len(requests) <= MAX_REQUESTS
        kinds.update(s.action for s in parsed.steps)
        staging[sum(spec.settings.host_staging for spec in parsed.nodes if spec.role == "prefill")] += 1
    assert set(staging) == {0, 1, 2, 3} and staging[0] > 100
    assert set(kinds) == {
        "request", "abort", "disconnect", "message", "transfer", "inject", "error", "crash", "restart", "stop",
        "partition", "pages", "clock", "drain",
    }  # fmt: skip


def test_a_campaign_leaves_the_collector_as_it_was():
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            frozen = gc.get_freeze_count()
            assert fuzz.campaign(2).seeds == 2
            assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, frozen)
        finally:
            gc.enable()


def test_the_command_reports_and_stops_at_the_first_failure(tmp_path, monkeypatch):
    good = CliRunner().invoke(app, ["fuzz", "--seeds", "3", "--coverage"])
    assert good.exit_code == 0 and "3 seeds, 0 failed" in good.output and "moments:" in good.output
    from pdjax.sim import mutate

    broken = next(m for m in mutate.mistakes() if m.name == "free on send")
    with broken.patch():
        bad = CliRunner().invoke(app, ["fuzz", "--seeds", "40", "--save", str(tmp_path)])
    assert bad.exit_code == 1 and "S3" in bad.output
    (path,) = tmp_path.glob("*.json")
    small = json.loads(path.read_text())
    assert len(small["steps"]) <= 3
    assert run_trace(small).ok  # the program as it is has no such failure
