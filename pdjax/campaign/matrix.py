"""Every process of a deployment killed, stopped and started again, while a request is in every state of the hand-off.

A real router is in front. Each cell says how the request ended for its client and when, when the failure was known on the
side that lived, and that everything was free afterwards. Must never compare with anything but what the documents promise
(docs/operations.md, protocol §7).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdjax.campaign import states
from pdjax.campaign.express import flags_of
from pdjax.campaign.fleet import FAILURES, REGISTRY, ROUTER, Fleet, failure
from pdjax.campaign.logs import Logs
from pdjax.campaign.plans import FleetPlan, NodePlan, options
from pdjax.campaign.reference import Reference
from pdjax.core.log_lines import Line
from pdjax.core.settings import PDSettings

TARGETS = ("p0", "d0", REGISTRY, ROUTER)
FAULTS = ("kill", "stop", "restart")
STOP_S = 20.0
KNOWN_S = 2.0  # D knows of a refused or closed connection, a client of a broken one
SLACK_S = 1.5  # a loaded machine
SETTINGS = PDSettings(
    lease_s=6.0, peer_timeout_s=3.0, hello_interval_s=0.5, answer_bound_s=0.7, bootstrap_timeout_s=8.0,
    transfer_timeout_s=10.0, limbo_timeout_s=11.0, request_timeout_s=60.0, heartbeat_interval_s=1.0,
    heartbeat_ttl_s=3.0, graveyard_timeout_s=20.0,
)  # fmt: skip
SIZES = {
    "page-size": 4, "num-pages": 65, "context-length": 256, "chunked-prefill-size": 16, "max-running-requests": 8,
}  # fmt: skip


def fleet_plan(
    names: Sequence[str], sizes: Mapping[str, int], router: str = "", settings: PDSettings = SETTINGS
) -> FleetPlan:
    """Instances of the tiny model; the registry knows their timers, too."""
    flags = options({**flags_of(settings), **sizes})
    ttl = options({"disaggregation-bootstrap-heartbeat-ttl": settings.heartbeat_ttl_s})
    return FleetPlan("tiny", tuple(NodePlan(name, flags) for name in names), ttl, router=router)


def plan(settings: PDSettings = SETTINGS) -> FleetPlan:
    return fleet_plan(("p0", "d0"), SIZES, router="mini", settings=settings)


@dataclass(frozen=True)
class Promise:
    """How a request may end, and by when (seconds after the fault). known: on which side the room fails, by when."""

    outcomes: tuple[str, ...]
    within_s: float
    known: tuple[tuple[str, float], ...] = ()


@dataclass
class Cell:
    """One fault in one state. known_s: node → seconds from the fault to the end of the room there. wrong: [] is as promised."""

    target: str
    fault: str
    state: str
    outcome: str = ""
    client_s: float = 0.0
    known_s: dict[str, float] = field(default_factory=dict)
    free_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.target} {self.fault} {self.state}"


def promise(target: str, fault: str, state: str, stop_s: float = STOP_S) -> Promise:
    """What docs/operations.md says of this cell, for the mini router."""
    s = SETTINGS
    silent_s = s.peer_timeout_s + s.answer_bound_s
    lease_s = s.lease_s + s.answer_bound_s
    work_s = 10.0  # what the request itself still takes when nothing hurts it
    if target == REGISTRY or (state == "decoding" and target == "p0"):
        return Promise(("ok",), work_s)
    if fault == "stop":
        after_s = stop_s + work_s
        if target == ROUTER:
            return Promise(("ok",), after_s)
        if target == "p0":
            # mini waits for P's leg, too, which a stopped P ends late; where that leg is over, D's end is the client's.
            over = state in ("registered", "pulling")
            return Promise(("failed",), silent_s if over else after_s, (("d0", silent_s),))
        if state == "decoding":
            return Promise(("ok",), after_s)
        # The KV may have come while D stood still: then D has verified it, and goes on (protocol §5).
        ends = ("failed", "ok") if state == "pulling" else ("failed",)
        # The lease starts again with the KV: P, which hears nothing of D's end, computes the rest first (protocol §4).
        rest_s = states.PROMPT_TOKENS * states.PREFILL_PER_TOKEN_S if state == "prefilling" else 0.0
        return Promise(ends, after_s, (("p0", rest_s + lease_s),))
    if target == ROUTER:
        return Promise(("failed",), KNOWN_S)
    known: tuple[tuple[str, float], ...] = ()
    if state != "idle":
        if target == "p0":
            known = (("d0", KNOWN_S),)
        elif state != "decoding":
            known = (("p0", lease_s),)  # mini tells nobody (facts/router rule 8)
    return Promise(("failed",), KNOWN_S, known)


# ---------------------------------------------------------------- one cell


class Matrix:
    """``run`` the cells one after the other on one fleet."""

    def __init__(
        self, fleet: Fleet, reference: Reference, say: Callable[[str], None], stop_s: float = STOP_S
    ) -> None:
        self.fleet, self.reference, self.say, self.stop_s = fleet, reference, say, stop_s
        self.logs = Logs(fleet)
        self._http = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(120.0))
        self._serial = 0

    async def run(self, cells: Iterable[tuple[str, str, str]]) -> list[Cell]:
        found = []
        try:
            for target, fault, state in cells:
                cell = Cell(target, fault, state)
                found.append(cell)
                try:
                    await self._cell(cell)
                except FAILURES as error:
                    cell.wrong.append(failure(error))
                    await self._revive()
                    cell.wrong += self.fleet.wrong_ends()
                self.say(_line(cell))
        finally:
            await self._http.aclose()
        return found

    async def _cell(self, cell: Cell) -> None:
        fleet = self.fleet
        self.logs.more()
        before = len(self.logs.lines)
        asked: asyncio.Task[tuple[str, float]] | None = None
        request = await self._request()
        if cell.state != "idle":
            await states.hold(fleet, cell.state)
            asked = asyncio.create_task(self._ask(request))
            if not await states.reached(fleet, cell.state, asked.done):
                cell.wrong.append(f"the request never was {cell.state}")
        struck_s = time.monotonic()
        going_on = await self._strike(cell)
        if asked is None:
            asked = asyncio.create_task(self._ask(request))
        if cell.fault != "stop" or cell.target == REGISTRY:
            await states.let_go(fleet)
        if cell.fault == "restart":
            await fleet.start(cell.target)
        cell.outcome, ended_s = await asked
        cell.client_s = ended_s - struck_s
        if going_on is not None:
            await going_on
        await self._heal(cell)
        self._judge(cell, struck_s, before, request[0]["rid"])

    async def _strike(self, cell: Cell) -> asyncio.Task[None] | None:
        """The task that lets a stopped process go on."""
        if cell.fault != "stop":
            await asyncio.to_thread(self.fleet.kill, cell.target)
            return None
        self.fleet.stop(cell.target)

        async def go_on() -> None:
            await asyncio.sleep(self.stop_s)
            self.fleet.go_on(cell.target)
            await states.let_go(self.fleet)

        return asyncio.create_task(go_on())

    async def _heal(self, cell: Cell) -> None:
        """Every process lives, everything is free in time, and the next request is right."""
        fleet, s = self.fleet, SETTINGS
        await self._revive()
        await states.let_go(fleet)
        bound_s = max(s.lease_s, s.limbo_timeout_s) + s.answer_bound_s + SLACK_S
        cell.free_s, left = await fleet.until_free(bound_s)
        if left:
            cell.wrong.append(f"not free after {bound_s:g} s: {left}")
        await asyncio.gather(*(fleet.ready(name) for name in fleet.instances))
        outcome = await self._eventually_ok()
        if outcome != "ok":
            cell.wrong.append(f"afterwards a request ends as {outcome}")
        _, left = await fleet.until_free(bound_s)  # P hears that D is done after the client has its answer
        if left:
            cell.wrong.append(f"not free {bound_s:g} s after the request that came next: {left}")

    async def _revive(self) -> None:
        for name, seat in self.fleet.seats.items():
            if not seat.alive:
                await self.fleet.start(name)

    async def _eventually_ok(self) -> str:
        """A request may still meet the registry's picture of a dead life: any router would try again."""
        deadline = time.monotonic() + SETTINGS.heartbeat_ttl_s + 2 * SETTINGS.heartbeat_interval_s + SLACK_S
        while True:
            outcome, _ = await self._ask(await self._request())
            if outcome == "ok" or time.monotonic() > deadline:
                return outcome
            await asyncio.sleep(0.2)

    async def _request(self) -> tuple[dict[str, Any], list[int]]:
        """(body, right tokens) of a request that no other one has begun like."""
        self._serial += 1
        prompt = states.prompt(self._serial)
        sampling = {"temperature": 0, "max_new_tokens": states.OUTPUT_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "rid": f"m{self._serial}"}
        return body, await self.reference.tokens(prompt, sampling)

    async def _ask(self, request: tuple[dict[str, Any], list[int]]) -> tuple[str, float]:
        """(outcome, when) of a request through the router."""
        body, right = request
        try:
            answer = await self._http.post(f"{self.fleet.seats[ROUTER].url}/generate", json=body)
        except httpx.HTTPError:
            return "failed", time.monotonic()
        if answer.status_code != 200:
            return "failed", time.monotonic()
        return ("ok" if answer.json().get("output_ids") == right else "wrong tokens"), time.monotonic()

    # ------------------------------------------------------------ the verdict

    def _judge(self, cell: Cell, struck_s: float, before: int, rid: str) -> None:
        said = promise(cell.target, cell.fault, cell.state, self.stop_s)
        if cell.outcome not in said.outcomes:
            cell.wrong.append(f"the client sees {cell.outcome}, promised is {' or '.join(said.outcomes)}")
        if cell.client_s > said.within_s + SLACK_S:
            cell.wrong.append(f"the client waits {cell.client_s:.1f} s, promised are {said.within_s:g} s")
        self.logs.more()
        cell.known_s = first_failures(self.logs.since(before), struck_s, rid)
        if cell.outcome == "failed":
            cell.wrong += known_late(cell.known_s, said)
        cell.wrong += self.logs.breaches(before) + self.fleet.wrong_ends()


