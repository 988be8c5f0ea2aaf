"""Event logs become traces that show the same: requests, rooms, faults, ends."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from pdjax.sim.cli import app
from pdjax.sim.importer import NoRun, import_logs
from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import load, parse

TRACES = Path(__file__).parent.parent / "traces"


def recorded(
    scenario: str | dict, *, rename: dict[str, str] | None = None, shift: dict[str, float] | None = None
) -> list[bytes]:
    """The logs of the P and D processes of a simulated run, as real processes write them: no b0, x0 or sim."""
    lines = []
    trace = load(TRACES / f"{scenario}.json") if isinstance(scenario, str) else parse(scenario)
    for line in run_trace(trace).log_lines:
        raw = msgspec.json.decode(line)
        if raw["node"] in ("b0", "x0", "sim") or raw["event"] in ("crashed", "released"):
            continue
        raw["t"] += (shift or {}).get(raw["node"], 0.0)
        for key in ("node", "peer"):
            if key in raw:
                raw[key] = (rename or {}).get(raw[key], raw[key])
        lines.append(raw)
    counts: dict[tuple[str, str], int] = {}
    for raw in lines:
        life = (raw["node"], raw["epoch"])
        raw["n"] = counts.get(life, 0)
        counts[life] = raw["n"] + 1
    return [msgspec.json.encode(raw) for raw in lines]


def shown(raw: dict) -> dict[str, object]:
    result = run_trace(raw)
    assert result.broken == [], [str(v) for v in result.violations]
    assert result.mismatches == []
    return {rid: o.outcome for rid, o in result.outcomes.items()}


@pytest.mark.parametrize(
    ("name", "outcomes", "actions"),
    [
        ("plain", {"a": "ok"}, []),
        ("ready-lost-once", {"a": "ok"}, ["message"]),
        ("abort-on-p-while-it-prefills", {"a": "aborted"}, ["abort"]),
        ("part-corrupted", {"a": "failed"}, ["transfer"]),
        ("pull-slow", {"a": "ok"}, ["transfer"]),
        ("scatter-raises", {"a": "failed", "b": "ok"}, ["error"]),
        ("p-dies-under-a-pull-and-comes-back", {"a": "failed", "b": "ok"}, ["crash", "restart", "transfer"]),
        ("leg-refused", {"a": "rejected"}, []),
        ("leg-late", {"a": "ok"}, []),
        ("rooms-beyond-53-bits", {"a": "ok", "b": "ok"}, []),
        ("room-twice", {"a": "ok", "b": "rejected"}, []),
    ],
)
def test_a_recorded_run_replays_with_its_faults_and_ends(name, outcomes, actions):
    raw, _ = import_logs(recorded(name))
    assert shown(raw) == outcomes
    assert (
        sorted({a for s in raw["steps"] for a in s if a not in ("at", "on", "nth", "after", "request")})
        == actions
    )
    before = [s.value["room"] for s in load(TRACES / f"{name}.json").steps if s.action == "request"]
    assert sorted(s.value["room"] for s in parse(raw).steps if s.action == "request") == sorted(before)


def test_sizes_and_settings_come_from_the_log():
    raw, remarks = import_logs(recorded("plain"))
    ours, theirs = parse(raw).nodes, load(TRACES / "plain.json").nodes
    assert [n.settings for n in ours] == [n.settings for n in theirs]
    assert [(n.page_size, n.num_pages) for n in ours] == [(n.page_size, n.num_pages) for n in theirs]
    assert raw["steps"][0]["request"]["prompt"] == 9 and remarks == []


def test_names_of_real_nodes_and_clocks_that_are_apart():
    lines = recorded(
        "leg-late", rename={"p0": "prefill-7", "d0": "decode-a"}, shift={"p0": 5e6, "d0": -123.0}
    )
    raw, _ = import_logs(lines)
    (request,) = [s["request"] for s in raw["steps"]]
    assert (request["prefill"], request["decode"]) == ("p0", "d0")
    assert request["legs"]["prefill"]["delay"] == pytest.approx(700, abs=1)
    assert "prefill-7 = p0" in raw["source"]
    assert shown(raw) == {"a": "ok"}


def test_what_a_dead_process_did_not_hear_is_no_lost_message():
    """D goes on saying hello to a P that was killed: that is one crash, and it moves nobody's clock."""
    asks = [
        {"at": at, "request": {"rid": rid, "room": room, "prompt": 9, "output": 3, **more}}
        for at, rid, room, more in (
            (0, "a", 1, {}),
            (100, "b", 2, {"legs": {"prefill": {"drop": True}}}),
            (9000, "c", 3, {"legs": {"prefill": {"delay": 40}}}),
        )
    ]
    deaths = [{"at": 600, "crash": "p0"}, {"at": 2500, "restart": "p0"}]
    steps = [*asks, *deaths, {"at": 3000, "abort": {"rid": "b"}}]
    raw, _ = import_logs(recorded({"format": "pdjax.trace/1", "steps": steps}, shift={"p0": 5e6}))
    assert [a for s in raw["steps"] for a in s if a in ("message", "crash", "restart")] == [
        "crash",
        "restart",
    ]
    delay = raw["steps"][-1]["request"]["legs"]["prefill"]["delay"]
    assert delay == pytest.approx(40, abs=1)


def test_a_log_with_a_line_missing_is_refused():
    lines = recorded("plain")
    with pytest.raises(NoRun, match="not a whole event log"):
        import_logs(lines[:5] + lines[6:])
    with pytest.raises(NoRun, match="no event"):
        import_logs([])
    with pytest.raises(NoRun, match="no request"):
        import_logs([line for line in lines[:2] if b"started" in line])


def test_the_command(tmp_path):
    logs = {}
    for line in recorded("ready-lost-once"):
        logs.setdefault(json.loads(line)["node"], []).append(line)
    for node, lines in logs.items():
        (tmp_path / f"{node}.ndjson").write_bytes(b"\n".join(lines) + b"\n")
    files = [str(tmp_path / f"{node}.ndjson") for node in logs]
    out = tmp_path / "run.json"
    told = CliRunner().invoke(app, ["import", *files, "-o", str(out)])
    assert told.exit_code == 0, told.output
    assert CliRunner().invoke(app, ["replay", str(out)]).exit_code == 0
    (tmp_path / "p0.ndjson").write_bytes(b"{}\n")
    assert CliRunner().invoke(app, ["import", *files, "-o", str(out)]).exit_code == 2
    assert CliRunner().invoke(app, ["import", "/nowhere.ndjson", "-o", str(out)]).exit_code == 2
