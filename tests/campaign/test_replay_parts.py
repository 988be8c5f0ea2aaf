"""What stands between a file and real processes: what they can do, when steps strike, which rooms, what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdjax.campaign import express
from pdjax.campaign.anchors import MILESTONES, anchored, tied
from pdjax.campaign.client import Record
from pdjax.campaign.plans import FleetPlan, NodePlan
from pdjax.campaign.replay import EXTRA_S, differences, fresh_rooms, overdue, speed_of
from pdjax.campaign.scenario import Scenario
from pdjax.core.settings import PDSettings
from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import load, parse
from pdjax.sim.trace_types import On

TRACES = Path(__file__).parent.parent / "traces"
REQUEST = {"rid": "a", "room": 7, "prompt": 9, "output": 3}


def trace(*steps, **world):
    return parse(
        {"format": "pdjax.trace/1", "world": world, "steps": [{"at": 0, "request": REQUEST}, *steps]}
    )


# ---------------------------------------------------------------- what processes can be made to do


@pytest.mark.parametrize(
    ("step", "world", "why"),
    [
        ({"at": 1, "clock": {"node": "p0", "jump": 1}}, {}, "wall clock"),
        ({"at": 1, "partition": {"between": ["p0", "b0"], "for": 1}}, {}, "partition from b0"),
        ({"on": {"event": "evicted"}, "crash": "p0"}, {}, "on evicted"),
        ({"at": 0, "transfer": {"match": {"part": 1}, "do": "hang"}}, {}, "further part"),
        ({"at": 0, "message": {"match": {"type": "ready"}, "do": "drop"}}, {"prefill": ["p0", "p1"]}, "counts"),
        ({"at": 9, "crash": "p0"}, {"pools": ["main_kv", "recurrent_state"]}, "pools"),
        ({"at": 9, "crash": "p0"}, {"clock_offset": {"p0": 5}}, "clock_offset"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(step, world, why):
    assert any(why in reason for reason in express.cannot(trace(step, **world)))


@pytest.mark.parametrize(
    "step",
    [
        {"at": 0, "message": {"match": {"type": "ready"}, "do": "drop"}},
        {"at": 0, "message": {"match": {"from": "p0"}, "do": "drop", "times": None}},
        {"at": 1, "partition": {"between": ["p0", "d0"], "for": 1}},
        {"at": 1, "drain": "d0"},
        {"at": 1, "drain": "p0"},
        {"on": {"event": "sent", "message": "hello"}, "crash": "p0"},
    ],
)
def test_what_can_be_done_has_no_reason_against_it(step):
    assert express.cannot(trace(step)) == []


def test_most_of_our_files_can_be_run_and_each_of_the_others_has_a_reason():
    reasons = {path.stem: express.cannot(load(path)) for path in sorted(TRACES.glob("*.json"))}
    assert sum(not why for why in reasons.values()) > 150
    (why,) = reasons["a-refused-candidate-while-another-remains"]
    assert "listed as long as it refuses" in why and not reasons["drained-under-a-long-step"]
    assert reasons["B51-clocks-apart"] and not reasons["B59-replaced-behind-the-same-address"]


def test_a_way_through_the_model_is_no_scenario():
    path = next(
        p for p in sorted((TRACES.parent / "mutants").glob("*.json")) if "model" in json.loads(p.read_text())
    )
    assert express.cannot(load(path)) == ["a way through the model, not a scenario"]


def test_timers_are_stretched_alike_and_still_sound():
    slow = express.slowed(PDSettings(), 3.0)
    assert slow.lease_s == 45 and slow.max_rooms == PDSettings().max_rooms and slow.check() == []


def test_several_p_have_an_address_each():
    """A look-up filters by the host that was injected: one host for all would make each a candidate of every request."""
    plan = express.plan_of(trace(prefill=["p0", "p1"]), 2.0, Path("x"))
    assert [node.host for node in plan.nodes] == ["127.0.0.2", "127.0.0.3", "127.0.0.1"]


# ---------------------------------------------------------------- when steps strike


def test_a_drained_node_of_a_file_refuses_as_long_as_its_legs_may_come():
    """The simulator's goes on for ever; and no other fleet is slower for it."""
    for steps, lingers in (([{"at": 1, "drain": "p0"}], True), ([], False)):
        plan = express.plan_of(trace(*steps), 2.0, Path("x"))
        assert [("--drain-linger" in node.options) for node in plan.nodes] == [lingers] * 2


def test_a_step_at_a_time_waits_for_what_precedes_it_in_the_simulator():
    file = trace({"at": 3, "abort": {"rid": "a"}})
    simulated = run_trace(file)
    trigger = anchored(file, simulated.log_lines)[1]
    lines = [json.loads(line) for line in simulated.log_lines]
    (until,) = [i for i, line in enumerate(lines) if line["event"] == "step"]
    before = [x for x in lines[:until] if x["event"] in MILESTONES and "role" not in x and "room" in x]
    assert trigger.on == On(before[-1]["event"], 7, before[-1]["node"])
    assert (trigger.nth, trigger.after_ms, trigger.by_ms) == (1, 0, 3)


def test_a_step_long_after_its_event_keeps_its_distance():
    file = trace({"at": 500, "crash": "p0"})
    trigger = anchored(file, run_trace(file).log_lines)[1]
    assert 490 < trigger.after_ms < 500


