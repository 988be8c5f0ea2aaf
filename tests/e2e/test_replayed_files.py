"""Scenario files on real processes: each ends as in the simulator, its logs are runs of the table, and all is free again."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from pdjax.campaign.files import run_files
from pdjax.campaign.replay import Seen

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TRACES = Path(__file__).parent.parent / "traces"
# All of one plan, so that they share their processes: messages, transfers, aborts, local errors, forged frames, a
# stopped process and one that is killed under a pull and comes back.
FILES = [
    "B02-failure-notice-lost",
    "B17-abort-of-a-transfer",
    "B18-everything-twice",
    "B24-duplicate-room",
    "B25-samples-have-their-own-rooms",
    "B34-client-leaves-during-the-transfer",
    "B41-garbage-frames",
    "B57-status-of-no-known-kind",
    "B83-wrong-bytes",
    "B86-two-landings-at-once",
    "B87-a-long-compile",
    "L15-scatter-raises",
    "row-old-messages-under-a-pull",
    "B59-replaced-behind-the-same-address",
]


LATE = "b18-later-than-it-says"


def late_file(directory: Path) -> Path:
    """B18 with a leg that is late, and a bound that leaves no time for it."""
    raw = json.loads((TRACES / "B18-everything-twice.json").read_text())
    raw["name"] = LATE
    raw["steps"][1]["request"] |= {"room": 77, "legs": {"decode": {"delay": 1200}}}
    raw["expect"] = {"outcomes": {"a": {"outcome": "ok", "within": 100}}}
    path = directory / f"{LATE}.json"
    path.write_text(json.dumps(raw))
    return path


@pytest.fixture(scope="module")
def campaign():
    with tempfile.TemporaryDirectory(prefix="pdjax-") as directory:  # short: there are sockets in it
        files = [*(TRACES / f"{name}.json" for name in FILES), late_file(Path(directory))]
        return asyncio.run(run_files(files, Path(directory), print))


def test_they_share_one_fleet(campaign):
    assert campaign.fleets == 1 and campaign.left_out == {}


@pytest.mark.parametrize("name", FILES)
def test_a_file_ends_as_in_the_simulator(campaign, name):
    (report,) = [report for report in campaign.reports if report.name == name.lower()]
    assert report.ok, (report.differs, report.findings, report.notes)


def test_a_request_that_takes_longer_than_its_file_allows_is_a_difference(campaign):
    (report,) = [report for report in campaign.reports if report.name == LATE]
    assert report.outcomes["a"] == Seen("ok", "", 200) and report.findings == []
    (late,) = report.differs
    assert late.startswith("a: within 1.2 s expected")


def test_the_outcomes_are_those_that_the_files_expect(campaign):
    """By name, so that no comparison of two empty runs can pass."""
    seen = {report.name: report.outcomes for report in campaign.reports}
    assert seen["b18-everything-twice"]["a"] == Seen("ok", "", 200)
    assert seen["b24-duplicate-room"]["b"].reason == "duplicate_room"
    assert seen["b83-wrong-bytes"]["a"] == Seen("failed", "part_failed", 503)
    assert seen["b34-client-leaves-during-the-transfer"]["a"].outcome == "aborted"
