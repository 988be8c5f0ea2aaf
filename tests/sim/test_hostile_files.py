"""Files and calls that nobody should have made: one line and exit 2, never a traceback, a hang, or all of the memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from pdjax.core import log_lines
from pdjax.sim import campaigns, fuzz, limits, replay
from pdjax.sim.cli import app
from pdjax.sim.command import write
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import loads, parse

REQUEST = {"rid": "a", "room": 7, "prompt": 9, "output": 3}


def sim(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def file(*steps: dict, **keys: object) -> dict:
    return {"format": "pdjax.trace/1", "steps": [{"at": 0, "request": REQUEST}, *steps], **keys}


def asked(**keys: object) -> dict:
    return {"at": 0, "request": {**REQUEST, "rid": "b", "room": 70, **keys}}


TOO_LARGE = {
    "seed": file(seed=10**41),
    "steps[1].at": file({"at": 1e300, "crash": "p0"}),
    "steps[1].stop.for": file({"at": 0, "stop": {"node": "p0", "for": 1e9}}),
    "steps[1].message.by": file({"at": 0, "message": {"match": {}, "do": "delay", "by": 1e12}}),
    "steps[1].message.times": file({"at": 0, "message": {"match": {}, "do": "drop", "times": 10**30}}),
    "steps[1].clock.jump": file({"at": 0, "clock": {"node": "p0", "jump": -1e300}}),
    "steps[1].request": file(asked(prompt=10**9)),
    "steps[1].request.n": file(asked(n=10**9)),
    "steps[1].request.legs.prefill.delay": file(asked(legs={"prefill": {"delay": 1e10}})),
    "world": file(world={"prefill": [f"p{i}" for i in range(limits.MAX_NODES)]}),
    "world.pools": file(world={"pools": [f"k{i}" for i in range(limits.MAX_POOLS + 1)]}),
    "world.pages.d0": file(world={"pages": {"d0": 10**9}}),
    "world.page_size": file(world={"page_size": 10**40}),
    "world.flags.num-pages": file(world={"flags": {"num-pages": 10**40}}),
    "world.timing.link": file(world={"timing": {"link": 1e300}}),
    "world.router.timeout": file(world={"router": {"timeout": 1e300}}),
    "world.clock_offset.p0": file(world={"clock_offset": {"p0": 1e300}}),
    "expect.quiescent_within": file(expect={"quiescent_within": 1e300}),
    "expect.outcomes.a.within": file(expect={"outcomes": {"a": {"outcome": "ok", "within": 1e300}}}),
}


@pytest.mark.parametrize("key", TOO_LARGE)
def test_what_no_machine_could_run_is_refused_with_its_key(key):
    with pytest.raises(TraceError) as found:
        parse(TOO_LARGE[key])
    assert found.value.path == key


def test_too_many_steps(monkeypatch):
    monkeypatch.setattr(limits, "MAX_STEPS", 1)
    with pytest.raises(TraceError, match=r"^steps: at most 1 steps can be simulated, 2 found"):
        parse(file({"at": 0, "crash": "p0"}))


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"steps": [{"at": ' + "9" * 5000 + "}]}", r"steps\[0\]\.at: a number of 5000 digits"),
        ('{"name": "\\ud800"}', "name: .*half of a character"),
        ('{"world": {"\\udfff": 1}}', "world: the key .*half of a character"),
        *[("[" * depth + "]" * depth, "nested too deep") for depth in (limits.MAX_DEPTH + 1, 980, 100_000)],
    ],
    ids=range(6),
)
def test_json_that_python_itself_chokes_on(text, says):
    with pytest.raises(TraceError, match=says):
        loads(text)


@pytest.mark.parametrize("value", ["²", "9" * 5000, -1, 1 << 64])
def test_a_forged_number_that_is_none(value):
    forged = {"to": "p0", "from": "d0", "message": {"type": "done", "room": 7, "attempt": value}}
    with pytest.raises(TraceError, match=r"steps\[1\]\.inject\.message\.attempt"):
        parse(file({"at": 1, "inject": forged}))


def test_a_chain_of_prefixes_may_be_longer_than_the_stack():
    n = sys.getrecursionlimit() + 100
    chain = [asked(rid=f"r{i}", room=100 + i, prefix={"rid": f"r{i + 1}", "tokens": 3}) for i in range(n)]
    trace = parse(file(*chain, asked(rid=f"r{n}", room=100 + n)))
    run = replay.Run(trace, watch=False, conformance=False)
    values = {s.value["rid"]: s.value for s in trace.steps}
    first, last = (run.router.prompt_of(values[rid], values) for rid in ("r0", f"r{n}"))
    assert first[:3] == last[:3] and first[3:] != last[3:]


def test_a_world_without_end_is_said_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "long.json"
    path.write_text(json.dumps(file()))
    monkeypatch.setattr(replay, "MAX_EVENTS", 20)
    for command in ("replay", "explain"):
        result = sim(command, path)
        assert result.exit_code == 1 and result.stderr.count("\n") == 1
        assert f"{path}: no end after 20 events, at " in result.stderr


@pytest.mark.parametrize("content", [None, b"", os.urandom(300) + b"\xff", b"\xef\xbb\xbf{}", b"null"])
@pytest.mark.parametrize("command", ["replay", "shrink", "explain"])
def test_no_trace_is_one_line(command, content, tmp_path):
    path = tmp_path / "x.json"
    if content is None:
        path = tmp_path  # a folder
    else:
        path.write_bytes(content)
    result = sim(command, path)
    assert result.exit_code == 2 and result.stderr.startswith(f"{path}: ") and result.stderr.count("\n") == 1
    assert result.stderr.count(str(path)) == 1


def test_a_file_without_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr("pdjax.sim.trace_file.MAX_FILE_BYTES", 1000)
    result = sim("replay", "/dev/zero")
    assert result.exit_code == 2 and "more than 1,000 bytes" in result.stderr


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "S99"])
def test_explain_takes_any_text(name):
    assert sim("explain", name).exit_code == 2


def test_a_line_of_a_log_that_is_none(tmp_path):
    good = {"n": 1, "t": 0, "node": "p0", "epoch": "1", "event": "x"}
    assert log_lines.read([json.dumps(good).encode()])[1] == []
    for bad in ({"t": "x"}, {"epoch": "9" * 5000}, {"room": "9" * 5000}, {"pages": [1], "token": "9" * 5000}):
        assert [f.rule for f in log_lines.read([json.dumps({**good, **bad}).encode()])[1]] == ["log"]
    path = tmp_path / "deep.ndjson"
    path.write_text("[" * 100_000)
    assert sim("check-log", path).exit_code == 2
    assert sim("import", path, "-o", tmp_path / "o.json").exit_code == 2


# ---------------------------------------------------------------- where results go


def failing(path):
    path.write_text(json.dumps(file(expect={"outcomes": {"a": "failed"}})))
    return path


def test_results_that_cannot_be_written(tmp_path):
    trace = failing(tmp_path / "l.json")
    for where in ("/dev/null/x", ".", tmp_path):
        for command in (
            ["shrink", trace, "--limit", "0.1", "--out", where],
            ["replay", trace, "--log", where],
        ):
            result = sim(*command)
            assert result.exit_code == 2 and result.stderr.count("\n") == 1, command


def test_a_campaign_says_at_its_start_that_it_could_not_save(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "campaign", lambda *a, **k: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        result = sim("fuzz", "--save", where)
        assert (
            result.exit_code == 2 and result.stderr == f"--save {where}: no folder that can be written to\n"
        )
    assert campaigns.can_hold_files(tmp_path / "new" / "below") and not (tmp_path / "new").exists()


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path, "old")

    def fails(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fails)
    with pytest.raises(campaigns.typer.Exit):
        write(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_mutate_away_from_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sim("mutate")
    assert result.exit_code == 2 and "at the root of the project" in result.stderr


def test_a_terminal_without_unicode(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(file()))
    code = "from pdjax.sim.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", path],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and b"a: ok" in done.stdout and not done.stderr


def test_an_interrupt_ends_all_processes_and_none_complains():
    """Ctrl-C goes to the whole group, also to workers that have hardly begun."""
    # A job in the background of a script is started with the signal ignored, and hands that on.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeds}; from pdjax.sim.cli import main; main()"
    command = [sys.executable, "-c", code, "fuzz", "--seeds", "100000", "--jobs", "2"]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert started.stderr is not None and "seeds," in started.stderr.readline()
    os.killpg(started.pid, signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130 and "Traceback" not in errors
    until = time.monotonic() + 30
    while time.monotonic() < until and alive(started.pid):
        os.sched_yield()
    assert not alive(started.pid)


def alive(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as stat:
                state, _, pgrp = stat.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(entry))
    return found
