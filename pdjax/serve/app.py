"""The HTTP application of one node: generation, and the endpoints that both routers call (facts/router §0, §1).

Must never be wrapped in a middleware that sees its answers, and must never answer a fault of the client with anything
but 400, 404, or 401 where a key is missing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from pdjax.engine.bootstrap.access import MISSING, UNAUTHORIZED, guarded
from pdjax.engine.bootstrap.registry import BadRegistration, parse_uint
from pdjax.serve.answer import JsonAnswer, Plan, answer, error_answer, read_object, read_optional
from pdjax.serve.args import ServeArgs
from pdjax.serve.calls import Desk
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import ApiError, bad
from pdjax.serve.health import HealthPass, PeerAccess
from pdjax.serve.limits import HttpLimits
from pdjax.serve.log import ServerLog
from pdjax.serve.metrics import Exposition
from pdjax.serve.openai_api import parse_chat, parse_completion
from pdjax.serve.params import boolean
from pdjax.serve.schema import described
from pdjax.serve.sglang_api import parse_generate
from pdjax.serve.spans import Spans

PAUSE_MODES = ("abort", "in_place", "retract")  # sglang's, its default first
OPEN_PATHS = ("/health", "/health_generate", "/readiness")  # routers and probes ask them without a key
DEBUG_ROOMS = 1000  # rooms of one answer of /debug/rooms, unless ?limit= says otherwise

PARSERS = {
    "/generate": parse_generate,
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
}


def build_app(
    engine: Engine,
    limits: HttpLimits | None = None,
    log: ServerLog | None = None,
    spans: Spans | None = None,
    health_timeout_s: float = ServeArgs.health_timeout_s,
    peers: PeerAccess | None = None,
) -> FastAPI:
    """The application; ``app.state.desk`` counts its calls. Serve it with ``engine.bootstrap.httpd``."""
    limits = limits or HttpLimits()
    desk = Desk(engine, log or ServerLog(), spans)
    app = FastAPI(title="pdjax", docs_url=None, redoc_url=None)
    app.state.desk = desk
    _add_generation(app, desk, limits)
    _add_health(app, engine, HealthPass(desk, limits, health_timeout_s, peers or PeerAccess()))
    _add_info(app, desk)
    _add_watching(app, desk)
    _add_control(app, desk, limits)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error_answer(error)

    return app


def protected(app: FastAPI, key: str) -> Any:
    """The application for who has the key; itself when there is none."""
    refusal = msgspec.json.encode(ApiError(401, MISSING, reason=UNAUTHORIZED).body())
    return guarded(app, key, open_paths=OPEN_PATHS, refusal=refusal, counters=app.state.desk.counters)


def _add_generation(app: FastAPI, desk: Desk, limits: HttpLimits) -> None:
    def add(path: str) -> None:
        parser = PARSERS[path]

        def parse(body: dict[str, Any]) -> Plan:
            return parser(body, desk.engine, limits)

        @app.post(path, openapi_extra=described(path))
        async def generate(request: Request) -> Response:
            return await answer(request, desk, limits, parse)

    for path in PARSERS:
        add(path)


def _well(why_not: str | None) -> Response:
    return Response(status_code=200) if why_not is None else PlainTextResponse(why_not, status_code=503)


def _add_health(app: FastAPI, engine: Engine, passing: HealthPass) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while every thread lives, also without a peer: alive is not ready."""
        return _well(engine.failed())

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """200 when a request has just passed through this server and a peer."""
        return _well(await passing.check())

    @app.get("/readiness")
    async def readiness() -> Response:
        ready = engine.failed() is None and engine.ready()
        status = "ready" if ready else "draining" if engine.draining else "not ready"
        return JsonAnswer({"status": status, "role": engine.role}, status_code=200 if ready else 503)


def _add_info(app: FastAPI, desk: Desk) -> None:
    engine = desk.engine
    created = int(time.time())
    base = {"model_path": engine.model_name, "tokenizer_path": engine.model_name, **engine.model_info}

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        fixed = {"is_generation": True, "preferred_sampling_params": None, "weight_version": "default"}
        return JsonAnswer({**fixed, **base, "max_model_len": engine.context_length})

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        return JsonAnswer(
            {
                **base,
                "served_model_name": engine.model_name,
                "tp_size": 1,
                "dp_size": 1,
                "load_balance_method": "round_robin",
                "disaggregation_mode": engine.role,
                "disaggregation_bootstrap_port": engine.bootstrap_port,
                "disable_radix_cache": engine.disable_radix_cache,
                "context_length": engine.context_length,
                "ready": engine.ready(),
                "draining": engine.draining,
                "internal_states": [{**engine.info(), "http": desk.counts()}],
            }
        )

    @app.get("/v1/models")
    async def models() -> Response:
        name = engine.model_name
        model = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pdjax",
            "root": name,
            "parent": None,
        }
        return JsonAnswer({"object": "list", "data": [{**model, "max_model_len": engine.context_length}]})

    @app.get("/get_load")
    async def get_load() -> Response:
        info = engine.info()
        waiting = info["num_waiting"]
        load = {
            "dp_rank": 0,
            "num_reqs": info["num_running"] + waiting,
            "num_waiting_reqs": waiting,
            "num_tokens": info["num_tokens"],
        }
        return JsonAnswer([load])


