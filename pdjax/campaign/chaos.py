"""Random faults on a deployment that is under load: kills, stops, a registry that loses its table, spoilt messages and hand-offs.

Fault n of a seed is the same in every run: its pause, its kind and its sizes. Which process is well enough to be hurt is up to the
run. Must never hurt the last process of a role that is well, nor leave one stopped or dead.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from pdjax.campaign.drawn import rng_of
from pdjax.campaign.fleet import REGISTRY, Fleet
from pdjax.campaign.matrix import SETTINGS
from pdjax.campaign.remote import RemoteError

EVERY_S = (1.0, 5.0)  # from one fault to the next
AWAY_S = 2.0  # the most that a killed process stays away
STOPPED_S = (0.2, 1.0, SETTINGS.peer_timeout_s + 1, SETTINGS.lease_s + 2)
MESSAGES = ("hello", "pending", "ready", "done", "abort", "done_ack", "failed")
SPOILT = ("drop", "duplicate", "delay", "corrupt")
HAND_OFFS = ("slow", "fail", "corrupt", "truncate", "hang")
WORK = {"p": ("prefill", "gather", "register"), "d": ("pull", "scatter", "decode")}


class Chaos:
    """faults: what was done, and how often. hurting: processes that are stopped or starting. errors: faults that failed."""

    def __init__(self, fleet: Fleet, seed: int, faults: Counter[str]) -> None:
        self.fleet, self.seed, self.faults = fleet, seed, faults
        self.hurting: set[str] = set()
        self.errors: list[str] = []

    async def run(self, going: Callable[[], bool]) -> None:
        """Until going() is False and whatever was hurt is well again."""
        tasks = []
        for number in itertools.count():
            if not going():
                break
            rng = rng_of(self.seed, f"fault {number}")
            await asyncio.sleep(rng.uniform(*EVERY_S))
            tasks.append(asyncio.create_task(self._draw(rng)))
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(done, BaseException):
                self.errors.append(f"a fault could not be made: {done!r}")

    def _draw(self, rng: random.Random) -> Coroutine[Any, Any, None]:
        ways = (
            self._kill,
            self._kill,
            self._stop,
            self._stop,
            self._registry,
            self._messages,
            self._transfers,
            self._work,
        )
        return rng.choice(ways)(rng)

    def _victim(self, rng: random.Random) -> str | None:
        """A process that is well, as long as another one of its role is."""
        well = [n for n in self.fleet.instances if n not in self.hurting]
        able = [n for n in well if sum(other[0] == n[0] for other in well) > 1]
        return rng.choice(able) if able else None

    async def _kill(self, rng: random.Random) -> None:
        away_s, name = rng.random() * AWAY_S, self._victim(rng)
        if name is not None:
            await self._away(name, f"{name[0]} killed", away_s)

    async def _registry(self, rng: random.Random) -> None:
        if REGISTRY not in self.hurting:
            await self._away(REGISTRY, "registry killed", rng.random() * AWAY_S)

    async def _away(self, name: str, said: str, away_s: float) -> None:
        """One that does not come back stays hurt, so that no other one of its role is taken."""
        self.hurting.add(name)
        self.faults[said] += 1
        await asyncio.to_thread(self.fleet.kill, name)
        await asyncio.sleep(away_s)
        await self.fleet.start(name)
        if name != REGISTRY:
            await self.fleet.ready(name)
        self.hurting.discard(name)

    async def _stop(self, rng: random.Random) -> None:
        stopped_s, name = rng.choice(STOPPED_S), self._victim(rng)
        if name is None:
            return
        self.hurting.add(name)
        try:
            self.faults[f"{name[0]} stopped"] += 1
            self.fleet.stop(name)
            await asyncio.sleep(stopped_s)
        finally:
            self.fleet.go_on(name)
            self.hurting.discard(name)

    async def _messages(self, rng: random.Random) -> None:
        kind, do, by, times = (
            rng.choice(MESSAGES),
            rng.choice(SPOILT),
            rng.choice((5, 50, 500)),
            rng.randint(1, 5),
        )
        rule = {"match": {"type": kind}, "do": do, "by": by, "times": times}
        name = rng.choice(self.fleet.instances)
        await self._tell(f"message {do}", name, "rules", messages=[[0, rule]], transfers=[], ms_s=0.001)

    async def _transfers(self, rng: random.Random) -> None:
        do, by, times = rng.choice(HAND_OFFS), rng.choice((50, 500, 3000)), rng.randint(1, 3)
        rule: dict[str, Any] = {"match": {}, "do": do, "by": by, "times": times}
        name = rng.choice(self.fleet.instances)
        await self._tell(f"transfer {do}", name, "rules", messages=[], transfers=[[0, rule]], ms_s=0.001)

    async def _work(self, rng: random.Random) -> None:
        name = rng.choice(self.fleet.instances)
        where = rng.choice(WORK[name[0]])
        await self._tell(f"{where} raises", name, "error", where=where, room=None)

    async def _tell(self, said: str, name: str, what: str, **more: Any) -> None:
        remote = self.fleet.seats[name].remote
        if name in self.hurting or remote is None:
            return
        try:
            await remote.do(what, **more)
        except RemoteError:
            if name not in self.hurting:
                raise
            return
        self.faults[said] += 1
