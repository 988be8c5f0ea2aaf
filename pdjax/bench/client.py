"""Sends jobs to one server or router and notes when every token came.

One event loop; a request is a task and its clock starts when its body is about to be written. Must never let one
request's failure end the run: it is counted by kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from pdjax.bench.dialects import Dialect, Progress
from pdjax.bench.workload import Job
from pdjax.core.errors import ConfigError

PROBE_TIMEOUT_S = 10.0
BODY_SHOWN = 200  # characters of an error's body that are kept


@dataclass
class Outcome:
    """One request. Seconds; sent_s is after the start of the run. gaps_s: between output tokens, one for each after
    the first. error: "" or the kind that it is counted under; detail: what came with it."""

    number: int
    sent_s: float
    late_s: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    n_prompt: int = 0
    n_output: int = 0
    n_cached: int = 0
    error: str = ""
    detail: str = ""

    @property
    def itl_s(self) -> float:
        """Mean gap between this request's tokens."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0


@dataclass(frozen=True)
class Load:
    """How jobs are sent. concurrency: so many at once (0: no limit, every job at its own time)."""

    url: str
    concurrency: int
    timeout_s: float
    fresh_connections: bool = False
    api_key: str = ""


class Failed(Exception):
    """A request that did not end well. kind: what it is counted under."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail[:BODY_SHOWN]


class Run:
    """One run. outcomes grow while it runs, so that an interrupted one still has them."""

    def __init__(
        self, load: Load, dialect: Dialect, on_end: Callable[[Outcome], None] = lambda _: None
    ) -> None:
        self.load, self.dialect, self.on_end = load, dialect, on_end
        self.outcomes: list[Outcome] = []
        self.running = 0
        self.started = 0.0
        self.duration_s = 0.0

    async def go(self, jobs: Sequence[Job]) -> None:
        """Until every job has ended; cancelling it ends those that run, uncounted."""
        gate = asyncio.Semaphore(self.load.concurrency) if self.load.concurrency else None
        async with client_of(self.load) as http:
            self.started = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for job in jobs:
                        if job.at_s is not None:
                            await asyncio.sleep(self.started + job.at_s - time.perf_counter())
                        if gate is not None:
                            await gate.acquire()
                        tasks.create_task(self._one(http, job, gate))
            finally:
                self.duration_s = time.perf_counter() - self.started

    async def _one(self, http: httpx.AsyncClient, job: Job, gate: asyncio.Semaphore | None) -> None:
        body = self.dialect.body(job)
        sent = time.perf_counter()
        outcome = Outcome(job.number, sent - self.started)
        if job.at_s is not None:
            outcome.late_s = max(outcome.sent_s - job.at_s, 0.0)
        self.running += 1
        try:
            async with asyncio.timeout(self.load.timeout_s):
                await self._stream(http, body, outcome, sent)
        except Failed as error:
            outcome.error, outcome.detail = error.kind, error.detail
        except TimeoutError:
            outcome.error = "timeout"
        except httpx.RemoteProtocolError as error:
            outcome.error, outcome.detail = "cut short", str(error)
        except httpx.HTTPError as error:
            outcome.error, outcome.detail = type(error).__name__, str(error)
        finally:
            self.running -= 1
            if gate is not None:
                gate.release()
        outcome.e2e_s = outcome.e2e_s or time.perf_counter() - sent
        self.outcomes.append(outcome)
        self.on_end(outcome)

    async def _stream(
        self, http: httpx.AsyncClient, body: dict[str, Any], outcome: Outcome, sent: float
    ) -> None:
        progress, last, done = Progress(), sent, False
        async with http.stream("POST", self.dialect.path, json=body) as answer:
            if answer.status_code != 200:
                raise _refusal(answer.status_code, (await answer.aread()).decode(errors="replace"))
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if not line.startswith("data:"):
                    continue
                text = line.removeprefix("data:").strip()
                if text == "[DONE]":
                    done = True
                    break
                n_new = self._event(text, progress)
                if n_new <= 0:
                    continue
                if not outcome.ttft_s:
                    outcome.ttft_s = now - sent
                    n_new -= 1  # tokens that came with the first have no gap of their own
                    outcome.gaps_s += [0.0] * n_new
                else:
                    outcome.gaps_s += [(now - last) / n_new] * n_new
                last = now
        outcome.n_prompt, outcome.n_output = progress.n_prompt, progress.n_output
        outcome.n_cached = progress.n_cached
        outcome.e2e_s = last - sent
        if progress.aborted:
            raise Failed("aborted")
        if not done:
            raise Failed("cut short", "the stream ended without [DONE]")
        if not outcome.ttft_s:
            raise Failed("no tokens")

    def _event(self, text: str, progress: Progress) -> int:
        try:
            event = msgspec.json.decode(text, type=dict[str, Any])
            if "error" in event:
                raise Failed(f"event {_reason(event['error'])}", text)
            return self.dialect.read(event, progress)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise Failed("malformed event", f"{type(error).__name__}: {text}") from None


def client_of(load: Load) -> httpx.AsyncClient:
    """No proxy of the environment, no limit of its own, and a connection for each request if asked."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=0 if load.fresh_connections else None
    )
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    return httpx.AsyncClient(
        base_url=load.url, limits=limits, headers=headers, trust_env=False, timeout=load.timeout_s
    )


def _reason(error: Any) -> str:
    """The reason that an error object gives, else its code."""
    if not isinstance(error, dict):
        return "unknown"
    return str(error.get("reason") or error.get("code") or error.get("type") or "unknown")


def _refusal(status: int, body: str) -> Failed:
    try:
        reason = _reason(msgspec.json.decode(body, type=dict[str, Any]).get("error"))
    except (ValueError, RecursionError):  # the rust router cuts bodies short (facts/router §3.3)
        reason = ""
    return Failed(f"status {status} {reason}".rstrip(), body)


async def probe(load: Load) -> bool:
    """Whether a rust router stands there. Raises ConfigError when nobody does."""
    async with client_of(load) as http:
        try:
            await http.get("/health", timeout=PROBE_TIMEOUT_S)
            answer = await http.get("/workers", timeout=PROBE_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"--url {load.url}: nobody answers ({type(error).__name__}): start the server, or correct the address"
            ) from None
    return answer.status_code != 404
