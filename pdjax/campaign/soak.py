"""A deployment at full load under random faults, for a bounded time: nothing lost, nothing stuck, nothing let in.

Two P, two D, a registry and the rust router, which tries failed requests again. Clients post, abort and leave; processes are killed,
stopped and started again; the registry loses its table; messages and hand-offs are spoilt (chaos.py). What each client posts and
each fault are drawn from the seed; real time decides what meets what, and how many there are. Must never end before
everything has been healed and looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from pdjax.campaign import states
from pdjax.campaign.answers import Answer, read_stream, read_whole, refusal
from pdjax.campaign.chaos import Chaos
from pdjax.campaign.drawn import prompts, rng_of
from pdjax.campaign.fleet import ROUTER, Fleet
from pdjax.campaign.logs import Logs
from pdjax.campaign.matrix import SETTINGS, SLACK_S, fleet_plan
from pdjax.campaign.plans import FleetPlan
from pdjax.campaign.reference import Reference
from pdjax.campaign.rounds import SIZES, Memory, memory_of

CLIENTS, PROMPTS = 16, 32
ABORTED, LEFT, STREAMED = 0.08, 0.08, 0.3  # shares of the requests
DELAY_S = 0.3  # the most after which a client leaves or aborts
CLIENT_S = 180.0  # the request limit of both sides, and what a router's tries add
PROBES = 20
MORE_THREADS, MORE_FILES = 12, 24  # than at the start: links to lives of peers that are still remembered

LEAST_OK, LEAST_FAULTS, LEAST_KILLS, LEAST_STOPS = 50, 8, 1, 1  # a run with fewer says nothing
LEAST_RIGHT = 0.5  # of those that a router hands to a server, and whose clients wait for their end
BY_ROUTER = "the router says so"
REFUSED = f"status 503 ({BY_ROUTER})"  # no server has been asked; a 502 comes from one that was
# The rust router's breaker stays open for 60 s, and for 60 s more if its first try fails.
TRUSTS_AGAIN_S = 120.0
# A client whom a router refuses waits before it asks again: else nothing else is counted.
REFUSED_WAIT_S = 0.5
LONGER_S = 300.0  # the most that a slow machine is given for them, beyond the time asked for


@dataclass
class Soak:
    """outcomes: one for each client. faults: what was done, and how often. wrong: [] is as promised.

    more: instance → threads and open files that it has at the end and had not at the start.
    """

    seed: int
    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    more: dict[str, tuple[int, int]] = field(default_factory=dict)
    lives: int = 0

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def right_share(self) -> float:
        """Of the requests that a router handed on, and whose clients waited for their end."""
        apart = sum(n for seen, n in self.outcomes.items() if seen in ("left", "aborted", REFUSED))
        waited = self.requests - apart
        return self.outcomes["ok"] / waited if waited else 0.0

    def lacks(self) -> list[str]:
        """What has happened too seldom so far."""
        kills, stops = (
            sum(n for what, n in self.faults.items() if what in (f"p {kind}", f"d {kind}"))
            for kind in ("killed", "stopped")
        )
        found = (
            ("right answers", self.outcomes["ok"], LEAST_OK),
            ("faults", self.faults.total(), LEAST_FAULTS),
            ("kills", kills, LEAST_KILLS),
            ("stops", stops, LEAST_STOPS),
        )
        return [f"{n} {what} of at least {least}" for what, n, least in found if n < least]


def plan() -> FleetPlan:
    return replace(fleet_plan(("p0", "p1", "d0", "d1"), SIZES, router="rust"), secret=True)


class Client:
    """One of those that post: its requests and what it does to them are drawn from numbers of its own."""

    def __init__(self, name: str, seed: int, prompts: list[list[int]]) -> None:
        self.name = name
        self._rng = rng_of(seed, f"client {name}")
        self._prompts = prompts
        self._serials = itertools.count(1)

    def next(self) -> tuple[dict[str, Any], str, float]:
        """(body, "left", "aborted" or "", seconds after which it leaves or aborts)."""
        rng = self._rng
        sampling = {"temperature": 0, "max_new_tokens": rng.randint(1, 24), "ignore_eos": True}
        body = {
            "rid": f"s{self.name}-{next(self._serials)}", "input_ids": rng.choice(self._prompts),
            "sampling_params": sampling, "stream": rng.random() < STREAMED,
        }  # fmt: skip
        share, delay_s = rng.random(), rng.random() * DELAY_S
        way = "left" if share < LEFT else "aborted" if share < LEFT + ABORTED else ""
        return body, way, delay_s


class Run:
    def __init__(self, fleet: Fleet, reference: Reference, soak: Soak) -> None:
        self.fleet, self.reference, self.soak = fleet, reference, soak
        self.logs = Logs(fleet)
        self.chaos = Chaos(fleet, soak.seed, soak.faults)
        of_all = prompts(soak.seed, PROMPTS)
        self._clients = [Client(str(number), soak.seed, of_all) for number in range(CLIENTS)]
        self._probing = Client("probe", soak.seed, of_all)
        self._until_s = 0.0
        self._http = httpx.AsyncClient(
            trust_env=False, timeout=httpx.Timeout(CLIENT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )  # fmt: skip

    async def go(self) -> None:
        try:
            await self._probe()
            before = {name: await memory_of(self.fleet, name) for name in self.fleet.instances}
            self._until_s = time.monotonic() + self.soak.seconds
            chaos = asyncio.create_task(self.chaos.run(self._goes_on))
            await asyncio.gather(*(self._post_all(client) for client in self._clients))
            await chaos
            self.soak.wrong += self.chaos.errors
            self.soak.wrong += [f"too little to say anything: {what}" for what in self.soak.lacks()]
            if self.soak.right_share < LEAST_RIGHT:
                self.soak.wrong.append(f"only {self.soak.right_share:.0%} were right")
            await self._settle(before)
        finally:
            await self._http.aclose()

    def _goes_on(self) -> bool:
        """Its time, and on a slow machine until enough has happened."""
        left_s = self._until_s - time.monotonic()
        return left_s > 0 or (left_s > -LONGER_S and bool(self.soak.lacks()))

    # ------------------------------------------------------------ clients

    async def _post_all(self, client: Client) -> None:
        while self._goes_on():
            outcome = await self._request(client)
            self.soak.outcomes[outcome] += 1
            if outcome == REFUSED:
                await asyncio.sleep(REFUSED_WAIT_S)

    async def _request(self, client: Client) -> str:
        body, way, delay_s = client.next()
        if way == "left":
            try:
                return await asyncio.wait_for(self._ask(body), delay_s)
            except TimeoutError:
                return "left"
        if way == "aborted":
            abort = asyncio.create_task(self._abort(body["rid"], delay_s))
            outcome = await self._ask(body)
            await abort
            return outcome
        return await self._ask(body)

    async def _abort(self, rid: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        for name in self.fleet.instances:
            if name not in self.chaos.hurting:
                try:
                    await self.fleet.http.post(
                        f"{self.fleet.seats[name].url}/abort_request", json={"rid": rid}
                    )
                except httpx.HTTPError:
                    continue  # it is just being killed

    async def _ask(self, body: dict[str, Any]) -> str:
        """One outcome, whatever happens. A wrong token, or no end, is a breach."""
        right = await self.reference.tokens(body["input_ids"], body["sampling_params"])
        began_s = time.monotonic()
        try:
            answer = await self._http.post(f"{self.fleet.seats[ROUTER].url}/generate", json=body)
        except httpx.TimeoutException:
            self.soak.wrong.append(f"{body['rid']}: no end within {time.monotonic() - began_s:.0f} s")
            return "no end"
        except httpx.HTTPError:
            return "the connection broke"
        if answer.status_code != 200:
            reason = refusal(answer.status_code, answer.content)
            return f"status {answer.status_code} ({reason or BY_ROUTER})"
        read = read_stream(answer.text) if body["stream"] else read_whole(200, answer.content)
        kind = kind_of(read)
        if kind == "ok" and read.tokens != [right]:
            self.soak.wrong.append(f"{body['rid']}: tokens {read.tokens}, a server without PD gives {right}")
            return "wrong tokens"
        if kind == "aborted" and any(tokens != right[: len(tokens)] for tokens in read.tokens):
            self.soak.wrong.append(f"{body['rid']}: tokens {read.tokens} before its abort, right are {right}")
        return kind

    # ------------------------------------------------------------ the end

    async def _settle(self, before: dict[str, Memory]) -> None:
        """Heal everything; then all must be free, every log a run of the table, and the next requests right."""
        fleet, soak = self.fleet, self.soak
        await states.let_go(fleet)
        longest = max(SETTINGS.lease_s, SETTINGS.limbo_timeout_s, SETTINGS.graveyard_timeout_s)
        bound_s = longest + SETTINGS.answer_bound_s + SETTINGS.notice_life_s + SLACK_S
        _, left = await fleet.until_free(bound_s)
        if left:
            soak.wrong.append(f"not free {bound_s:g} s after the last request: {left}")
        await asyncio.gather(*(fleet.ready(name) for name in fleet.instances))
        await self._until_trusted()
        await self._probe()
        _, left = await fleet.until_free(bound_s)
        if left:
            soak.wrong.append(f"not free {bound_s:g} s after the last probe: {left}")
        for name in fleet.instances:
            after = await memory_of(fleet, name)
            soak.more[name] = (after.threads - before[name].threads, after.files - before[name].files)
            soak.wrong += [f"{name}: {what}" for what in more_than(before[name], after)]
        self.logs.more()
        soak.wrong += self.logs.breaches(0) + fleet.wrong_ends()
        soak.lives = sum(seat.lives for seat in fleet.seats.values())

    async def _until_trusted(self) -> None:
        """A router that has seen many failures refuses everything for a while (facts/router §3.4); only that is waited out."""
        deadline = time.monotonic() + TRUSTS_AGAIN_S
        while (
            outcome := await self._ask(self._probing.next()[0])
        ) == REFUSED and time.monotonic() < deadline:
            await asyncio.sleep(REFUSED_WAIT_S)
        self._must_be_right(outcome)

    async def _probe(self) -> None:
        """With nothing hurt, requests are right."""
        for _ in range(PROBES):
            self._must_be_right(await self._ask(self._probing.next()[0]))

    def _must_be_right(self, outcome: str) -> None:
        if outcome != "ok":
            self.soak.wrong.append(f"with nothing hurt a request ends as {outcome}")


def kind_of(answer: Answer) -> str:
    """How an answer with status 200 ended for its client."""
    if answer.status == 200:
        return "aborted" if answer.aborted else "ok"
    return "error event" if answer.status else "cut off"


def more_than(before: Memory, after: Memory) -> list[str]:
    """Threads and files that are left, a life's worth of links aside."""
    found = []
    if after.threads > before.threads + MORE_THREADS:
        found.append(f"{before.threads} threads became {after.threads}")
    if after.files > before.files + MORE_FILES:
        found.append(f"{before.files} open files became {after.files}")
    return found


async def run_soak(directory: Path, say: Callable[[str], None], seconds: float, seed: int) -> Soak:
    soak = Soak(seed, seconds)
    async with Reference() as reference, Fleet(plan(), directory / "soak") as fleet:
        await Run(fleet, reference, soak).go()
        soak.wrong += await fleet.end()
    left = [path.name for path in (directory / "soak").iterdir() if path.name != "logs"]
    soak.wrong += [f"{name} is left behind" for name in left]
    say(f"seed {seed}, {seconds:g} s: {soak.requests} requests {dict(soak.outcomes)}")
    say(f"faults {dict(soak.faults)}, {soak.lives} lives: {'; '.join(soak.wrong) or 'as promised'}")
    return soak
