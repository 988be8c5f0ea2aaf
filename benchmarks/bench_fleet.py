"""Real processes for the benchmarks: a deployment that notes when each of them was ready, and requests without a router.

Must never leave a process behind: use it as a context.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx

from pdjax.bench.client import Failed, Outcome, Run
from pdjax.serve.local import Fleet, Plan
from pdjax.serve.ready import parse_ready

# Of a server that compiles next to nothing, for --quick.
QUICK_SIZES = (
    "--context-length", "32", "--num-pages", "16", "--chunked-prefill-size", "16", "--max-running-requests", "2"
)  # fmt: skip


class TimedFleet(Fleet):
    """ready_s: process → seconds from the call of ``start`` to its ready line."""

    def __init__(self, plan: Plan) -> None:
        self.ready_s: dict[str, float] = {}
        self._began = 0.0
        super().__init__(plan, forward=self._heard)

    def _heard(self, line: str) -> None:
        name, _, text = line.partition("] ")
        if parse_ready(text) is not None:
            self.ready_s[name.removeprefix("[")] = time.monotonic() - self._began

    def start(self) -> None:
        self._began = time.monotonic()
        super().start()
        self.ready_s["all, with peers found"] = time.monotonic() - self._began

    @property
    def legs(self) -> Legs:
        host, port = self.addresses["bootstrap"].removeprefix("http://").rsplit(":", 1)
        return Legs(self.addresses["prefill-0"], host, int(port))


@dataclass
class Legs:
    """Where P's half of a request goes, and what both halves say of each other, as a router would."""

    prefill_url: str
    bootstrap_host: str
    bootstrap_port: int

    def fields(self, rng: random.Random) -> dict[str, Any]:
        return {
            "bootstrap_host": self.bootstrap_host,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": rng.getrandbits(63),
        }


class PairRun(Run):
    """A run that is its own router: each request goes to P and to D at once, and D's stream is measured."""

    legs: Legs
    rng = random.Random(0)

    async def _stream(
        self, http: httpx.AsyncClient, body: dict[str, Any], outcome: Outcome, sent: float
    ) -> None:
        body = {**body, **self.legs.fields(self.rng)}
        prefill = asyncio.create_task(
            http.post(f"{self.legs.prefill_url}{self.dialect.path}", json={**body, "stream": False})
        )
        await super()._stream(http, body, outcome, sent)
        answer = await prefill
        if answer.status_code != 200:
            raise Failed(f"prefill status {answer.status_code}", answer.text)
