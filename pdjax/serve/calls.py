"""Live calls: from validated prompts to engine requests and back, with every end accounted for.

A call is one HTTP request; it has one sub-request for each prompt. Outputs come on the scheduler thread and cross to
the event loop here. Whatever ends a call early (disconnect, failure of one prompt, cancelled handler), each
sub-request that has not ended is aborted. Must never block the event loop or raise into the scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdjax.core.errors import CLIENT_LEFT, PDError
from pdjax.engine.ports import Sampled
from pdjax.sched.request import Failure, Finish, Grammar, Output, Request, SamplingParams, TopLogprobs
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import from_failure, from_pd
from pdjax.serve.log import ServerLog
from pdjax.serve.params import Bootstrap
from pdjax.serve.phases import phase_seconds
from pdjax.serve.request_stats import RequestStats
from pdjax.serve.spans import Ended, Spans
from pdjax.serve.text import DEFAULTS, StopFinder, TextOptions, TextOut

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True)
class Prompt:
    """One output that is asked for, validated. With n > 1 a prompt has several."""

    ids: list[int]
    sampling: SamplingParams
    bootstrap: Bootstrap
    rid: str | None
    text: TextOptions = DEFAULTS
    grammar: Grammar | None = None


@dataclass
class Sub:
    """One output of a call while it grows.

    logprobs, tops: one entry for each output token. prompt: the prompt's tokens that were scored.
    """

    index: int
    request: Request
    out: TextOut
    started: float
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    prompt: tuple[Sampled, ...] = ()
    finish: Finish | None = None
    failure: Failure | None = None
    heard: float | None = None  # when its newest output came
    ended: float | None = None

    def feed(self, output: Output) -> str:
        """Take an output in; the new piece of text. What stopped the request is no text."""
        self.output_ids += output.token_ids
        self.logprobs += output.logprobs
        self.tops += output.tops
        self.prompt += output.prompt
        if output.finish is not None or output.failure is not None:
            self.finish, self.failure, self.ended = output.finish, output.failure, time.monotonic()
            if self.failure is not None and self.failure.status == CLIENT_LEFT:
                # Aborted at the other half: an end like our own abort's, which no router tries again (facts/router §9).
                self.finish, self.failure = Finish("abort", message=self.failure.message), None
        return self.out.push(output.token_ids, output.finish, self.ended is not None)

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def text(self) -> str:
        return self.out.text

    @property
    def latency_s(self) -> float:
        return (self.ended or time.monotonic()) - self.started


class Disconnected(Exception):
    """The client is gone: nobody reads an answer."""


class Desk:
    """All live calls of one server. Everything but the sinks runs on the event loop."""

    def __init__(self, engine: Engine, log: ServerLog, spans: Spans | None = None) -> None:
        self.engine = engine
        self.log = log
        self.spans = spans
        self.counters: Counter[str] = Counter()
        self.stats = RequestStats()
        self._serials = itertools.count(1)
        self._salt = uuid.uuid4().hex[:8]
        self._by_rid: dict[str, list[Sub]] = {}

    def open(self, prompts: list[Prompt], stream: bool, traceparent: str | None = None) -> Call:
        """Submit every prompt, or none: a refusal aborts those before it. Raises ApiError."""
        call = Call(self, stream, traceparent)
        try:
            for index, prompt in enumerate(prompts):
                self._submit(call, index, prompt)
        except BaseException:
            call.close()
            raise
        return call

    def _submit(self, call: Call, index: int, prompt: Prompt) -> None:
        tokenizer, shown = self.engine.tokenizer, prompt.text.skip_special_tokens
        request = Request(
            # A client's rid repeats across retries, also while the old one still runs (facts/router §0.6).
            rid=prompt.rid or f"{self._salt}-{next(self._serials)}",
            prompt_ids=prompt.ids,
            sampling=prompt.sampling,
            sink=call.sink_for(index),
            room=prompt.bootstrap.room,
            bootstrap_host=prompt.bootstrap.host,
            bootstrap_port=prompt.bootstrap.port,
            grammar=prompt.grammar,
            find_stop=StopFinder(tokenizer.detokenizer(shown), prompt.text.stop)
            if prompt.text.stop
            else None,
        )
        out = TextOut(tokenizer.detokenizer(shown), prompt.text)
        sub = Sub(index, request, out, time.monotonic())
        try:
            self.engine.submit(request)
        except PDError as error:
            if (
                error.status == CLIENT_LEFT
            ):  # the other half has aborted it already: it ends here as one that runs does
                self._take_in(call, sub)
                call.sink_for(index)(Output(failure=Failure(error.status, error.reason, error.message)))
                return
            self.counters["refused"] += 1
            self.stats.failed(error.reason)
            self.log.event(
                "refused",
                rid=sub.rid,
                room=request.room,
                status=error.status,
                reason=error.reason,
                message=error.message,
                prompt_tokens=len(request.prompt_ids),
            )
            raise from_pd(error) from error
        self._take_in(call, sub)

    def _take_in(self, call: Call, sub: Sub) -> None:
        request = sub.request
        self.counters["accepted"] += 1
        call.subs.append(sub)
        self._by_rid.setdefault(sub.rid, []).append(sub)
        self.log.event("accepted", rid=sub.rid, room=request.room, prompt_tokens=len(request.prompt_ids))

    def abort(self, rid: str) -> int:
        """Abort what lives of exactly this rid; how many there were. P's answer ends before its hand-off does."""
        found = max(len(self._by_rid.get(rid, ())), self.engine.abort(rid))
        self.counters["aborts"] += found
        return found

    def abort_all(self) -> int:
        """Abort every live request; how many there were."""
        found = max(self.live(), self.engine.abort_all())
        self.counters["aborts"] += found
        return found

    def counts(self) -> dict[str, int]:
        """What has become of the calls so far, and how many outputs are awaited now."""
        return {**self.counters, "live": self.live(), "log_lines_lost": self.log.lost_lines}

    def live(self) -> int:
        return sum(len(subs) for subs in self._by_rid.values())

    def forget(self, sub: Sub) -> None:
        subs = self._by_rid.get(sub.rid, [])
        subs[:] = [other for other in subs if other is not sub]
        if not subs:
            self._by_rid.pop(sub.rid, None)


