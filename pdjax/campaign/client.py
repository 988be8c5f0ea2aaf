"""The router and the client of a scenario that runs on real processes: posts both legs with the file's rooms over HTTP.

It decides as the simulated router does, by the same rules (``pdjax.sim.verdict``). Must never know more than an HTTP client
knows, nor leave a connection open after its request has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdjax.campaign.answers import Answer, Stream, read_whole
from pdjax.campaign.fleet import Fleet
from pdjax.campaign.reference import Reference
from pdjax.core.wire import MAX_ROOM
from pdjax.sim.router import SIDES
from pdjax.sim.trace_types import Router as RouterSpec
from pdjax.sim.verdict import RETRIED, backoff_s, outcome_of, verdict

UNBOUNDED = httpx.Timeout(None, connect=10.0)


@dataclass
class Leg:
    """One of the two posts of an attempt. status: None while open; 0: the connection broke."""

    side: str
    node: str
    options: Mapping[str, Any]
    accepted: bool = False
    status: int | None = None
    reason: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


@dataclass
class Record:
    """One request as its client sees it. Times in seconds of the event loop's clock."""

    rid: str
    value: Mapping[str, Any]
    prompt: list[int]
    sampling: dict[str, Any]
    right: list[int]
    began_s: float
    rooms: list[int] = field(default_factory=list)
    legs: dict[str, Leg] = field(default_factory=dict)
    aborted: bool = False
    outcome: str = ""
    reason: str = ""
    status: int = 0
    finish: str = ""
    wrong: str = ""
    ended_s: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timeout: asyncio.TimerHandle | None = None

    @property
    def stream(self) -> bool:
        return bool(self.value.get("stream", False))


