"""`make test` leaves no test out, and a part that fails makes it fail."""

import os
import signal
import subprocess
import sys
import time

import pytest
import run_all


@pytest.fixture(autouse=True)
def own_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_every_test_is_in_one_part():
    """What no part names is in the one that names nothing."""
    named = [name for part in run_all.PARTS for name in part]
    assert len(set(named)) == len(named) and all((run_all.TESTS / name).is_dir() for name in named)
    assert run_all.PARTS.count(()) == 1
    assert run_all.arguments(()) == [
        str(run_all.TESTS), *(f"--ignore={run_all.TESTS / name}" for name in named)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "chosen", "expected"), [("pass", "it", 0), ("assert False", "it", 1), ("pass", "nothing", 5)]
)
def test_its_code_is_that_of_its_parts(tmp_path, monkeypatch, capfd, line, chosen, expected):
    """As pytest's own: a part without a chosen test is no failure, all of them are."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "test_one.py").write_text(f"def test_it():\n    {line}\n")
    monkeypatch.setattr(run_all, "TESTS", tmp_path)
    monkeypatch.setattr(run_all, "PARTS", [("one",), ()])
    monkeypatch.setattr(sys, "argv", ["run_all.py", "-p", "no:cacheprovider", "-k", chosen])
    assert run_all.main() == expected
    said = capfd.readouterr().out
    assert ("1 passed" in said, "1 failed" in said) == (expected == 0, expected == 1)
    assert said.endswith("== failed (their output is above): tests/one\n") == (expected == 1)


RUNS = """
import pathlib, sys
sys.path[:0] = [{tests!r}]
import run_all
run_all.TESTS = pathlib.Path({directory!r})
run_all.PARTS = [("one",), ()]
sys.argv = ["run_all.py", "-p", "no:cacheprovider"]
sys.exit(run_all.main())
"""
SLOW = """
import os, pathlib, time
def test_it():
    try:
        pathlib.Path({directory!r}, "pid").write_text(str(os.getpid()))
        time.sleep(100)
    finally:
        pathlib.Path({directory!r}, "cleaned").touch()
"""


@pytest.mark.parametrize("how", ["SIGTERM", "a reader that has left"])
def test_whoever_ends_it_ends_its_parts(tmp_path, how):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "test_one.py").write_text(SLOW.format(directory=str(tmp_path)))
    code = RUNS.format(tests=str(run_all.TESTS), directory=str(tmp_path))
    if how != "SIGTERM":
        code = code.replace("import run_all", "import run_all; run_all.SAY_S = 0.5")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as whole:
        deadline = time.monotonic() + 90
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline and whole.poll() is None
            time.sleep(0.05)
        if how == "SIGTERM":
            whole.send_signal(signal.SIGTERM)
        else:
            whole.stdout.close()
        assert whole.wait(90) == (143 if how == "SIGTERM" else 1)
        assert b"Traceback" not in whole.stderr.read()
    assert (tmp_path / "cleaned").exists(), "pytest has ended its tests"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
