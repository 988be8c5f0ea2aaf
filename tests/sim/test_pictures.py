"""The picture and the Chrome trace of a run: nothing overlaps, nothing is cut off, and arrows tell the truth."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import load
from pdjax.sim.view.perfetto import perfetto
from pdjax.sim.view.spans import arrows_of, stays_of
from pdjax.sim.view.svg import CHAR, svg

TRACES = Path(__file__).parent.parent / "traces"
NAMES = ["ready-lost-once", "p-dies-under-a-pull-and-comes-back", "row-twins-on-two-p", "many-forms", "three-first-contacts"]  # fmt: skip


def run(name):
    return run_trace(load(TRACES / f"{name}.json"))


def lines_of(result):
    return [json.loads(line) for line in result.log_lines]


def boxes(picture):
    """(left, right, baseline, text) of every text; widths as the picture itself reckons them."""
    kinds = {"t": "end", "l": "end", "h": "middle", "m": "middle"}
    for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        x, px = float(node.get("x")), len(node.text) * CHAR * 0.98
        anchor = next((kinds[k] for k in (node.get("class") or "").split() if k in kinds), "start")
        left = x - px if anchor == "end" else x - px / 2 if anchor == "middle" else x
        yield left, left + px, float(node.get("y")), node.text


@pytest.mark.parametrize("name", NAMES)
def test_no_text_lies_on_another_or_outside(name):
    picture = svg(run(name))
    width, height = (float(x) for x in re.search(r'width="(\d+)" height="(\d+)"', picture).groups())
    found = sorted(boxes(picture), key=lambda box: box[2])
    assert len(found) > 20
    for i, (left, right, y, text) in enumerate(found):
        assert left >= 0 and right <= width and 0 < y < height, text
        for other_left, other_right, other_y, other in found[i + 1 :]:
            if other_y - y > 7:
                break
            assert right <= other_left or other_right <= left, (text, other)


def test_the_message_that_was_dropped_is_the_one_that_ends_in_a_cross():
    """The first ready is lost and the second one heals it: not the other way round."""
    result = run("ready-lost-once")
    first, second = (a for a in arrows_of(lines_of(result), 0.2) if a.message == "ready")
    assert (first.arrived, second.arrived) == (False, True) and first.t < second.t < second.to_t
    assert svg(result).count("✗") == 1


def test_two_messages_under_way_at_once_keep_their_order():
    about = {"message": "done", "room": 1, "attempt": "5"}
    sent = [{"event": "sent", "node": "d0", "peer": "p0", "t": t, **about} for t in (0.0, 0.1)]
    got = [{"event": "delivered", "node": "p0", "peer": "d0", "t": t, **about} for t in (0.2, 0.3)]
    assert [(a.t, a.to_t) for a in arrows_of([*sent, *got], 0.2)] == [(0.0, 0.2), (0.1, 0.3)]


def test_a_state_ends_with_its_process():
    lines = lines_of(run("p-dies-under-a-pull-and-comes-back"))
    died = next(line["t"] for line in lines if line["event"] == "crashed")
    stays = [s for s in stays_of(lines) if s.node == "p0" and s.t < died]
    assert stays[-1].state == "Transferring" and stays[-1].to_t == died


@pytest.mark.parametrize("name", NAMES)
def test_the_chrome_trace_has_the_form_that_perfetto_reads(name):
    """Trace Event Format: complete events have ts and dur in us, flows a start and an end, every track a name."""
    result = run(name)
    events = json.loads(perfetto(result))["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    named = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {"x0", "b0", *(spec.name for spec in result.trace.nodes)} < named
    flows: dict[int, list[tuple[str, float]]] = {}
    for e in events:
        assert type(e["pid"]) is int and type(e["tid"]) is int and (e["pid"], e["tid"]) in tracks
        if e["ph"] == "M":
            continue
        assert 0 <= e["ts"] <= result.end_ms * 1000 + 0.001 and e["name"]
        assert (e["ph"] == "X") == ("dur" in e) and e["ph"] in "Xisf"
        if e["ph"] in "sf":
            flows.setdefault(e["id"], []).append((e["ph"], e["ts"]))
    assert flows
    for (start, left), (end, arrived) in flows.values():
        assert (start, end) == ("s", "f") and left < arrived
    pulls = [e for e in events if e["ph"] == "X" and e["name"] == "Transferring" and e["cat"] == "receiver"]
    assert pulls and all(e["dur"] < 60_000_000 for e in pulls)
