"""A worker in front of a worker: it passes requests on to a real instance, keeps what it saw, and misbehaves on demand.

The router takes it for the instance itself. ``plan`` says what it does with the next generation requests; without a
plan it passes everything on, byte by byte.
"""

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass, field

import httpx

from pdjax.engine.bootstrap.httpd import HttpThread, bind

GENERATION = ("/generate", "/v1/completions", "/v1/chat/completions")
HOP_BY_HOP = (b"host", b"connection", b"transfer-encoding", b"content-length", b"date", b"server")


@dataclass
class Seen:
    """One generation request as the worker got it. left: the client closed before the answer's end."""

    path: str
    body: dict
    headers: dict
    status: int = 0
    sent: bytes = b""
    left: bool = False
    done: bool = False

    @property
    def room(self):
        return self.body["bootstrap_room"]


@dataclass(frozen=True)
class Says:
    """Answers this without asking the instance, or, ``after``, when the instance has answered."""

    status: int = 200
    body: object = field(
        default_factory=lambda: {
            "text": "canned",
            "output_ids": [1],
            "meta_info": {"id": "x", "input_token_logprobs": []},
        }
    )
    after: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True)
class Streams:
    """Server-sent events of its own: the first at once, the others ``gap_s`` apart, then [DONE]."""

    n: int = 2
    gap_s: float = 0.0


class Hangs:
    """Takes the request and never answers."""


class Shim:
    def __init__(self, target):
        self.target = target
        self.seen: list[Seen] = []
        self.plan: deque = deque()
        self.always = None

        async def app(scope, receive, send):  # a bound method would pass for an older kind of application
            await self._app(scope, receive, send)

        self._thread = HttpThread(app, bind("127.0.0.1", 0), "shim")
        self._thread.start()
        self.url = self._thread.url

    def close(self):
        self._thread.stop()

    def reset(self):
        self.seen.clear()
        self.plan.clear()
        self.always = None

    async def _app(self, scope, receive, send):
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if part["type"] == "http.disconnect" or not part.get("more_body"):
                break
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        if scope["path"] not in GENERATION:
            await self._forward(scope, body, send, Seen(scope["path"], {}, headers))
            return
        seen = Seen(scope["path"], json.loads(body), headers)
        self.seen.append(seen)
        how = self.plan.popleft() if self.plan else self.always
        work = asyncio.create_task(self._serve(how, scope, body, send, seen))
        watch = asyncio.create_task(_gone(receive))
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        seen.left = not seen.done
        if seen.left:
            work.cancel()
        else:
            watch.cancel()
            await work

    async def _serve(self, how, scope, body, send, seen):
        if how is None:
            await self._forward(scope, body, send, seen)
        elif isinstance(how, Hangs):
            await asyncio.Event().wait()
        elif isinstance(how, Streams):
            await _start(send, seen, 200, [(b"content-type", b"text/event-stream")])
            for i in range(how.n):
                if i:
                    await asyncio.sleep(how.gap_s)  # the subject is a worker that takes its time
                frame = {"text": "x" * (i + 1), "meta_info": {"id": "x", "input_token_logprobs": []}}
                await _send(send, seen, b"data: " + json.dumps(frame).encode() + b"\n\n")
            await _send(send, seen, b"data: [DONE]\n\n")
            await _end(send, seen)
        else:
            if how.after:
                await self._forward(scope, body, _swallow, seen)
            await asyncio.sleep(how.wait_s)
            seen.sent, seen.done = b"", False
            content = json.dumps(how.body).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            await _start(send, seen, how.status, headers)
            await _send(send, seen, content)
            await _end(send, seen)

    async def _forward(self, scope, body, send, seen):
        query = scope["query_string"].decode()
        url = self.target + scope["path"] + (f"?{query}" if query else "")
        headers = [(k, v) for k, v in scope["headers"] if k not in HOP_BY_HOP]
        async with (
            httpx.AsyncClient(trust_env=False, verify=False, timeout=None) as http,
            http.stream(scope["method"], url, content=body, headers=headers) as answer,
        ):
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in HOP_BY_HOP]
            await _start(send, seen, answer.status_code, kept)
            async for chunk in answer.aiter_raw():
                await _send(send, seen, chunk)
        await _end(send, seen)


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


async def _swallow(_message):
    pass


async def _start(send, seen, status, headers):
    seen.status = status
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send(send, seen, chunk):
    seen.sent += chunk
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _end(send, seen):
    seen.done = True
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def until(condition, within_s=30.0):
    """Waits for what another process will do; whether it did."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
