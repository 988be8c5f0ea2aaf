"""A stopped instance costs only its own requests: those of its neighbours neither fail nor wait (protocol §6, S11, V9).

2P2D under load, in turns: one instance merely idle, then the same one stopped in the middle of its hand-offs. Must never compare
with another moment of a shared machine: the turns alternate.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdjax.campaign import states
from pdjax.campaign.client import HttpRouter, Record
from pdjax.campaign.fleet import Fleet
from pdjax.campaign.logs import Logs
from pdjax.campaign.matrix import SETTINGS, SLACK_S
from pdjax.campaign.plans import FleetPlan
from pdjax.campaign.reference import Reference
from pdjax.campaign.soak import plan as soak_plan
from pdjax.sim.trace_types import Router as RouterSpec

TURNS, REQUESTS, AT_ONCE = 3, 80, 4
VICTIMS = ("d1", "p1")
IN_FLIGHT = 4  # hand-offs of the stopped instance that are under way
SLOWER = 1.25
N_OUT = 8


@dataclass
class Neighbours:
    """Seconds of each request of the others, while the victim was idle and while it was stopped."""

    victim: str
    idle_s: list[float] = field(default_factory=list)
    stopped_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.stopped_s) / statistics.median(self.idle_s)


def plan() -> FleetPlan:
    """As for the soak, without a router: each request says which pair it goes to."""
    return replace(soak_plan(), router="")


class Crowd:
    def __init__(self, fleet: Fleet, reference: Reference) -> None:
        self.fleet, self.reference = fleet, reference
        self.logs = Logs(fleet)
        self._serials = itertools.count(1)

    async def run(self, victim: str, turns: int, requests: int) -> Neighbours:
        found = Neighbours(victim)
        before = self.logs.more()
        pairs = [
            (p, d) for p in ("p0", "p1") for d in ("d0", "d1") if victim not in (p, d)
        ]  # fmt: skip
        own = [(p, d) for p in ("p0", "p1") for d in ("d0", "d1") if victim in (p, d)]
        await self._load(pairs + own, requests, found, [])  # compiled, connected, cached alike
        for _ in range(turns):
            await self._load(pairs, requests, found, found.idle_s)
            await self._stopped(victim, own, pairs, requests, found)
        if found.ratio > SLOWER:
            found.wrong.append(f"the others are {found.ratio:.2f} times as slow, promised is {SLOWER:g}")
        self.logs.more()
        found.wrong += self.logs.breaches(before) + self.fleet.wrong_ends()
        return found

    async def _stopped(
        self,
        victim: str,
        own: list[tuple[str, str]],
        pairs: list[tuple[str, str]],
        requests: int,
        found: Neighbours,
    ) -> None:
        """Hand-offs of the victim are made slow, it is stopped under them, and the others go on."""
        slow: dict[str, Any] = {"do": "slow", "by": 300.0, "times": None}
        for p in {p for p, _ in own}:
            match = {"to": victim} if victim[0] == "d" else {"from": victim}
            await self.fleet.remote(p).do(
                "rules", messages=[], transfers=[[0, {**slow, "match": match}]], ms_s=0.001
            )
        router = self._router()
        records = [await self._post(router, own[i % len(own)]) for i in range(IN_FLIGHT)]
        if not await self._under_way(own, records):
            found.wrong.append(f"no hand-off was under way when {victim} was stopped")
        self.fleet.stop(victim)
        try:
            await self._load(pairs, requests, found, found.stopped_s)
        finally:
            self.fleet.go_on(victim)
            await states.let_go(self.fleet)
        for record in records:
            await asyncio.wait_for(record.ended.wait(), SETTINGS.request_timeout_s)
        await router.close()
        bound_s = max(SETTINGS.lease_s, SETTINGS.limbo_timeout_s, SETTINGS.graveyard_timeout_s)
        _, left = await self.fleet.until_free(bound_s + SETTINGS.answer_bound_s + SLACK_S)
        if left:
            found.wrong.append(f"not free after {victim} went on: {left}")
        await asyncio.gather(*(self.fleet.ready(name) for name in self.fleet.instances))

    async def _under_way(self, own: list[tuple[str, str]], records: list[Record]) -> bool:
        """Until a D pulls one of these, which alone are posted. False: they have ended, or none ever came so far."""
        receivers = sorted({d for _, d in own})
        return await states.stands_in(
            self.fleet, receivers, "in_flight", lambda: all(record.ended.is_set() for record in records)
        )

    def _router(self) -> HttpRouter:
        return HttpRouter(self.fleet, RouterSpec(), 1.0, lambda event, room: None)

    async def _post(self, router: HttpRouter, pair: tuple[str, str]) -> Record:
        number = next(self._serials)
        prompt = states.prompt(number % 16)[:48]
        return await router.post(self.reference, f"n{number}", number, pair, prompt, N_OUT)

    async def _load(
        self, pairs: list[tuple[str, str]], requests: int, found: Neighbours, took_s: list[float]
    ) -> None:
        router, slots = self._router(), asyncio.Semaphore(AT_ONCE)

        async def one(i: int) -> None:
            async with slots:
                began_s = time.monotonic()
                record = await self._post(router, pairs[i % len(pairs)])
                await record.ended.wait()
                took_s.append(time.monotonic() - began_s)
                if record.outcome != "ok":
                    seen = f"{record.outcome} ({record.reason or record.status})"
                    found.wrong.append(f"a request that {found.victim} has no part in ended as {seen}")

        await asyncio.gather(*(one(i) for i in range(requests)))
        await router.close()


async def run_neighbours(
    directory: Path, say: Callable[[str], None], *, turns: int = TURNS, requests: int = REQUESTS
) -> list[Neighbours]:
    results = []
    async with Reference() as reference, Fleet(plan(), directory / "neighbours") as fleet:
        crowd = Crowd(fleet, reference)  # one for all, so that no room comes twice
        for victim in VICTIMS:
            results.append(found := await crowd.run(victim, turns, requests))
            verdict = "; ".join(found.wrong) or "as promised"
            idle, stopped = (1000 * statistics.median(s) for s in (found.idle_s, found.stopped_s))
            say(
                f"{victim} stopped: p50 of the others {stopped:.0f} ms, idle {idle:.0f} ms, × {found.ratio:.2f}: {verdict}"
            )
        results[-1].wrong += await fleet.end()
    return results
