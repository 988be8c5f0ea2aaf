"""Scenario files on real processes: each ends as in the simulator, its logs are runs of the table, and all is free again."""

from __future__ import annotations

import asyncio
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


@pytest.fixture(scope="module")
def campaign():
    with tempfile.TemporaryDirectory(prefix="pdjax-") as directory:  # short: there are sockets in it
        return asyncio.run(run_files([TRACES / f"{name}.json" for name in FILES], Path(directory), print))


def test_they_share_one_fleet(campaign):
    assert campaign.fleets == 1 and campaign.left_out == {}


@pytest.mark.parametrize("name", FILES)
def test_a_file_ends_as_in_the_simulator(campaign, name):
    (report,) = [report for report in campaign.reports if report.name == name.lower()]
    assert report.ok, (report.differs, report.findings, report.notes)


def test_the_outcomes_are_those_that_the_files_expect(campaign):
    """By name, so that no comparison of two empty runs can pass."""
    seen = {report.name: report.outcomes for report in campaign.reports}
    assert seen["b18-everything-twice"]["a"] == Seen("ok", "", 200)
    assert seen["b24-duplicate-room"]["b"].reason == "duplicate_room"
    assert seen["b83-wrong-bytes"]["a"] == Seen("failed", "part_failed", 503)
    assert seen["b34-client-leaves-during-the-transfer"]["a"].outcome == "aborted"