def test_a_step_before_everything_keeps_its_time():
    file = trace({"at": 0.01, "inject": {"to": "p0", "bytes": "00"}})
    assert anchored(file, run_trace(file).log_lines)[1].at_ms == 0.01


def test_a_file_tied_to_events_ends_as_the_file_itself():
    file = load(TRACES / "B18-everything-twice.json")
    first = run_trace(file)
    again = run_trace(parse(tied(file.raw, anchored(file, first.log_lines))))
    assert {k: v.outcome for k, v in again.outcomes.items()} == {
        k: v.outcome for k, v in first.outcomes.items()
    }


# ---------------------------------------------------------------- rooms


def test_a_room_is_moved_only_when_its_processes_have_seen_it():
    raw = json.loads((TRACES / "B17-abort-of-a-transfer.json").read_text())
    used: set[int] = set()
    assert fresh_rooms(raw, used) == raw
    moved = fresh_rooms(raw, used)
    rooms = [int(step["request"]["room"]) for step in raw["steps"] if "request" in step]
    assert [s["request"]["room"] for s in moved["steps"] if "request" in s] == [r + 1_000_000 for r in rooms]
    waits = [step["on"]["room"] for step in moved["steps"] if "room" in step.get("on", {})]
    assert waits and all(room > 1_000_000 for room in waits)
    assert run_trace(parse(moved)).ok


def test_rooms_that_are_there_for_their_bits_stay():
    raw = json.loads((TRACES / "rooms-beyond-53-bits.json").read_text())
    used: set[int] = set()
    fresh_rooms(raw, used)
    assert fresh_rooms(raw, used)["steps"] == raw["steps"]


# ---------------------------------------------------------------- the comparison


def seen(**changes):
    record = Record("a", REQUEST, [], {}, [], 0.0)
    record.outcome, record.status = "ok", 200
    for name, value in changes.items():
        setattr(record, name, value)
    return {"a": record}


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "failed", "status": 503, "reason": "peer_lost"},
        {"wrong": "tokens [1], a server without PD gives [2]"},
    ],
)
def test_another_end_is_a_difference(changes):
    simulated = run_trace(trace())
    assert differences(simulated, seen()) == []
    assert len(differences(simulated, seen(**changes))) == 1
    assert len(differences(simulated, {})) == 1


def test_a_death_is_heard_on_two_ways_and_either_may_be_first():
    """D's connection to P closes, and its pull fails: which it sees first, its machine decides (trace B59)."""
    raw = json.loads((TRACES / "B59-replaced-behind-the-same-address.json").read_text())
    raw["steps"][3]["after"], raw["steps"][4]["at"] = 1000, 1500  # a real restart takes its time
    simulated = run_trace(parse(raw))

    def ended(reason):
        records = {}
        for rid, outcome in simulated.outcomes.items():
            (records[rid],) = seen(
                outcome=outcome.outcome, status=outcome.status, reason=outcome.reason
            ).values()
        records["a"].reason = reason
        return records

    assert differences(simulated, ended("part_failed")) == []
    assert len(differences(simulated, ended("peer_lost"))) == 1
    assert speed_of(raw, ended("peer_lost")) == "a death is heard before the pull fails"
    assert speed_of(raw, ended("deadline")) is None


def bounded(within):
    file = {"format": "pdjax.trace/1", "steps": [{"at": 0, "request": REQUEST}]}
    return parse({**file, "expect": {"outcomes": {"a": {"outcome": "ok", "within": within}}}})


@pytest.mark.parametrize(
    ("within", "took_s", "stood_s", "n_found"),
    [(500, 0.9 + EXTRA_S, 0, 0), (500, 1.1 + EXTRA_S, 0, 1), (500, 9.9 + EXTRA_S, 9, 0), (500, 0.9, 0, 0)],
)
def test_an_end_later_than_the_file_allows_is_a_difference(within, took_s, stood_s, n_found):
    """Twice as slow as the file says, and a second more for a loaded machine."""
    records = seen(began_s=100.0, ended_s=100.0 + took_s)
    found = overdue(bounded(within), records, 2.0, lambda from_s, to_s: stood_s)
    assert len(found) == n_found and all("within 2 s expected" in what for what in found)
    assert overdue(trace(), records, 2.0, lambda from_s, to_s: stood_s) == []


def test_an_end_that_never_came_is_not_late_as_well():
    assert overdue(bounded(1), seen(), 2.0, lambda from_s, to_s: 0) == []
    assert overdue(bounded(1), {}, 2.0, lambda from_s, to_s: 0) == []


def test_only_the_part_of_a_restart_within_a_request_is_taken_off_its_time():
    spans = [(10.0, 14.0), (20.0, 21.0)]
    scenario = Scenario(trace(), fleet=None, router=None, reference=None, slower=2.0, _stood=spans)
    assert scenario.stood_between(12.0, 30.0) == 3.0
    assert scenario.stood_between(11.0, 13.0) == 2.0
    assert scenario.stood_between(14.0, 20.0) == 0.0


def test_who_runs_another_model_meets_nobody():
    nodes = (NodePlan("p0"), NodePlan("d0", ("--page-size", "4", "--model", "other")))
    alone = FleetPlan("tiny", nodes)
    assert not alone.can_meet("p0") and not alone.can_meet("d0")
    both = FleetPlan("tiny", (*nodes, NodePlan("d1"), NodePlan("p1", ("--model", "other"))))
    assert all(both.can_meet(name) for name in ("p0", "d0", "d1", "p1"))
