"""Samples of the fault campaigns: killed, stopped and restarted processes, aborts, and two minutes of random faults. docs/faults.md has all."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from pdjax.campaign.aborts import Abort, abort_each
from pdjax.campaign.fleet import Fleet
from pdjax.campaign.matrix import Matrix, plan
from pdjax.campaign.reference import Reference
from pdjax.campaign.soak import run_soak

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CELLS = [
    ("x0", "kill", "decoding"),
    ("p0", "stop", "registered"),
    ("b0", "restart", "queued"),
    ("p0", "kill", "pulling"),
    ("d0", "restart", "registered"),
]
STOP_S = 5.0  # beyond the peer timeout
ABORTS = [
    ("budget", "abort at P"),
    ("queued", "abort at D"),
    ("bootstrapping", "abort at D"),
    ("bootstrapping", "abort at P"),
    ("prefilling", "abort at P"),
    ("registered", "D's connection closes"),
    ("registered", "abort at P"),
    ("decoding", "abort at both"),
]
SOAK_S = 120.0  # the short soak


async def both(directory: Path):
    async with Reference() as reference, Fleet(plan(), directory / "fleet") as fleet:
        aborts: list[Abort] = []
        await abort_each(ABORTS, fleet, reference, print, aborts)
        cells = await Matrix(fleet, reference, print, STOP_S).run(CELLS)
        return {(one.state, one.way): one for one in aborts}, {cell.name: cell for cell in cells}


@pytest.fixture(scope="module")
def found():
    with tempfile.TemporaryDirectory(prefix="pdjax-") as directory:  # short: there are sockets in it
        return asyncio.run(both(Path(directory)))


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_fault_ends_as_promised_and_leaves_nothing_behind(found, cell):
    assert found[1][" ".join(cell)].wrong == []


@pytest.mark.parametrize("abort", ABORTS, ids=" ".join)
def test_an_abort_frees_both_sides_at_once(found, abort):
    assert found[0][abort].wrong == []


def test_the_sample_has_shown_what_it_is_there_for(found):
    aborts, cells = found
    assert cells["p0 kill pulling"].outcome == "failed" and "d0" in cells["p0 kill pulling"].known_s
    assert cells["p0 stop registered"].known_s["d0"] > 1  # silence is not known at once
    assert cells["b0 restart queued"].outcome == "ok"
    assert (
        aborts["bootstrapping", "abort at P"].outcome == "ok"
        and aborts["prefilling", "abort at P"].outcome
        == aborts["registered", "abort at P"].outcome
        == "aborted"
    )


# Beside its two minutes: five processes that start and compile, clients that may wait for CLIENT_S, up to LONGER_S, and the end.
@pytest.mark.timeout(1500)
def test_a_short_soak_ends_as_promised():
    with tempfile.TemporaryDirectory(prefix="pdjax-") as directory:
        soak = asyncio.run(run_soak(Path(directory), print, SOAK_S, seed=3))
    assert soak.wrong == []  # that too little happened would be in it, too
    assert soak.lacks() == [] and soak.requests >= soak.outcomes["ok"]
