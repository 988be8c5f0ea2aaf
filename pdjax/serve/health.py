"""One real pass through the pair, for /health_generate: a prompt prefilled on P, pulled by D, decoded (facts/router §1, §9).

The node that is asked draws a room, posts one half to a peer and takes the other like any client's. A router or an
operator learns from it that requests can be answered; that the process lives is /health, which needs no peer (incident
B64). Must never run two passes at once, and never take a full queue for a fault while others pass.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from pdjax.engine.bootstrap.access import host_of, verifying
from pdjax.engine.bootstrap.asking import SHOWN_CHARS, NoAnswer, ask, http_client
from pdjax.engine.ports import Entry
from pdjax.serve.calls import Desk
from pdjax.serve.errors import ApiError
from pdjax.serve.limits import HttpLimits
from pdjax.serve.sglang_api import parse_generate

LOOK_S = 1.0  # a pass that takes longer may stand behind other requests: their passes count, too
MAX_TRIED = 3  # peers of one pass, one after the other
PROMPT = [0, 0]
NEW_TOKENS = 2  # the first is P's, the second one D's


@dataclass(frozen=True)
class PeerAccess:
    """What a peer asks of who sends it a request. key: of its API, the same as ours; verify: whose certificates count.

    Made at the start: a context costs a tenth of a second of CPU, and anybody may ask for a pass.
    """

    key: str = field(default="", repr=False)
    verify: ssl.SSLContext = field(default_factory=lambda: verifying(""))


class HealthPass:
    """``check`` from any number of requests at once; they share one pass. limit_s: of one pass, all its tries together."""

    def __init__(self, desk: Desk, limits: HttpLimits, limit_s: float, peers: PeerAccess) -> None:
        self._desk, self._limits, self._limit_s, self._peers = desk, limits, limit_s, peers
        self._pass: asyncio.Task[str | None] | None = None

    async def check(self) -> str | None:
        """Why no request can pass, None when one did."""
        engine = self._desk.engine
        if (dead := engine.failed()) is not None:
            return dead
        if engine.draining:
            return "this server is draining"
        before = engine.passed()
        if self._pass is None or self._pass.done():
            self._pass = asyncio.create_task(self._run())
        running = self._pass
        while not running.done():
            await asyncio.wait({running}, timeout=LOOK_S)
            if not running.done() and engine.passed() > before:
                return None
        return running.result()

    async def _run(self) -> str | None:
        until = time.monotonic() + self._limit_s
        if self._desk.engine.role == "null":
            return await self._through([self._own(self._body())], until)
        found = await asyncio.wrap_future(self._desk.engine.peers())
        tried = []
        for peer in found.entries[:MAX_TRIED]:
            why = await self._with(peer, until)
            if why is None:
                return None
            tried.append(f"{peer.instance_id}: {why}")
        return (
            "; ".join(tried)
            or f"no instance to pass a request with: {found.error or 'none that fits is listed'}"
        )

    async def _with(self, peer: Entry, until: float) -> str | None:
        engine = self._desk.engine
        p_url = engine.serving_url if engine.role == "prefill" else peer.serving_url
        body = {
            **self._body(),
            "bootstrap_host": host_of(p_url),
            "bootstrap_port": engine.bootstrap_port,
            "bootstrap_room": secrets.randbelow(1 << 63),
        }
        return await self._through([self._own(body), self._other(peer, body)], until)

    @staticmethod
    def _body() -> dict[str, Any]:
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        return {"input_ids": PROMPT, "sampling_params": sampling, "rid": f"health-{secrets.token_hex(4)}"}

    async def _through(self, halves: list[Awaitable[str | None]], until: float) -> str | None:
        """Both halves together; the first that fails ends the other."""
        tasks = [asyncio.ensure_future(half) for half in halves]
        try:
            for next_done in asyncio.as_completed(tasks, timeout=max(until - time.monotonic(), 0.0)):
                if (why := await next_done) is not None:
                    return why
        except TimeoutError:
            return f"no pass within {self._limit_s:g} s"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return None

    async def _own(self, body: dict[str, Any]) -> str | None:
        try:
            call = self._desk.open(parse_generate(body, self._desk.engine, self._limits).prompts, False)
            try:
                await call.collect()
            finally:
                call.close()
        except ApiError as error:
            return error.message
        (sub,) = call.subs
        return None if sub.finish is not None and sub.finish.type == "length" else "the request was aborted"

    async def _other(self, peer: Entry, body: dict[str, Any]) -> str | None:
        url = f"{peer.serving_url}/generate"
        async with http_client(self._peers.key, self._peers.verify) as http:
            try:
                status, answer = await ask(http, "POST", url, limit_s=self._limit_s, json=body)
            except NoAnswer as error:
                return f"does not answer at {peer.serving_url}: {error}"
        return None if status == 200 else f"answers {status}: {answer[:SHOWN_CHARS].decode(errors='replace')}"
