"""A deployment at full load under random faults, for a bounded time: nothing lost, nothing stuck, nothing let in.

Two P, two D, a registry and the rust router, which tries failed requests again. Clients post, abort and leave; processes are killed,
stopped and started again; the registry loses its table; messages and hand-offs are spoilt. Everything is drawn from the
seed, though real time decides what meets what. Must never end before everything has been healed and looked at.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pdjax.campaign import states
from pdjax.campaign.express import flags_of
from pdjax.campaign.fleet import REGISTRY, ROUTER, Fleet, FleetPlan, NodePlan, options
from pdjax.campaign.matrix import SETTINGS, SLACK_S
from pdjax.campaign.reference import SPECIAL, VOCABULARY, Reference
from pdjax.campaign.remote import RemoteError
from pdjax.campaign.replay import Logs
from pdjax.campaign.rounds import SIZES, Memory, memory_of

CLIENTS, PROMPTS = 16, 32
ABORTED, LEFT, STREAMED = 0.08, 0.08, 0.3  # shares of the requests
FAULT_EVERY_S = (1.0, 5.0)
CLIENT_S = 180.0  # the request limit of both sides, and what a router's tries add
PROBES = 20
MESSAGES = ("hello", "pending", "ready", "done", "abort", "done_ack", "failed")
MORE_THREADS, MORE_FILES = 12, 24  # than at the start: links to lives of peers that are still remembered


@dataclass
class Soak:
    """outcomes: one for each client. faults: what was done, and how often. wrong: [] is as promised."""

    seed: int
    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lives: int = 0

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())


def plan() -> FleetPlan:
    nodes = tuple(NodePlan(n, options({**flags_of(SETTINGS), **SIZES})) for n in ("p0", "p1", "d0", "d1"))
    ttl = ("--disaggregation-bootstrap-heartbeat-ttl", f"{SETTINGS.heartbeat_ttl_s:g}")
    return FleetPlan("tiny", nodes, ttl, router="rust")


class Run:
    def __init__(self, fleet: Fleet, reference: Reference, soak: Soak) -> None:
        self.fleet, self.reference, self.soak = fleet, reference, soak
        self.rng = random.Random(soak.seed)
        self.logs = Logs(fleet)
        self._serial = 0
        self._hurting: set[str] = set()  # processes that are stopped or starting
        self._until_s = 0.0
        self._prompts = [
            [SPECIAL + self.rng.randrange(VOCABULARY - SPECIAL) for _ in range(self.rng.randint(4, 60))]
            for _ in range(PROMPTS)
        ]
        self._http = httpx.AsyncClient(
            trust_env=False, timeout=httpx.Timeout(CLIENT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )  # fmt: skip

    async def go(self) -> None:
        try:
            await self._probe()
            before = {name: await memory_of(self.fleet, name) for name in self.fleet.instances}
            self._until_s = time.monotonic() + self.soak.seconds
            chaos = asyncio.create_task(self._chaos())
            await asyncio.gather(*(self._client() for _ in range(CLIENTS)))
            await chaos
            await self._settle(before)
        finally:
            await self._http.aclose()

    # ------------------------------------------------------------ clients

    async def _client(self) -> None:
        while time.monotonic() < self._until_s:
            self.soak.outcomes[await self._request()] += 1

    def _body(self) -> dict[str, Any]:
        self._serial += 1
        n_out = self.rng.randint(1, 24)
        return {
            "rid": f"s{self._serial}", "input_ids": self.rng.choice(self._prompts),
            "sampling_params": {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True},
            "stream": self.rng.random() < STREAMED,
        }  # fmt: skip

    async def _request(self) -> str:
        body, way = self._body(), self.rng.random()
        delay_s = self.rng.random() * 0.3
        if way < LEFT:
            try:
                return await asyncio.wait_for(self._ask(body), delay_s)
            except TimeoutError:
                return "left"
        if way < LEFT + ABORTED:
            abort = asyncio.create_task(self._abort(body["rid"], delay_s))
            outcome = await self._ask(body)
            await abort
            return outcome
        return await self._ask(body)

    async def _abort(self, rid: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        for name in self.fleet.instances:
            if name not in self._hurting:
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
            return f"status {answer.status_code}"
        kind, tokens = read_stream(answer.text) if body["stream"] else read_whole(answer.json())
        if kind == "ok" and tokens != right:
            self.soak.wrong.append(f"{body['rid']}: tokens {tokens}, a server without PD gives {right}")
            return "wrong tokens"
        if kind == "aborted" and tokens != right[: len(tokens)]:
            self.soak.wrong.append(f"{body['rid']}: tokens {tokens} before its abort, right are {right}")
        return kind

    # ------------------------------------------------------------ faults

    async def _chaos(self) -> None:
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
        tasks = []
        while time.monotonic() < self._until_s:
            await asyncio.sleep(self.rng.uniform(*FAULT_EVERY_S))
            tasks.append(asyncio.create_task(self.rng.choice(ways)()))
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(done, BaseException):
                self.soak.wrong.append(f"a fault could not be made: {done!r}")

    def _victim(self) -> str | None:
        """A process that is well, as long as another one of its role is."""
        well = [n for n in self.fleet.instances if n not in self._hurting]
        able = [n for n in well if sum(other[0] == n[0] for other in well) > 1]
        return self.rng.choice(able) if able else None

    async def _kill(self) -> None:
        name = self._victim()
        if name is None:
            return
        self._hurting.add(name)
        try:
            self.soak.faults[f"{name[0]} killed"] += 1
            await asyncio.to_thread(self.fleet.kill, name)
            await asyncio.sleep(self.rng.random() * 2)
            await self.fleet.start(name)
            await self.fleet.ready(name)
        finally:
            self._hurting.discard(name)

    async def _stop(self) -> None:
        name = self._victim()
        if name is None:
            return
        self._hurting.add(name)
        try:
            self.soak.faults[f"{name[0]} stopped"] += 1
            self.fleet.stop(name)
            await asyncio.sleep(
                self.rng.choice((0.2, 1.0, SETTINGS.peer_timeout_s + 1, SETTINGS.lease_s + 2))
            )
        finally:
            self.fleet.go_on(name)
            self._hurting.discard(name)

    async def _registry(self) -> None:
        if REGISTRY in self._hurting:
            return
        self._hurting.add(REGISTRY)
        try:
            self.soak.faults["registry killed"] += 1
            await asyncio.to_thread(self.fleet.kill, REGISTRY)
            await asyncio.sleep(self.rng.random() * 2)
            await self.fleet.start(REGISTRY)
        finally:
            self._hurting.discard(REGISTRY)

    async def _messages(self) -> None:
        kind, do = self.rng.choice(MESSAGES), self.rng.choice(("drop", "duplicate", "delay", "corrupt"))
        rule = {
            "match": {"type": kind},
            "do": do,
            "by": self.rng.choice((5, 50, 500)),
            "times": self.rng.randint(1, 5),
        }
        await self._tell(f"message {do}", "rules", messages=[[0, rule]], transfers=[], ms_s=0.001)

    async def _transfers(self) -> None:
        do = self.rng.choice(("slow", "fail", "corrupt", "truncate", "hang"))
        rule: dict[str, Any] = {
            "match": {},
            "do": do,
            "by": self.rng.choice((50, 500, 3000)),
            "times": self.rng.randint(1, 3),
        }
        await self._tell(f"transfer {do}", "rules", messages=[], transfers=[[0, rule]], ms_s=0.001)

    async def _work(self) -> None:
        name = self.rng.choice(self.fleet.instances)
        where = self.rng.choice(
            ("prefill", "gather", "register") if name[0] == "p" else ("pull", "scatter", "decode")
        )
        await self._tell(f"{where} raises", "error", name=name, where=where, room=None)

    async def _tell(self, said: str, what: str, *, name: str = "", **more: Any) -> None:
        name = name or self.rng.choice(self.fleet.instances)
        remote = self.fleet.seats[name].remote
        if name in self._hurting or remote is None:
            return
        try:
            await remote.do(what, **more)
        except RemoteError:
            if name not in self._hurting:
                raise
            return
        self.soak.faults[said] += 1

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
        await self._probe()
        await fleet.until_free(SLACK_S)
        for name in fleet.instances:
            soak.wrong += [
                f"{name}: {what}" for what in more_than(before[name], await memory_of(fleet, name))
            ]
        self.logs.more()
        soak.wrong += self.logs.breaches(0)
        soak.lives = sum(seat.lives for seat in fleet.seats.values())

    async def _probe(self) -> None:
        """With nothing hurt, requests are right."""
        for _ in range(PROBES):
            outcome = await self._ask(self._body())
            if outcome != "ok":
                self.soak.wrong.append(f"with nothing hurt a request ends as {outcome}")


def read_whole(body: Any) -> tuple[str, list[int]]:
    """("ok" or "aborted", tokens) of an answer."""
    aborted = body["meta_info"]["finish_reason"]["type"] == "abort"
    return "aborted" if aborted else "ok", body["output_ids"]


def read_stream(text: str) -> tuple[str, list[int]]:
    """The same of a stream, or what its error event says."""
    newest = None
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if line and data != "[DONE]":
            frame = msgspec.json.decode(data)
            if "error" in frame:
                return "error event", []
            newest = frame
    if newest is None or newest["meta_info"]["finish_reason"] is None:
        return "cut off", []
    return read_whole(newest)


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
        codes = await fleet.end()
    soak.wrong += [f"{name} ended with code {code}" for name, code in codes.items() if code]
    left = [path.name for path in (directory / "soak").iterdir() if path.name != "logs"]
    soak.wrong += [f"{name} is left behind" for name in left]
    say(f"seed {seed}, {seconds:g} s: {soak.requests} requests {dict(soak.outcomes)}")
    say(f"faults {dict(soak.faults)}, {soak.lives} lives: {'; '.join(soak.wrong) or 'as promised'}")
    return soak
