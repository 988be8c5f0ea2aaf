"""A recorded run of one file among others, cut out of the logs of its fleet, is a whole log and breaks no property."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdjax.campaign.recorded import broken_properties, cut_out
from pdjax.core import log_lines
from pdjax.core.log_lines import Line
from pdjax.sim.importer import import_logs
from pdjax.sim.mutate import all_mutants
from pdjax.sim.replay import run_trace
from pdjax.sim.trace_file import load

TRACES = Path(__file__).parent.parent / "traces"


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    """Of two requests, one after the other, on processes that live through both."""
    result = run_trace(load(TRACES / "B83-wrong-bytes.json"))
    return log_lines.read([line for line in result.log_lines if json.loads(line)["node"] in ("p0", "d0")])[0]


def second_request(lines: list[Line]) -> int:
    """The number of lines before it."""
    last = max(line.room for line in lines if line.room is not None)
    return next(line.number for line in lines if line.room == last) - 1


def test_the_later_lines_are_a_whole_log_of_the_same_lives(lines):
    before = second_request(lines)
    cut = cut_out(lines, before)
    assert {json.loads(line)["event"] for line in cut} >= {"started", "leg", "scattered"}
    raw, _ = import_logs(cut)
    assert len([step for step in raw["steps"] if "request" in step]) == 1
    assert broken_properties(lines, before) == []


def test_a_property_that_breaks_in_the_recorded_run_is_named(lines):
    """The same run under a table that is wrong on purpose."""
    (mutant,) = [m for m in all_mutants() if m.name == "sender T done [uuid_mine]: without free_budget"]
    with mutant.patch():
        found = broken_properties(lines, second_request(lines))
    assert any(what.startswith("S3 ") for what in found), found


def test_without_a_request_there_is_nothing_to_check(lines):
    assert broken_properties(lines, len(lines)) == []