class Call:
    """One HTTP request's sub-requests. ``async with call.watch(receive)``, then ``async for`` over ``pieces``."""

    def __init__(self, desk: Desk, stream: bool, traceparent: str | None = None) -> None:
        self.subs: list[Sub] = []
        self._traceparent = traceparent
        self._desk = desk
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()
        self._closed = False

    def sink_for(self, index: int) -> Callable[[Output], None]:
        def sink(output: Output) -> None:
            try:
                self._loop.call_soon_threadsafe(self._inbox.put_nowait, (index, output))
            except RuntimeError:  # the loop is closed: the server is going down, nobody reads this
                self._desk.counters["outputs_after_close"] += 1

        return sink

    async def pieces(self) -> AsyncIterator[tuple[Sub, str]]:
        """Each output with its new text until every sub-request has ended.

        Raises Disconnected, and ApiError at the first failure: a call is answered as a whole.
        """
        open_subs = len(self.subs)
        while open_subs:
            item = await self._inbox.get()
            if item is None:
                raise Disconnected
            sub = self.subs[item[0]]
            sub.heard = self._desk.stats.output(len(item[1].token_ids), sub.started, sub.heard)
            piece = sub.feed(item[1])
            if sub.ended is not None:
                open_subs -= 1
                self._end(sub)
            if sub.failure is not None:
                raise from_failure(sub.failure)
            yield sub, piece

    async def collect(self) -> None:
        async for _ in self.pieces():
            pass

    @asynccontextmanager
    async def watch(self, receive: Receive) -> AsyncIterator[None]:
        """Notice a disconnect while the body runs, and abort what has not ended when it is left."""

        async def watcher() -> None:
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
            finally:  # a connection that cannot be read is a client that is gone, too
                self._inbox.put_nowait(None)

        task = asyncio.create_task(watcher())
        task.add_done_callback(_say_why)
        try:
            yield
        finally:
            task.cancel()
            self.close()  # before the wait: a handler that is cancelled is cancelled in it again
            await asyncio.wait([task])

    def _end(self, sub: Sub) -> None:
        desk, request = self._desk, sub.request
        desk.forget(sub)
        phases = phase_seconds(request.times)
        shared = {
            "rid": sub.rid,
            "room": request.room,
            "stream": self._stream,
            "completion_tokens": len(sub.output_ids),
            "seconds": round(sub.latency_s, 6),
            "times": phases,
        }
        if sub.failure is not None:
            desk.counters["failed"] += 1
            failure = sub.failure
            desk.stats.failed(failure.reason)
            self._trace(sub, failure.reason, failure.message)
            desk.log.event(
                "failed", status=failure.status, reason=failure.reason, message=failure.message, **shared
            )
        else:
            desk.counters["finished"] += 1
            aborted = sub.finish is not None and sub.finish.type == "abort"
            n_prompt, n_cached = len(request.prompt_ids), request.cached_tokens
            desk.stats.ended(sub.latency_s, n_prompt, n_cached, phases, aborted)
            finish = sub.finish.type if sub.finish else None
            self._trace(sub, finish or "")
            desk.log.event("finished", finish=finish, **shared)

    def _trace(self, sub: Sub, outcome: str, error: str | None = None) -> None:
        """error: what the client was told, None when it ended well."""
        if self._desk.spans is None:
            return
        request = sub.request
        self._desk.spans.ended(
            Ended(
                rid=sub.rid,
                room=request.room,
                started=sub.started,
                ended=sub.ended or time.monotonic(),
                times=request.times,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=request.cached_tokens,
                completion_tokens=len(sub.output_ids),
                outcome=outcome,
                failed=error is not None,
                message=error or "",
                traceparent=self._traceparent,
            )
        )

    def close(self) -> None:
        """Abort every sub-request that has not ended. Repeatable."""
        if self._closed:
            return
        self._closed = True
        for sub in self.subs:
            if sub.ended is None:
                self._desk.forget(sub)
                self._desk.counters["abandoned"] += 1
                self._desk.stats.aborted += 1
                self._desk.engine.abort_request(sub.request)
                self._trace(sub, "abandoned")
                self._desk.log.event(
                    "abandoned", rid=sub.rid, room=sub.request.room, completion_tokens=len(sub.output_ids)
                )


def _say_why(watcher: asyncio.Task[None]) -> None:
    """What a watcher met is not lost, whoever has stopped to wait for it."""
    if not watcher.cancelled() and (error := watcher.exception()) is not None:
        log.warning("a client's connection failed: %s", error)