def first_failures(lines: Iterable[Line], struck_s: float, rid: str) -> dict[str, float]:
    """node → seconds from the fault to the first end of a room of this request there. Clocks of one machine are one clock.

    The router draws the room; the legs' lines name the request. Those that follow it may fail, too, and count for nothing.
    """
    lines = list(lines)
    rooms = {line.room for line in lines if line.get("rid") == rid}
    found: dict[str, float] = {}
    for line in lines:
        seconds = line.raw["t"] / 1000 - struck_s
        if line.event == "failed" and not line.role and line.room in rooms and seconds >= 0:
            node = line.life[0]
            found[node] = round(min(seconds, found.get(node, seconds)), 3)
    return found


def known_late(known_s: Mapping[str, float], said: Promise) -> list[str]:
    """Nodes that have to know of the failure and did not in time."""
    found = []
    for node, within_s in said.known:
        seconds = known_s.get(node, math.inf)
        if seconds > within_s + SLACK_S:
            found.append(f"{node} knows after {seconds:.1f} s, promised are {within_s:g} s")
    return found


def _line(cell: Cell) -> str:
    known = ", ".join(f"{node} knew after {seconds:.1f} s" for node, seconds in cell.known_s.items())
    verdict = "; ".join(cell.wrong) or "as promised"
    return (
        f"{cell.name}: {cell.outcome} after {cell.client_s:.1f} s{', ' + known if known else ''}: {verdict}"
    )


def all_cells() -> list[tuple[str, str, str]]:
    return [(target, fault, state) for target in TARGETS for fault in FAULTS for state in states.STATES]


async def run_matrix(
    cells: Iterable[tuple[str, str, str]], directory: Path, say: Callable[[str], None], stop_s: float = STOP_S
) -> list[Cell]:
    async with Reference() as reference, Fleet(plan(), directory / "matrix") as fleet:
        found = await Matrix(fleet, reference, say, stop_s).run(cells)
        found[-1].wrong += await fleet.end()
        return found
