"""Many requests at once, some of them hurt: the others are right, token for token, and the processes do not grow.

Must never count a request as hurt that was not, nor compare memory before what is allocated once was allocated.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdjax.campaign.client import HttpRouter
from pdjax.campaign.drawn import prompts, rng_of
from pdjax.campaign.fleet import Fleet
from pdjax.campaign.logs import Logs
from pdjax.campaign.matrix import SETTINGS, SLACK_S, fleet_plan
from pdjax.campaign.plans import FleetPlan
from pdjax.campaign.reference import Reference
from pdjax.sim.router import SIDES
from pdjax.sim.trace_types import Router as RouterSpec

ROUNDS, REQUESTS, AT_ONCE, HURT = 3, 1000, 16, 0.05
KINDS = ("fail", "corrupt", "truncate", "prefill", "gather", "scatter", "abort", "disconnect")
GROWTH, GROWTH_BYTES = 0.05, 32 << 20
PROMPTS = 48
SIZES = {
    "page-size": 16, "num-pages": 257, "context-length": 128, "chunked-prefill-size": 64, "max-running-requests": 16,
}  # fmt: skip
REQUEST_S = 60.0
DELAY_S = 0.1  # the most after which an abort comes


@dataclass(frozen=True)
class Wish:
    """One request, and how it is hurt: kind "" for not at all. side, delay_s: where and when an abort comes."""

    room: int
    prompt: list[int]
    n_out: int
    kind: str
    side: str
    delay_s: float


def wishes(seed: int) -> Iterator[Wish]:
    """Request after request, each drawn before any is posted."""
    of_all, rng = prompts(seed, PROMPTS), rng_of(seed, "requests")
    for room in itertools.count(1):
        kind = rng.choice(KINDS) if rng.random() < HURT else ""
        yield Wish(
            room, rng.choice(of_all), rng.randint(1, 24), kind, rng.choice(SIDES), rng.random() * DELAY_S
        )


@dataclass
class Memory:
    """What a process holds at rest."""

    rss_bytes: int
    arrays: int
    array_bytes: int
    free_pages: int
    threads: int
    files: int


@dataclass
class Round:
    """hurt: kind → how many. outcomes: of those that were not hurt, and of those that were."""

    outcomes: Counter[str] = field(default_factory=Counter)
    hurt: Counter[str] = field(default_factory=Counter)
    hurt_outcomes: Counter[str] = field(default_factory=Counter)
    memory: dict[str, Memory] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def plan() -> FleetPlan:
    return replace(fleet_plan(("p0", "d0"), SIZES), secret=True)


async def memory_of(fleet: Fleet, name: str) -> Memory:
    seat = fleet.seats[name]
    assert seat.child is not None
    said = await fleet.remote(name).do("memory")
    proc = Path(f"/proc/{seat.child.process.pid}")
    rss_pages = int((proc / "statm").read_text().split()[1])
    state = await fleet.state(name)
    return Memory(
        rss_bytes=rss_pages * 4096,
        arrays=said["arrays"],
        array_bytes=said["bytes"],
        free_pages=state["free_pages"],
        threads=len(list((proc / "task").iterdir())),
        files=len(list((proc / "fd").iterdir())),
    )


def grown(before: Memory, after: Memory) -> list[str]:
    """What the newer one has more than it may."""
    found = []
    most = before.rss_bytes + max(before.rss_bytes * GROWTH, GROWTH_BYTES)
    if after.rss_bytes > most:
        found.append(f"resident memory grew from {before.rss_bytes >> 20} to {after.rss_bytes >> 20} MiB")
    for what in ("arrays", "array_bytes", "free_pages"):
        was, now = getattr(before, what), getattr(after, what)
        if was != now:
            found.append(f"{what}: {was} became {now}")
    return found


class Rounds:
    """``run``: one round after the other on one fleet."""

    def __init__(self, fleet: Fleet, reference: Reference, seed: int, requests: int = REQUESTS) -> None:
        self.fleet, self.reference, self.requests = fleet, reference, requests
        self.logs = Logs(fleet)
        self._wishes = wishes(seed)

    async def run(self, rounds: int, say: Callable[[str], None]) -> list[Round]:
        done: list[Round] = []
        for number in range(rounds):
            done.append(await self._round())
            one = done[-1]
            if number >= 2:  # the first two fill caches, staging slots and the allocator's own arenas
                for name in self.fleet.instances:
                    one.wrong += [
                        f"{name}: {what}" for what in grown(done[-2].memory[name], one.memory[name])
                    ]
            said = f"{dict(one.outcomes)}, hurt {sum(one.hurt.values())}: {dict(one.hurt_outcomes)}"
            rss = ", ".join(f"{name} {m.rss_bytes >> 20} MiB" for name, m in one.memory.items())
            say(f"round {number + 1}: {said}; {rss}: {'; '.join(one.wrong) or 'as promised'}")
        return done

    async def _round(self) -> Round:
        one, fleet = Round(), self.fleet
        before = self.logs.more()
        router = HttpRouter(fleet, RouterSpec(timeout=REQUEST_S * 1000), 1.0, lambda event, room: None)
        slots = asyncio.Semaphore(AT_ONCE)
        try:
            drawn = itertools.islice(self._wishes, self.requests)
            await asyncio.gather(*(self._one(router, one, slots, wish) for wish in drawn))
        finally:
            await router.close()
        one.wrong += router.errors
        for name in fleet.instances:
            await fleet.remote(name).do("reset")
        bound_s = max(SETTINGS.lease_s, SETTINGS.limbo_timeout_s) + SETTINGS.answer_bound_s + SLACK_S
        _, left = await fleet.until_free(bound_s)
        if left:
            one.wrong.append(f"not free after {bound_s:g} s: {left}")
        for name in fleet.instances:
            await fleet.http.post(f"{fleet.seats[name].url}/flush_cache", params={"timeout": 5})
        one.memory = {name: await memory_of(fleet, name) for name in fleet.instances}
        self.logs.more()
        one.wrong += self.logs.breaches(before) + fleet.wrong_ends()
        return one

    async def _one(self, router: HttpRouter, one: Round, slots: asyncio.Semaphore, wish: Wish) -> None:
        async with slots:
            kind, rid = wish.kind, f"r{wish.room}"
            if kind:
                one.hurt[kind] += 1
                await self._arm(kind, wish.room)
            record = await router.post(self.reference, rid, wish.room, ("p0", "d0"), wish.prompt, wish.n_out)
            if kind in ("abort", "disconnect"):
                await asyncio.sleep(wish.delay_s)
                if kind == "abort":
                    await router.abort(rid, (wish.side,))
                else:
                    router.disconnect(rid, SIDES)
            await record.ended.wait()
            del router.records[rid]
            self._count(one, kind, f"{record.outcome} ({record.reason or record.status})", record.outcome)
            if record.wrong:
                one.wrong.append(f"{rid}: {record.wrong}")

    async def _arm(self, kind: str, room: int) -> None:
        """Hurt the hand-off of this room and no other."""
        p, d = self.fleet.remote("p0"), self.fleet.remote("d0")
        if kind in ("fail", "corrupt", "truncate"):
            rule = [room, {"match": {"room": room}, "do": kind}]
            await p.do("rules", messages=[], transfers=[rule], ms_s=0.001)
        elif kind in ("prefill", "gather"):
            await p.do("error", where=kind, room=room)
        elif kind == "scatter":
            await d.do("error", where=kind, room=room)

    @staticmethod
    def _count(one: Round, kind: str, seen: str, outcome: str) -> None:
        if not kind:
            one.outcomes[seen] += 1
            if outcome != "ok":
                one.wrong.append(f"a request that nobody hurt ended as {seen}")
            return
        one.hurt_outcomes[seen] += 1
        # An abort may come when the answer is on its way; what was made to fail must have failed.
        if outcome == "ok" and kind not in ("abort", "disconnect"):
            one.wrong.append(f"a request whose {kind} failed ended as {seen}")


async def run_rounds(
    directory: Path,
    say: Callable[[str], None],
    *,
    rounds: int = ROUNDS,
    requests: int = REQUESTS,
    seed: int = 1,
) -> list[Round]:
    async with Reference() as reference, Fleet(plan(), directory / "rounds") as fleet:
        found = await Rounds(fleet, reference, seed, requests).run(rounds, say)
        found[-1].wrong += await fleet.end()
        return found
