"""Event logs become traces that show the same: requests, rooms, faults, ends."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from pdjax.sim.cli import app
from pdjax.sim.importer import NoRun, import_logs, quicker
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


def cut_short(scenario: dict) -> list[tuple[int, str, int]]:
    """(room, why, tokens that had come) of each request that ended while D decoded it."""
    lines = map(json.loads, run_trace(scenario).log_lines)
    return [(x["room"], x["reason"], x["tokens"]) for x in lines if x["event"] == "cut_short"]


def decoding(*ends: dict, rooms: int = 1, flags: dict | None = None) -> dict:
    """A scenario: as many requests of thirty tokens, one after the other in room 7; each end is a step."""
    asks = [
        {"at": 100_000 * i, "request": {"rid": "abc"[i], "room": 7, "prompt": 20, "output": 30}}
        for i in range(rooms)
    ]
    return {"format": "pdjax.trace/1", "world": {"flags": flags or {}}, "steps": [*asks, *ends]}


FIRST = {"event": "first_token", "room": 7, "node": "d0"}


@pytest.mark.parametrize(
    ("after", "flags"),
    [(0, {}), (5, {}), (20, {}), (0, {"disable-overlap-schedule": True}), (5, {"disable-overlap-schedule": True})],
)  # fmt: skip
def test_an_abort_after_the_hand_off_comes_after_as_many_tokens(after, flags):
    """The hand-off is a Success then, and no row of the table says how the request ended."""
    ours = decoding({"on": FIRST, "after": after, "abort": {"rid": "a", "to": ["decode"]}}, flags=flags)
    raw, said = import_logs(recorded(ours))
    assert cut_short(raw) == cut_short(ours) != []
    assert raw["expect"]["outcomes"] == shown(raw) == {"a": "aborted"} and said == []


def test_an_end_that_the_simulator_cannot_place_is_told():
    """A D that is paused says no token of what has landed, and no simulated one is."""
    lines = [json.loads(line) for line in recorded(decoding({"on": FIRST, "abort": {"rid": "a"}}))]
    for line in lines:
        if line["event"] == "first_token":
            line["event"] = "released"
        elif line["event"] == "cut_short":
            line["tokens"] = 0
    raw, said = import_logs([msgspec.json.encode(line) for line in lines])
    assert said == ["a: it ended after 0 tokens, in the simulator it may be others"]
    assert shown(raw) == {"a": "aborted"}


def test_the_second_use_of_a_room_is_the_one_that_is_cut_short():
    ours = decoding({"on": FIRST, "nth": 2, "after": 7, "disconnect": {"rid": "b"}}, rooms=3)
    raw, _ = import_logs(recorded(ours))
    assert cut_short(raw) == cut_short(ours) != []
    assert shown(raw) == {"a": "ok", "b": "aborted", "c": "ok"}


def test_what_d_computes_itself_is_cut_short_too():
    hurt = [
        {"at": 0, "transfer": {"match": {"room": 7}, "do": "fail"}},
        {"on": FIRST, "after": 7, "abort": {"rid": "a"}},
    ]
    ours = decoding(*hurt, flags={"disaggregation-on-failure": "recompute"})
    raw, _ = import_logs(recorded(ours))
    assert cut_short(raw) == cut_short(ours) != []
    assert shown(raw) == {"a": "aborted"}


def test_an_error_while_decoding_is_a_step():
    ours = decoding({"on": FIRST, "after": 7, "error": {"node": "d0", "in": "decode", "room": 7}})
    raw, _ = import_logs(recorded(ours))
    assert cut_short(raw) == cut_short(ours) != []
    assert shown(raw) == {"a": "failed"}


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


@pytest.mark.parametrize(
    ("trips", "left"), [([], []), ([5, 4, 3], [3, 4, 5]), ([900.0] * 6 + [1.0] * 4, [1.0] * 4 + [900.0])]
)
def test_a_link_is_as_fast_as_its_quicker_frames(trips, left):
    """With those that waited for a stopped process, D took a P for silent in the replay that was only as slow as its link."""
    assert quicker(trips) == left
