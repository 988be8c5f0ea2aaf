"""A process that ends and was not to, or not like that, is a finding of whatever campaign it was in."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from pdjax.campaign import aborts, files, report
from pdjax.campaign.answers import refusal
from pdjax.campaign.fleet import ROUTER, Fleet, Seat
from pdjax.campaign.plans import FleetPlan, NodePlan
from pdjax.campaign.remote import RemoteError
from pdjax.campaign.replay import Report
from pdjax.campaign.soak import BY_ROUTER, LEAST_RIGHT, REFUSED, Run, Soak
from pdjax.serve.children import Child

PLAN = FleetPlan("tiny", (NodePlan("d0"),))
ENDS_WITH = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit({0})); print(1, flush=True); signal.pause()"


def seated(fleet, name, code):
    """A process that ends with this code when it is told to, and listens already."""
    heard = []
    seat = fleet.seats[name] = Seat(name, [])
    seat.child = Child(name, [sys.executable, "-c", ENDS_WITH.format(code)], os.environ, heard.append)
    while not heard:
        assert seat.alive
    return seat


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("d0", 0, []),
        ("d0", 3, ["d0 was told to end, and did with code 3"]),
        (ROUTER, 3, []),
    ],
)
def test_an_end_that_was_asked_for_has_code_0(tmp_path, name, code, found):
    fleet = Fleet(PLAN, tmp_path)
    seated(fleet, name, code)
    assert asyncio.run(fleet.end()) == found
    assert fleet.wrong_ends() == [], "told once"


def test_who_ends_by_itself_is_told_and_who_is_killed_is_not(tmp_path):
    fleet = Fleet(PLAN, tmp_path)
    seat = seated(fleet, "d0", 0)
    assert fleet.wrong_ends() == []
    assert fleet.kill("d0") and not fleet.kill("d0")
    assert fleet.wrong_ends() == []
    seat = seated(fleet, "d0", 0)
    seat.child.process.terminate()
    assert seat.child.join(10)
    assert fleet.wrong_ends() == ["d0 has ended by itself, with code 0"]


def test_an_end_is_not_forgotten_when_the_next_life_begins(tmp_path, monkeypatch):
    fleet = Fleet(PLAN, tmp_path)
    seat = seated(fleet, "d0", 0)
    seat.child.process.terminate()
    assert seat.child.join(10)
    seat.command = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(fleet, "_serves", lambda seat: asyncio.sleep(0, True))
    monkeypatch.setattr("pdjax.campaign.fleet.Remote.open", lambda *_: asyncio.sleep(0))
    asyncio.run(fleet.start("d0"))
    assert fleet.kill("d0")
    assert fleet.wrong_ends() == ["d0 has ended by itself, with code 0"]


class BrokenFleet:
    """It serves, and fails at its end."""

    instances = ()

    def __init__(self, *_):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        raise TypeError("no such field")

    async def end(self):
        return ["d0 has ended by itself, with code 1"]


def test_a_fleet_that_fails_at_its_end_costs_no_report(tmp_path, monkeypatch):
    async def replayed(trace, *_):
        return Report(trace.name)

    trace = files.load(next(iter(sorted((report.PAGE.parent.parent / "tests/traces").glob("*.json")))))
    monkeypatch.setattr(files, "Fleet", BrokenFleet)
    monkeypatch.setattr(files, "replay", replayed)
    campaign, said = files.Campaign(), []
    asyncio.run(files._run_group(campaign, PLAN, [trace], None, tmp_path, said.append, 1.0))
    (one,) = campaign.reports
    assert one.findings == [
        "d0 has ended by itself, with code 1",
        "the fleet failed: TypeError no such field",
    ]
    assert "no such field" in said[-1]


class DyingFleet(BrokenFleet):
    """Its second cell meets a dead process; a new fleet serves the rest."""

    async def __aexit__(self, kind, error, trace):
        if error is not None:
            error.add_note("p0 has ended by itself, with code -9")

    async def end(self):
        return []


def test_a_process_that_dies_costs_one_abort_and_is_told(tmp_path, monkeypatch):
    ran = []

    async def each(cells, fleet, reference, say, found):
        for cell in cells:
            found.append(aborts.Abort(*cell))
            ran.append(cell)
            if len(ran) == 2:
                raise RemoteError("p0 has gone")

    monkeypatch.setattr(aborts, "Fleet", DyingFleet)
    monkeypatch.setattr(aborts, "abort_each", each)
    cells, found, said = aborts.ALL[:4], [], []
    asyncio.run(aborts._on_fleets(PLAN, cells, tmp_path, None, said.append, found))
    assert ran == cells and [(one.state, one.way) for one in found] == cells
    failed = "the fleet failed: RemoteError p0 has gone; p0 has ended by itself, with code -9"
    assert [one.wrong for one in found] == [[], [failed], [], []]
    assert said == [f"{aborts.name_of(*cells[1])}: {failed}"]


def test_who_refuses_says_why_and_a_router_has_no_reason_of_ours():
    assert refusal(503, b'{"error": {"reason": "peer_lost", "message": "x"}}') == "peer_lost"
    for body in (b"", b"no server is left", b'{"error": "x"}', b'{"detail": 1}', b"[]", b"7"):
        assert refusal(503, body) == ""


def test_a_soak_whose_requests_are_mostly_refused_is_no_success():
    soak = Soak(1, 10)
    soak.outcomes.update({"ok": 5, "status 503 (peer_lost)": 5, "left": 50, "aborted": 50})
    soak.outcomes[REFUSED] = 90
    assert soak.right_share == LEAST_RIGHT
    assert Soak(1, 10).right_share == 0.0


def test_a_report_says_which_version_ran(monkeypatch, tmp_path):
    assert f"version {report.version()}," in report.machine()
    monkeypatch.setattr(report, "PAGE", tmp_path / "docs" / "faults.md")
    assert report.version() == metadata.version("pdjax")


def a_run(*outcomes):
    """A run whose requests end so."""
    run, left = object.__new__(Run), list(outcomes)

    async def ends(body):
        return left.pop(0)

    run.soak, run._ask, run._probing = Soak(1, 10), ends, SimpleNamespace(next=lambda: ({}, "", 0.0))
    return run, left


@pytest.mark.parametrize(
    "outcome", ["status 503 (peer_lost)", f"status 502 ({BY_ROUTER})", "the connection broke"]
)
def test_only_the_refusal_of_a_router_is_waited_out(monkeypatch, outcome):
    monkeypatch.setattr("pdjax.campaign.soak.REFUSED_WAIT_S", 0.0)
    run, left = a_run(REFUSED, REFUSED, outcome, "ok")
    asyncio.run(run._until_trusted())
    assert run.soak.wrong == [f"with nothing hurt a request ends as {outcome}"] and left == ["ok"]
    run, left = a_run(REFUSED, "ok", "ok")
    asyncio.run(run._until_trusted())
    assert run.soak.wrong == [] and left == ["ok"]