class HttpRouter:
    """records: rid → Record. told(event, room): "request" when both legs were posted, "finished"."""

    def __init__(
        self, fleet: Fleet, spec: RouterSpec, slower: float, told: Callable[[str, int], None]
    ) -> None:
        self.fleet, self.spec, self.slower, self._told = fleet, spec, slower, told
        self.records: dict[str, Record] = {}
        self.errors: list[str] = []
        self._rng = random.Random()  # rooms of retries: no file names them, and no process may have seen them
        self._tasks: set[asyncio.Task[None]] = set()
        self._held_back: dict[str, asyncio.Event] = {}
        self._http = httpx.AsyncClient(
            trust_env=False, timeout=UNBOUNDED,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )  # fmt: skip

    @property
    def n_open(self) -> int:
        return sum(record.ended_s is None for record in self.records.values())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(f"a leg failed in the client: {task.exception()!r}")

    def hold_back(self, side: str) -> None:
        """Legs to this side are late: they are posted once ``let_through`` is called."""
        self._held_back[side] = asyncio.Event()

    def let_through(self) -> None:
        for held in self._held_back.values():
            held.set()

    # ------------------------------------------------------------ one attempt

    def request(
        self, value: Mapping[str, Any], prompt: list[int], sampling: dict[str, Any], right: list[int]
    ) -> None:
        record = Record(value["rid"], value, prompt, sampling, right, time.monotonic())
        self.records[record.rid] = record
        self._attempt(record, value["room"], value.get("legs", {}))

    async def post(
        self, reference: Reference, rid: str, room: int, pair: tuple[str, str], prompt: list[int], n_out: int
    ) -> Record:
        """A request of n_out greedy tokens through this (P, D), whose right tokens the reference says."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True}
        right = await reference.tokens(prompt, sampling)
        value = {"rid": rid, "room": room, "prefill": pair[0], "decode": pair[1]}
        self.request(value, prompt, sampling, right)
        return self.records[rid]

    def _attempt(self, record: Record, room: int, options: Mapping[str, Any]) -> None:
        record.rooms.append(room)
        record.legs = {side: Leg(side, record.value[side], options.get(side, {})) for side in SIDES}
        posted = []
        for leg in record.legs.values():
            if not leg.options.get("drop", False):
                leg.task = self._spawn(self._post(record, leg, room))
                posted.append(leg.options.get("delay", 0) * self.slower / 1000)
        loop = asyncio.get_running_loop()
        loop.call_later(max(posted, default=0), self._told, "request", room)
        record.timeout = loop.call_later(self.spec.timeout * self.slower / 1000, self._timed_out, record)

    async def _post(self, record: Record, leg: Leg, room: int) -> None:
        delay_s = leg.options.get("delay", 0) * self.slower / 1000
        if delay_s:
            await asyncio.sleep(delay_s)
        if leg.side in self._held_back:
            await self._held_back[leg.side].wait()
        seat, n = self.fleet.seats[leg.node], record.value.get("n", 1)
        if "status" in leg.options and seat.remote is not None:
            rooms = [(room + i) & MAX_ROOM for i in range(n)]
            await seat.remote.do("refuse", rooms=rooms, status=leg.options["status"])
        prefill = next(node for node in self.fleet.plan.nodes if node.name == record.value["prefill"])
        body = {
            "rid": record.rid, "input_ids": record.prompt, "stream": record.stream,
            "sampling_params": {**record.sampling, "n": n}, "bootstrap_host": prefill.host,
            "bootstrap_port": self.fleet.bootstrap_port, "bootstrap_room": room,
        }  # fmt: skip
        try:
            async with self._http.stream("POST", f"{seat.url}/generate", json=body) as answer:
                leg.accepted = True
                read = await self._read(answer, record.stream)
                leg.tokens, leg.finish = read.tokens, read.finish
                leg.status, leg.reason = read.status, read.reason
        except httpx.ConnectError:
            leg.status, leg.reason = 0, "connection_refused"
        except httpx.HTTPError:
            leg.status, leg.reason = 0, "connection_reset"
        self._look(record)

    @staticmethod
    async def _read(answer: httpx.Response, stream: bool) -> Answer:
        if not stream or answer.status_code != 200:
            return read_whole(answer.status_code, await answer.aread())
        frames = Stream()
        async for line in answer.aiter_lines():
            if not frames.take(line):
                break
        return frames.answer()

    # ------------------------------------------------------------ the outcome

    def _look(self, record: Record) -> None:
        if record.ended_s is not None:
            return
        decided = verdict(self.spec.mode, record.stream, record.legs["prefill"], record.legs["decode"])
        if decided is not None:
            self._decided(record, *decided)

    def _timed_out(self, record: Record) -> None:
        if record.ended_s is None:
            self._decided(record, 502 if self.spec.mode == "rust" else 500, "router_timeout", True)

    def _decided(self, record: Record, status: int, reason: str, may_retry: bool) -> None:
        if record.timeout is not None:
            record.timeout.cancel()
        for leg in record.legs.values():
            self._hang_up(leg)
        tries = len(record.rooms)
        if may_retry and status in RETRIED and tries <= self.spec.retries and not record.aborted:
            self._spawn(self._retry(record, backoff_s(tries, self._rng.random())))
            return
        self._finish(record, status, reason)

    @staticmethod
    def _hang_up(leg: Leg) -> None:
        """The connection closes: its server sees a disconnect."""
        if leg.status is None and leg.task is not None and leg.task is not asyncio.current_task():
            leg.task.cancel()

    async def _retry(self, record: Record, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if record.aborted:
            self._finish(record, 500, "client_abort")
        else:
            self._attempt(record, self._rng.getrandbits(63), {})

    def _finish(self, record: Record, status: int, reason: str) -> None:
        record.ended_s, record.status = time.monotonic(), status
        record.outcome = outcome_of(status, reason, record.aborted)
        record.reason = reason if record.outcome != "ok" else ""
        if record.outcome == "ok":
            leg = record.legs["decode"]
            record.finish = ",".join(sorted(set(leg.finish)))
            if any(tokens != record.right for tokens in leg.tokens) or not leg.tokens:
                record.wrong = f"tokens {leg.tokens}, a server without PD gives {record.right}"
                record.outcome, record.reason = "failed", "wrong_tokens"
        record.ended.set()
        self._told("finished", record.rooms[0])

    # ------------------------------------------------------------ steps

    async def abort(self, rid: str, sides: tuple[str, ...]) -> bool:
        """/abort_request on these sides. False: there is nothing to abort."""
        record = self.records.get(rid)
        if record is None or record.ended_s is not None:
            return False
        record.aborted = True
        for side in sides:
            seat = self.fleet.seats[record.value[side]]
            if seat.alive and not seat.stopped:
                await self._http.post(f"{seat.url}/abort_request", json={"rid": rid}, timeout=10.0)
            elif seat.alive:  # it reads it when it goes on
                self._spawn(self._abort_later(seat.url, rid))
        return True

    async def _abort_later(self, url: str, rid: str) -> None:
        await self._http.post(f"{url}/abort_request", json={"rid": rid})

    def disconnect(self, rid: str, sides: tuple[str, ...]) -> bool:
        """The connections of these legs close. False: there are none."""
        record = self.records.get(rid)
        if record is None or record.ended_s is not None:
            return False
        record.aborted = True
        for side in sides:
            leg = record.legs[side]
            if leg.status is None:
                self._hang_up(leg)
                leg.status, leg.reason = 0, "client_abort"
        self._look(record)
        return True