def _add_watching(app: FastAPI, desk: Desk) -> None:
    """What an operator asks: never behind the engine's queues, and nothing in it that a client wrote."""
    engine = desk.engine
    exposition = Exposition(engine, desk.stats, desk.counts)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/debug/rooms", openapi_extra=described("/debug/rooms"))
    async def rooms(request: Request) -> Response:
        """Every live room, or with ?room= that one; ?limit= bounds the list. Off the event loop: it may be long."""
        query = request.query_params
        limit = _uint(query.get("limit"), "limit", DEBUG_ROOMS)
        room = None if query.get("room") is None else _uint(query.get("room"), "room", 0)
        return JsonAnswer(await asyncio.to_thread(engine.rooms, limit, room))


def _seconds(text: str | None, name: str) -> float:
    """A finite number that is not negative; 0 without one."""
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise bad(name, "must be a number of seconds, 0 or more")
    return seconds


def _uint(text: str | None, name: str, default: int) -> int:
    try:
        return default if text is None else parse_uint(text, name)
    except BadRegistration as error:
        raise bad(name, str(error)) from None


def _add_control(app: FastAPI, desk: Desk, limits: HttpLimits) -> None:
    engine = desk.engine

    def check_alive() -> None:
        """A dead scheduler would never answer."""
        if (dead := engine.failed()) is not None:
            raise ApiError(503, dead, reason="engine_error")

    @app.post("/flush_cache", openapi_extra=described("/flush_cache"))
    async def flush_cache(request: Request) -> Response:
        """200 when the prefix cache is empty now. ?timeout=: seconds to wait for the requests that are here to end."""
        timeout_s = _seconds(request.query_params.get("timeout"), "timeout")
        check_alive()
        if await asyncio.wrap_future(engine.flush_cache(timeout_s)):
            return PlainTextResponse("Cache flushed.")
        return PlainTextResponse("Cache not flushed: requests are running or waiting.", status_code=400)

    @app.post("/drain")
    async def drain(request: Request) -> Response:
        """200 at once: nothing new is taken, what is here is finished, and then this process ends with code 0."""
        await read_optional(request, limits.max_body_bytes)
        engine.ask_to_drain()
        return JsonAnswer({"draining": True, "live": desk.live()})

    @app.post("/pause_generation", openapi_extra=described("/pause_generation"))
    async def pause_generation(request: Request) -> Response:
        """200 when no token comes any more. What runs keeps its pages in every mode but "abort" (protocol §6)."""
        body = await read_optional(request, limits.max_body_bytes)
        mode = body.get("mode", PAUSE_MODES[0])
        if mode not in PAUSE_MODES:
            raise bad("mode", f"must be one of {', '.join(PAUSE_MODES)}")
        check_alive()
        if mode == "abort":
            desk.abort_all()
        await asyncio.wrap_future(engine.pause(True))
        return JsonAnswer({"paused": True, "live": desk.live()})

    @app.post("/continue_generation")
    async def continue_generation(request: Request) -> Response:
        """200 when work goes on, also when nothing was paused."""
        await read_optional(request, limits.max_body_bytes)
        check_alive()
        await asyncio.wrap_future(engine.pause(False))
        return JsonAnswer({"paused": False, "live": desk.live()})

    @app.post("/abort_request", openapi_extra=described("/abort_request"))
    async def abort_request(request: Request) -> Response:
        """Always 200: a request that has ended already is as aborted as can be."""
        body, _ = await read_object(request, limits.max_body_bytes)
        rid = body.get("rid")
        if boolean(body, "abort_all"):
            return JsonAnswer({"aborted": desk.abort_all()})
        if not isinstance(rid, str):
            raise bad("rid", "must be a text, or send abort_all: true")
        return JsonAnswer({"aborted": desk.abort(rid)})
