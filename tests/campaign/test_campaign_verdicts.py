"""What the campaigns promise and count, without a process: each verdict can fail."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pdjax.campaign import report, states
from pdjax.campaign.aborts import ALL, WAYS, Abort, beyond, bound_s, finds_nothing, goes_on, p_has_answered
from pdjax.campaign.answers import Answer, read_stream, read_whole
from pdjax.campaign.files import Campaign
from pdjax.campaign.matrix import (
    SETTINGS,
    SLACK_S,
    Cell,
    Promise,
    all_cells,
    first_failures,
    known_late,
    promise,
)  # fmt: skip
from pdjax.campaign.neighbours import Neighbours
from pdjax.campaign.replay import Report, Seen
from pdjax.campaign.rounds import Memory, Round, grown
from pdjax.campaign.soak import LEAST_FAULTS, LEAST_OK, Soak, kind_of, more_than
from pdjax.core import log_lines

PAGE = Path(__file__).parent.parent.parent / "docs" / "faults.md"


def test_the_matrix_is_whole_and_every_cell_has_a_promise():
    cells = all_cells()
    assert len(cells) == len(set(cells)) == 4 * 3 * 6
    for cell in cells:
        said = promise(*cell)
        assert said.outcomes and said.within_s > 0


def test_timers_of_the_matrix_are_sound():
    assert SETTINGS.check() == []


@pytest.mark.parametrize(
    ("cell", "outcome", "knows"),
    [
        (("p0", "kill", "pulling"), "failed", {"d0": 2.0}),
        (("p0", "stop", "queued"), "failed", {"d0": 3.7}),
        (("d0", "kill", "registered"), "failed", {"p0": 6.7}),
        (("p0", "kill", "decoding"), "ok", {}),
        (("b0", "stop", "prefilling"), "ok", {}),
        (("x0", "kill", "queued"), "failed", {}),
    ],
)
def test_what_is_promised(cell, outcome, knows):
    said = promise(*cell)
    assert said.outcomes == (outcome,) and dict(said.known) == pytest.approx(knows)


def event(t_ms, node, event, room, **more):
    return {"n": 0, "t": t_ms, "node": node, "epoch": "1", "event": event, "room": str(room), **more}


def test_the_first_failure_after_the_fault_counts_on_each_node():
    lines = [
        event(800.0, "p0", "leg", 7, role="sender", rid="m1"),
        event(800.0, "d0", "leg", 7, role="receiver", rid="m1"),
        event(900.0, "d0", "failed", 7),
        event(1500.0, "d0", "failed", 7, role="receiver"),
        event(1700.0, "d0", "failed", 7),
        event(1600.0, "d0", "failed", 7),
        event(4000.0, "p0", "failed", 7),
    ]
    assert failures(lines) == {"d0": 0.6, "p0": 3.0}


def failures(lines):
    read, wrong = log_lines.read([json.dumps(line).encode() for line in lines])
    assert wrong == []
    return first_failures(read, 1.0, "m1")


def test_a_request_that_follows_the_one_in_question_knows_nothing_for_it():
    """The next request meets a dead life as well, and fails at once."""
    follower = [event(2000.0, "d0", "leg", 8, role="receiver", rid="m2"), event(2100.0, "d0", "failed", 8)]
    own = [event(800.0, "d0", "leg", 7, role="receiver", rid="m1"), event(9000.0, "d0", "failed", 7)]
    assert failures(follower) == {}
    assert failures(follower + own) == {"d0": 8.0}


def test_who_does_not_know_in_time_is_named_with_the_time():
    said = Promise(("failed",), 2.0, (("d0", 2.0), ("p0", 6.7)))
    assert known_late({"d0": 0.0, "p0": 6.7 + SLACK_S}, said) == []
    assert known_late({"d0": 9.0}, said) == [
        "d0 knows after 9.0 s, promised are 2 s",
        "p0 knows after inf s, promised are 6.7 s",
    ]


def test_an_abort_at_p_alone_finds_nothing_once_its_leg_is_over():
    nothing = {(state, way) for state, way in ALL if finds_nothing(state, way)}
    assert {state for state, _ in nothing} == {"registered", "pulling", "decoding", *states.LOST}
    assert {way for _, way in nothing} == {"abort at P", "P's connection closes"}
    assert {state for state in states.QUEUE_OF if p_has_answered(state)} == {
        "registered",
        "pulling",
        "decoding",
        *states.LOST,
    }
    assert bound_s("pulling") > bound_s("prefilling") > bound_s("queued")


def test_every_queue_of_both_sides_is_a_state_to_abort_in():
    assert set(states.QUEUE_OF.values()) == {
        *(("p0", queue) for queue in ("gate", "budget_queue", "waiting", "prefilling")),
        *(("d0", queue) for queue in ("bootstrapping", "page_queue", "in_flight", "running")),
        *(("d0", queue) for queue in ("recompute", "prefilling")),
    }
    assert {state for state, _ in ALL} == set(states.QUEUE_OF)


@pytest.mark.parametrize(("state", "side"), [("gated", "decode"), ("bootstrapping", "prefill")])
def test_where_a_leg_has_not_come_nothing_can_be_ended_nor_closed(state, side):
    ways = {way for of, way in ALL if of == state}
    assert {WAYS[way] for way in ways if goes_on(state, way)} == {("abort", (side,))}
    assert all(side not in sides for kind, sides in map(WAYS.get, ways) if kind == "disconnect")
    assert len(ways) == 4


def test_what_was_held_before_is_not_counted_nor_are_pages():
    before = {"p0": {"budget_bytes": 10}, "d0": {"requests": 1}}
    assert beyond({"p0": {"budget_bytes": 10, "pages": 3}}, before) == {}
    assert beyond({"p0": {"budget_bytes": 15}, "d0": {"requests": 1}}, before) == {"p0": {"budget_bytes": 5}}


BASE = Memory(rss_bytes=400 << 20, arrays=100, array_bytes=5000, free_pages=64, threads=20, files=30)


@pytest.mark.parametrize(
    ("changes", "n_found"),
    [({}, 0), ({"rss_bytes": 430 << 20}, 0), ({"rss_bytes": 440 << 20}, 1), ({"arrays": 101}, 1), ({"free_pages": 63}, 1)],
)  # fmt: skip
def test_growth_is_seen(changes, n_found):
    assert len(grown(BASE, Memory(**{**vars(BASE), **changes}))) == n_found


def test_a_soak_in_which_too_little_happened_is_no_success():
    faults = Counter({"p killed": 1, "d stopped": 1, "message drop": LEAST_FAULTS - 2})
    assert Soak(1, 10, Counter(ok=LEAST_OK), faults).lacks() == []
    assert len(Soak(1, 10).lacks()) == 4
    assert len(Soak(1, 10, Counter(ok=LEAST_OK - 1), faults).lacks()) == 1
    assert len(Soak(1, 10, Counter(ok=LEAST_OK), faults - Counter({"p killed": 1})).lacks()) == 2
    others = Counter({"registry killed": LEAST_FAULTS})  # neither of P nor of D
    assert len(Soak(1, 10, Counter(ok=LEAST_OK), others).lacks()) == 2


def test_threads_and_files_that_are_left_are_seen():
    assert more_than(BASE, BASE) == []
    assert len(more_than(BASE, Memory(**{**vars(BASE), "threads": 40, "files": 90}))) == 2


def frame(ids, reason, **more):
    return {"output_ids": ids, "meta_info": {"finish_reason": reason and {"type": reason}}, **more}


def stream(*frames):
    return "".join(f"data: {json.dumps(one)}\n\n" for one in frames)


def test_a_stream_is_read_to_its_end():
    whole = [frame([5], None), frame([5, 6], "length")]
    assert read_stream(stream(*whole) + "data: [DONE]\n\n") == Answer(200, "", [[5, 6]], ["length"])
    for cut in ("", stream(whole[0]), stream(frame([5], "stop"), frame([7], None, index=1))):
        assert read_stream(cut) == Answer(0, "connection_reset") and kind_of(read_stream(cut)) == "cut off"
    error = {"error": {"code": 503, "reason": "peer_lost"}}
    assert read_stream(stream(whole[0], error, whole[1])) == Answer(503, "peer_lost")
    assert kind_of(read_stream(stream(error))) == "error event"


def test_samples_of_a_stream_come_in_their_order():
    mixed = stream(frame([1], None, index=1), frame([2, 3], "stop", index=0), frame([1, 4], "abort", index=1))
    assert read_stream(mixed) == Answer(200, "client_abort", [[2, 3], [1, 4]], ["stop", "abort"])
    assert kind_of(read_stream(mixed)) == "aborted"


def test_a_whole_answer_is_read():
    one, two = frame([5], "abort"), [frame([5], "length"), frame([6], "stop")]
    assert read_whole(200, json.dumps(one).encode()) == Answer(200, "client_abort", [[5]], ["abort"])
    assert read_whole(200, json.dumps(two).encode()) == Answer(200, "", [[5], [6]], ["length", "stop"])
    assert kind_of(read_whole(200, json.dumps(two).encode())) == "ok"
    assert read_whole(429, b'{"error": {"reason": "queue_full"}}') == Answer(429, "queue_full")


# ---------------------------------------------------------------- the page


def test_a_part_is_replaced_and_the_others_stay(tmp_path):
    page = tmp_path / "faults.md"
    page.write_text(PAGE.read_text())
    report.put(page, "soak", ["OLDER FIGURES"])
    report.put(page, "aborts", ["OTHER PART"])
    report.put(page, "soak", ["NEWER FIGURES"])
    text = page.read_text()
    assert "NEWER FIGURES" in text and "OTHER PART" in text and "OLDER FIGURES" not in text
    with pytest.raises(ValueError, match="no part nothing"):
        report.check(page, "nothing")


def test_every_campaign_has_its_place_in_the_page():
    for name in ("files", "matrix", "aborts", "rounds", "neighbours", "soak"):
        report.check(PAGE, name)


def test_what_is_wrong_is_shown():
    cell = Cell("p0", "kill", "pulling", "ok", 1.0, {"d0": 0.5}, 2.0, ["the client sees ok"])
    assert "**!**" in "\n".join(report.of_matrix([cell])) and "1 not" in report.of_matrix([cell])[0]
    aborts = [
        Abort("queued", "abort at P", "aborted", 0.1),
        Abort("queued", "abort at D", "ok", 9.0, ["late"]),
    ]
    assert "0.10 | 9.00 **!**" in "\n".join(report.of_aborts(aborts))
    one = Round(Counter(ok=3), Counter(fail=1), Counter(failed=1), {"p0": BASE, "d0": BASE}, ["grew"])
    assert "- round 1: grew" in report.of_rounds([one])
    soak = Soak(1, 10, Counter(ok=2), Counter({"p killed": 1}), [], {"p0": (1, -2)}, 5)
    assert report.of_soak(soak)[-1] == "As promised." and "2 requests" in report.of_soak(soak)[0]
    assert "100%" in report.of_soak(soak)[2] and "p0 +1, -2" in report.of_soak(soak)[2]


def test_a_neighbour_that_waits_is_seen():
    slow = Neighbours("d1", [0.1, 0.1], [0.2, 0.2], ["the others are slow"])
    assert slow.ratio == pytest.approx(2)
    text = report.of_neighbours([slow])
    assert "| d1 | 100 | 200 | 2.00 |" in text and "- d1: the others are slow" in text


NAMES = ["a-file", "b-file", "c-file", "d-file"]


def test_a_run_of_some_names_the_others():
    left_out = Campaign([Report("a-file"), Report("d-file")], {"c-file": ["clock: no"]}, 60.0, 1)
    assert report.of_files(left_out, NAMES)[-2:] == ["", "Not in this run: 1 of 4 files: b-file."]
    assert not not_here(report.of_files(left_out, ["a-file", "c-file", "d-file"]))

    cells = [Cell(*cell) for cell in all_cells()]
    assert not not_here(report.of_matrix(cells))
    assert not_here(report.of_matrix(cells[2:])) == [
        "Not in this run: 2 of 72 cells: p0 kill idle; p0 kill queued."
    ]
    aborts = [Abort(*cell) for cell in ALL]
    assert not not_here(report.of_aborts(aborts))
    (said,) = not_here(report.of_aborts(aborts[:-1]))
    assert said == f"Not in this run: 1 of {len(ALL)} aborts: recomputing, both connections close."


def not_here(lines):
    return [line for line in lines if line.startswith("Not in this run")]


def test_files_that_ran_and_those_that_cannot_are_listed():
    fine = Report("a-file", outcomes={"a": Seen("ok", "", 200)})
    wrong = Report("b-file", differs=["a: ok in the simulator, failed here"])
    text = "\n".join(report.of_files(Campaign([fine, wrong], {"c-file": ["clock: no"]}, 60.0, 1), NAMES))
    assert "1 as in the simulator, 1 not. 1 cannot be run" in text
    assert (
        "| a-file | the same |" in text and "| b-file | a: ok in" in text and "| c-file | clock: no |" in text
    )
