"""One way from a request body to an answer, for every dialect: read, validate, submit, stream or collect.

Rules of the routers (facts/router §0): headers of a stream go out at once; a stream ends with its last frame, or an
error event, and [DONE]; D answers every error of a stream as 200 with an error event. A disconnect ends the work.
No middleware may wrap these routes: one would end a broken stream as if it were whole (facts/router §3.2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdjax.engine.bootstrap.httpd import BadBody, ClientDisconnect, read_json
from pdjax.serve.calls import Call, Desk, Disconnected, Prompt, Sub
from pdjax.serve.errors import ApiError
from pdjax.serve.limits import HttpLimits
from pdjax.serve.params import named_rooms

# Longer bodies are read on a thread, so that they do not stall other streams; those with a schema to compile, too.
INLINE_BODY_BYTES = 32 << 10
# Answers of more tokens are written on a thread: their log-probabilities may be a hundred thousand texts.
INLINE_ANSWER_TOKENS = 256
SLOW_FIELDS = ("response_format", "json_schema")

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class Dialect(Protocol):
    """How one API writes the outputs of one call."""

    def whole(self, subs: list[Sub]) -> Any:
        """The body of a call that is not streamed."""

    def frames(self, sub: Sub, piece: str) -> Iterable[Mapping[str, Any]]:
        """Stream events for one output; sub.ended is set at its last."""

    def tail(self, subs: list[Sub]) -> Iterable[Mapping[str, Any]]:
        """Stream events after every sub-request has ended."""


@dataclass(frozen=True)
class Plan:
    """A validated body."""

    prompts: list[Prompt]
    dialect: Dialect


Parse = Callable[[dict[str, Any]], Plan]


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_answer(error: ApiError) -> Response:
    return JsonAnswer(error.body(), status_code=error.status)


def event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class EventStream(Response):
    """Server-sent events of one call. Headers are sent before the first output is there."""

    def __init__(self, call: Call | None, frames: AsyncGenerator[bytes, None]) -> None:
        self._call = call
        self._frames = frames
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._call is None:
            await self._send(send)
            return
        async with self._call.watch(receive):
            await self._send(send)

    async def _send(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    # Neither a queue that holds more nor a socket that takes it waits: let others have their turn.
                    await asyncio.sleep(0)
        except (Disconnected, OSError):
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _frames(call: Call, dialect: Dialect) -> AsyncGenerator[bytes, None]:
    try:
        async for sub, piece in call.pieces():
            for frame in dialect.frames(sub, piece):
                yield event(frame)
        for frame in dialect.tail(call.subs):
            yield event(frame)
    except ApiError as error:
        yield event(error.body())
    except Disconnected:
        raise
    except Exception:
        # A stream that just stops looks whole to some clients (facts/router §3.2): say that it is not.
        logger.exception("a stream failed")
        yield event(ApiError(500, "internal error: see the server's log", reason="internal_error").body())
    yield DONE


async def _error_frames(error: ApiError) -> AsyncGenerator[bytes, None]:
    yield event(error.body())
    yield DONE


async def read_object(request: Request, limit_bytes: int) -> tuple[dict[str, Any], int]:
    """The body and its length. Raises ApiError 400."""
    try:
        body, length = await read_json(request, limit_bytes)
    except (BadBody, ClientDisconnect) as error:
        raise ApiError(400, str(error) or "the client went away before its body was complete") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body, length


async def read_optional(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body, {} without one: some clients send none to a command without arguments. Raises ApiError 400."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    return (await read_object(request, limit_bytes))[0]


async def answer(request: Request, desk: Desk, limits: HttpLimits, parse: Parse) -> Response:
    """Serve one generation request. Nothing is taken before everything is validated."""
    streaming = False
    try:
        body, length = await read_object(request, limits.max_body_bytes)
        streaming = body.get("stream") is True
        slow = length > INLINE_BODY_BYTES or _compiles(body)
        try:
            plan = await asyncio.to_thread(parse, body) if slow else parse(body)
        except ApiError:
            desk.engine.refuse_rooms(named_rooms(body))
            raise
        call = desk.open(plan.prompts, streaming, request.headers.get("traceparent"))
    except ApiError as error:
        desk.counters[f"refused_{error.status}"] += 1
        if streaming and desk.engine.role == "decode":
            return EventStream(None, _error_frames(error))
        return error_answer(error)
    if streaming:
        return EventStream(call, _frames(call, plan.dialect))
    async with call.watch(request.receive):
        try:
            await call.collect()
        except Disconnected:
            return Response(status_code=499)  # for nobody
        except ApiError as error:
            return error_answer(error)

    def write() -> Response:
        return JsonAnswer(plan.dialect.whole(call.subs))

    n_tokens = sum(len(sub.output_ids) for sub in call.subs)
    return await asyncio.to_thread(write) if n_tokens > INLINE_ANSWER_TOKENS else write()


def _compiles(body: Mapping[str, Any]) -> bool:
    """The body may hold a JSON schema."""
    params = body.get("sampling_params")
    nested = params if isinstance(params, list) else [params]
    return any(isinstance(one, dict) and any(one.get(f) for f in SLOW_FIELDS) for one in (body, *nested))
