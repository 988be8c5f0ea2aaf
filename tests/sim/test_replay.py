"""Every trace file of the project replays as it expects, twice the same, in any process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdjax.sim.cli import app
from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import load, loads, parse

TRACES = sorted((Path(__file__).parent.parent / "traces").glob("*.json"))
READY = next(p for p in TRACES if p.name == "ready-lost-once.json")


def sim(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.mark.parametrize("path", TRACES, ids=[p.stem for p in TRACES])
def test_a_trace_replays_as_it_expects(path):
    trace = load(path)
    result = run_trace(trace)
    assert result.mismatches == []
    assert result.broken == list(trace.violations), [str(v) for v in result.violations]
    assert run_trace(load(path)).digest == result.digest
    assert result.differs_at is None
    assert parse(
        {**trace.raw, "choices": result.choices, "digest": result.digest}
    ).choices  # what --pin writes is read


def test_the_file_and_its_name_agree():
    for path in TRACES:
        name = load(path).name
        assert path.stem.lower().replace("_", "-") == name or path.stem.endswith(name), path


def test_every_file_says_what_comes_out():
    for path in TRACES:
        wanted = json.loads(path.read_text())["expect"]["outcomes"].values()
        assert wanted, path
        assert "any" not in {w["outcome"] if isinstance(w, dict) else w for w in wanted}, path


def digests_elsewhere(seed: str) -> dict[str, str]:
    """The digests of all traces from a process of its own with that PYTHONHASHSEED."""
    script = (
        "import sys, json; from pathlib import Path; from pdjax.sim.replay import run_trace;"
        "from pdjax.sim.trace_file import load;"
        "print(json.dumps({p: run_trace(load(Path(p))).digest for p in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, TRACES)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_log_is_the_same_in_any_process_on_any_hash_seed():
    first, second = digests_elsewhere("1"), digests_elsewhere("4242")
    assert first == second
    assert first[str(READY)] == run_trace(load(READY)).digest


def test_another_seed_is_another_run():
    raw = loads(READY.read_text())
    digests = {run_trace({**raw, "seed": seed}).digest for seed in range(6)}
    assert len(digests) > 1


# ------------------------------------------------------------------ choices and digest


def test_the_choices_of_a_run_give_the_same_run_whatever_the_seed_draws():
    """Without jitter every draw is a tie, and the ties are in the choices: only epochs come from the seed."""
    raw = {**loads(READY.read_text()), "seed": 3}
    ran = run_trace(raw)
    again = run_trace({**raw, "choices": ran.choices, "digest": ran.digest})
    assert again.differs_at is None and again.choices == ran.choices
    forced = run_trace({**raw, "seed": 4, "choices": ran.choices})
    assert forced.choices == ran.choices


def test_choices_that_stand_nowhere_are_passed_over():
    raw = loads(READY.read_text())
    result = run_trace({**raw, "choices": [{"deliver": ["ready", 999, 1]}, {"steps": [999]}]})
    assert result.ok


def test_a_pinned_file_replays_and_a_changed_one_has_diverged(tmp_path):
    pinned = tmp_path / "pinned.json"
    assert sim("replay", READY, "--pin", pinned).exit_code == 0
    assert sim("replay", pinned).exit_code == 0
    raw = json.loads(pinned.read_text())
    raw["steps"][0]["request"]["prompt"] = 10
    pinned.write_text(json.dumps(raw))
    told = sim("replay", pinned)
    assert told.exit_code == 3
    assert "diverged at event" in told.output and "this file, or the core, has changed" in told.output


def test_the_named_event_is_the_first_that_differs():
    raw = loads(READY.read_text())
    ran = run_trace(raw)
    whole, n, checks = ran.digest.split(":")
    assert run_trace({**raw, "digest": whole}).differs_at is None
    for at in (0, 7, len(ran.log_lines) - 1):
        other = "A" if checks[at] != "A" else "B"
        changed = run_trace({**raw, "digest": f"{'0' * 32}:{n}:{checks[:at]}{other}{checks[at + 1 :]}"})
        assert changed.differs_at == at
    assert run_trace({**raw, "digest": "0" * 32}).differs_at == 0


# ------------------------------------------------------------------ expectations


@pytest.mark.parametrize(
    ("expect", "text"),
    [
        ({"outcomes": {"a": "failed"}}, "a: failed expected, ok"),
        ({"outcomes": {"a": {"outcome": "ok", "within": 1}}}, "within 1 ms expected"),
        (
            {"outcomes": {"a": {"outcome": "any", "reason": "peer_lost"}}},
            "reason peer_lost expected, none found",
        ),
        ({"quiescent_within": 0, "outcomes": {}}, ""),
    ],
)
def test_an_expectation_that_is_not_met_is_told(expect, text):
    result = run_trace({**loads(READY.read_text()), "expect": expect})
    assert result.ok is (text == "")
    assert text in " ".join(result.mismatches)


def test_what_stays_taken_is_told():
    raw = loads((READY.parent / "d-dies-before-its-pull.json").read_text())
    steps = [s for s in raw["steps"] if "restart" not in s and s.get("at") != 4000]
    result = run_trace({**raw, "steps": steps, "expect": {"quiescent_within": 100}})
    assert any("not free 100 ms after the last outcome: p0" in m for m in result.mismatches)


def test_a_violation_that_does_not_come_is_told():
    result = run_trace({**loads(READY.read_text()), "expect": {"violations": ["S1"]}})
    assert not result.ok


def test_wrong_tokens_are_seen():
    """Without verification a corrupted part reaches the pool, and the client gets tokens that are not right."""
    raw = loads((READY.parent / "part-corrupted.json").read_text())
    raw["world"]["flags"]["disaggregation-verify"] = "off"
    result = run_trace({**raw, "expect": {}})
    assert result.outcomes["a"].reason == "wrong_tokens"
    assert "S13" in result.broken


# ------------------------------------------------------------------ regressions of the core


def test_look_ups_go_by_the_timer():
    """docs/decisions/0004: each answer of an empty registry led to the next look-up at once."""
    result = run_trace(load(READY.parent / "nobody-listed.json"))
    answers = sum(json.loads(line)["event"] == "candidates" for line in result.log_lines)
    assert 10 < answers < 40


# ------------------------------------------------------------------ the page


def test_the_first_scenario_of_the_page_gives_the_ladder_of_the_page(tmp_path, monkeypatch):
    page = (READY.parent.parent.parent / "docs" / "simulation.md").read_text()
    path = tmp_path / "lost.json"
    path.write_text(page.split("```json\n")[1].split("```")[0])
    monkeypatch.setenv("COLUMNS", "110")
    told = sim("replay", path)
    assert told.exit_code == 0
    shown = [line.split() for line in told.output.splitlines() if line.strip()][1:]
    stated = page.split("```\n   ms")[1].split("```")[0]
    assert [line.split() for line in f"   ms{stated}".splitlines() if line.strip()] == shown


def test_every_scenario_of_the_page_runs_as_it_says(tmp_path):
    page = (READY.parent.parent.parent / "docs" / "simulation.md").read_text()
    scenarios = [b.split("```")[0] for b in page.split("```json\n") if b.startswith('{\n  "format"')]
    assert len(scenarios) == 2
    for text in scenarios:
        (tmp_path / "page.json").write_text(text)
        assert sim("replay", tmp_path / "page.json").exit_code == 0
    told = json.loads(scenarios[0]) | {"expect": {"outcomes": {"a": "failed"}}}
    (tmp_path / "page.json").write_text(json.dumps(told))
    differs = sim("replay", tmp_path / "page.json")
    assert differs.exit_code == 1 and page.split("```\na: ok after")[1].split("```")[0] in differs.output
    del told["steps"][0]["request"]["prompt"]
    told["steps"][0]["request"]["promt"] = 9
    (tmp_path / "page.json").write_text(json.dumps(told))
    wrong = sim("replay", tmp_path / "page.json")
    assert (
        wrong.exit_code == 2 and "steps[0].request.promt: unknown key; known are rid, room, " in wrong.output
    )


def test_the_flags_of_the_page_are_sound():
    page = (READY.parent.parent.parent / "docs" / "simulation.md").read_text()
    flags = next(block for block in page.split("```json\n") if block.startswith('"flags"')).split("```")[0]
    raw = loads(READY.read_text())
    assert run_trace({**raw, "world": json.loads("{" + flags + "}")}).ok


# ------------------------------------------------------------------ the command


def test_replay_shows_a_ladder_and_writes_its_files(tmp_path):
    svg, chrome, log = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.ndjson"
    told = sim("replay", READY, "--svg", svg, "--perfetto", chrome, "--log", log)
    assert told.exit_code == 0
    assert "a: ok after" in told.output and "T→S" in told.output
    assert svg.read_text().startswith("<svg") and "✗" in svg.read_text()
    names = {event["name"] for event in json.loads(chrome.read_text())["traceEvents"]}
    assert {"Transferring", "ready", "#1 drop ready room 7"} <= names
    assert sim("check-log", log, "--complete").exit_code == 0


IDLE = (
    {"transfer": {"match": {"room": 7, "part": 5}, "do": "fail"}},
    {"message": {"match": {"type": "ready"}, "nth": 99, "do": "drop"}},
)


def test_a_rule_that_never_acts_is_told(tmp_path):
    raw = json.loads(READY.read_text())
    quiet = run_trace(raw)
    raw["steps"] += [{"at": 0, **rule} for rule in IDLE]
    (tmp_path / "idle.json").write_text(json.dumps(raw))
    told = sim("replay", tmp_path / "idle.json")
    assert told.exit_code == 0 and told.output.count("never acted: ") == 2
    assert "never acted: #2 fail" in told.output and "never acted: #3 drop ready" in told.output
    assert quiet.idle_rules == [] and run_trace(raw).idle_rules == [2, 3]


def test_replay_as_json():
    told = sim("replay", READY, "--json")
    assert told.exit_code == 0
    report = json.loads(told.output)
    assert report["outcomes"]["a"]["outcome"] == "ok" and report["violations"] == [] and report["exit"] == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps": [{"at": 0, "crash": "p7"}]}, "steps[0].crash"),
        ({"typo": 1}, "typo: unknown key"),
        ({"world": {"ranks": 2}}, "world.ranks"),
    ],
)
def test_a_wrong_file_is_exit_2_and_names_the_key(tmp_path, change, text):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**loads(READY.read_text()), "expect": {}, **change}))
    told = sim("replay", path)
    assert told.exit_code == 2 and text in told.output


def test_a_file_that_is_not_there_and_an_engine_that_is_not():
    assert sim("replay", "/nowhere/at/all.json").exit_code == 2
    assert sim("replay", READY, "--engine", "abacus").exit_code == 2


def test_an_outcome_that_differs_is_exit_1(tmp_path):
    path = tmp_path / "differs.json"
    path.write_text(json.dumps({**loads(READY.read_text()), "expect": {"outcomes": {"a": "aborted"}}}))
    assert sim("replay", path).exit_code == 1
