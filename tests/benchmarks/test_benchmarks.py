"""Each benchmark runs with tiny sizes, prints its figures and writes them: so that none of them rots."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(p.stem for p in BENCHMARKS.glob("*.py") if not p.stem.startswith("bench_") and p.stem != "all")
EXPECTED = {
    "pages": "pages to pages, 0.7 MB, checksums off",
    "kernels": "scatter, bfloat16, 2 layers × 3 pages",
    "handoff": "hand-off of one page, p50",
    "turn_time": "driver, all of the above, 20 waiting",
    "memory": "a waiting request on P",
    "registry": "look-up, HTTP, 40 instances",
    "overhead": "key of the side channel, one hand-off",
    "shared_prefix": "TTFT of 40 shared tokens, warm / cold",
    "serving": "TTFT, 1 at once, PD / ordinary server",
    "sim_rate": "one world, every property checked",
}


@pytest.mark.e2e
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_with_tiny_sizes(name, tmp_path):
    command = [sys.executable, str(BENCHMARKS / "all.py"), "--quick", "--out", str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / f"{name}.json").read_text())
    figures = {figure["name"]: figure["value"] for figure in told["figures"]}
    assert EXPECTED[name] in figures
    assert all(math.isfinite(value) and value > 0 for value in figures.values()), figures
    assert told["quick"] and told["machine"]["cores"] >= 1
    assert EXPECTED[name] in done.stdout.partition("all figures")[2], "the summary lacks it"


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("all")


def test_make_bench_runs_every_benchmark(runner):
    assert sorted(runner.BENCHMARKS) == NAMES == sorted(EXPECTED)


def test_a_benchmark_that_fails_leaves_the_others_and_fails_the_summary(
    runner, monkeypatch, tmp_path, capsys
):
    figure = {"name": "speed", "value": 3.0, "unit": "×", "baseline": "", "goal": 2.0, "met": False}
    good = f"import pathlib, sys; pathlib.Path(sys.argv[2]).write_text({json.dumps({'figures': [figure]})!r})"
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setattr(runner, "BENCHMARKS", ("bad", "good"))
    monkeypatch.setattr(sys, "argv", ["all.py", "--out", str(tmp_path / "out")])
    assert runner.main() == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["benchmarks"]
    assert summary["bad"] is None and summary["good"]["figures"] == [figure]
    printed = capsys.readouterr()
    assert "bad: failed with code 3" in printed.err
    assert "MISSED" in printed.out and "FAILED" in printed.out


def test_a_benchmark_that_is_late_may_end_its_own_processes(runner, monkeypatch, tmp_path):
    code = "import pathlib, sys, time\ntry: time.sleep(60)\nfinally: pathlib.Path(sys.argv[2] + '.ended').touch()"
    (tmp_path / "late.py").write_text(code)
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setattr(runner, "LIMIT_S", 3.0)
    assert runner.run_one("late", tmp_path, quick=False) is None
    assert (tmp_path / "late.json.ended").exists()


def test_an_unknown_benchmark_is_refused(runner, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["all.py", "speed"])
    with pytest.raises(SystemExit, match="2"):
        runner.main()
    assert "no benchmark is called speed" in capsys.readouterr().err


def test_a_terminated_benchmark_ends_what_it_has_started(tmp_path):
    """SIGTERM by default ends Python at once, and every `with` that holds servers would be skipped."""
    script = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import bench_common
bench_common.parse("")
try:
    print("started", flush=True)
    time.sleep(60)
finally:
    print("ended", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.terminate()
    assert process.communicate(timeout=30)[0] == "ended\n" and process.returncode == 128 + 15
