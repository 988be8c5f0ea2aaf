"""The bootstrap server: the registry over HTTP (RFC-2 §5.3), in a thread of any process or in its own.

It answers who is there and never learns of a room (protocol §3). Must never block its event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from pdjax.core.kvpoll import KVPoll
from pdjax.core.settings import PDSettings
from pdjax.engine.base import BaseKVBootstrapServer
from pdjax.engine.bootstrap.access import MISSING, guarded
from pdjax.engine.bootstrap.httpd import BadBody, ClientDisconnect, Door, HttpThread, bind, read_json
from pdjax.engine.bootstrap.registry import (
    DEFAULT_PORT,
    UINT64_MAX,
    BadRegistration,
    Key,
    Listed,
    Print,
    Registry,
    parse_key,
    parse_print,
    parse_uint,
)

MAX_BODY_BYTES = 64 << 10
AXES = ("tp", "cp", "dp", "pp")
OPEN_PATHS = ("/health",)  # asked without a key: liveness probes have none
OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}

# For /openapi.json; what is taken is decided in ``registry``.
_TEXT: dict[str, Any] = {"type": "string"}
_ROLE: dict[str, Any] = {"enum": list(OTHER_ROLE)}
_EPOCH = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": UINT64_MAX},
        {"type": "string", "pattern": "^[0-9]{1,20}$"},
    ]
}
_RANK: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 1 << 20}
_PRINT = {"type": "object", "properties": {"hash": _TEXT, "fields": {"type": "object"}}, "required": ["hash"]}
_LIFE = {"role": _ROLE, "instance_id": _TEXT, "epoch": _EPOCH, **{f"{axis}_rank": _RANK for axis in AXES}}
QUERY = (("role", _ROLE), ("fingerprint", _TEXT))
ROUTE_QUERY = (("instance_id", _TEXT), *((f"{axis}_rank", _RANK) for axis in AXES))


def _body(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _queries(*named: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name == "role", "schema": schema}
            for name, schema in named
        ]
    }


LIFE = _body({**_LIFE, "draining": {"type": "boolean"}}, "role", "instance_id", "epoch")
REGISTRATION = _body(
    {**_LIFE, "fingerprint": _PRINT, **dict.fromkeys(("zmq_addr", "transfer_addr", "serving_url"), _TEXT)},
    *("role", "instance_id", "epoch", "fingerprint", "zmq_addr"),
)


def _error_body(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "code": status}}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(_error_body(status, message), status_code=status)


async def _object(request: Request) -> dict[str, Any]:
    body, _ = await read_json(request, MAX_BODY_BYTES)
    if not isinstance(body, dict):
        raise BadBody("the body must be a JSON object")
    return body


def _asker(request: Request) -> Print | str | None:
    """?fingerprint= is a bare hash, or the JSON object of a registration when the asker may not be registered."""
    text = request.query_params.get("fingerprint")
    if text is None or not text.startswith("{"):
        return text
    try:
        return parse_print(msgspec.json.decode(text.encode()))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRegistration(f"fingerprint is neither a hash nor JSON: {error}") from error


def _role(request: Request) -> str:
    role = request.query_params.get("role")
    if role not in OTHER_ROLE:
        raise BadRegistration(f"?role= must be prefill or decode, got {role!r:.80}")
    return role


def _peers(registry: Registry, key: Key, now: float, fingerprint: Print | str | None) -> dict[str, Any]:
    """What the other role looks like to this instance, so that it can say whether it is ready (design: Bootstrap)."""
    compatible, rejected = registry.peers(OTHER_ROLE[key.role], now, fingerprint)
    return {"compatible": compatible, "rejected": rejected}


def build_app(registry: Registry, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    """The endpoints of RFC-2 §5.3 plus DELETE /route. Wrong input is 400 with a sentence, never 422."""
    app = FastAPI(title="pdjax bootstrap", docs_url=None, redoc_url=None)

    @app.exception_handler(BadRegistration)
    @app.exception_handler(BadBody)
    async def bad(_: Request, error: Exception) -> JSONResponse:
        return _error(400, str(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: Exception) -> JSONResponse:
        return _error(400, "the client went away before its body was complete")

    @app.put("/route", openapi_extra=REGISTRATION)
    async def register(request: Request) -> JSONResponse:
        payload = await _object(request)
        now = clock()
        status = registry.register(payload, now)
        if status == "stale":
            return _error(409, "a newer life of this instance is registered")
        if status == "full":
            return _error(503, f"the registry holds its limit of {registry.max_entries} instances")
        peers = _peers(registry, parse_key(payload), now, parse_print(payload["fingerprint"]))
        return JSONResponse({"status": status, "ttl_s": registry.ttl_s, "peers": peers})

    @app.post("/heartbeat", openapi_extra=LIFE)
    async def heartbeat(request: Request) -> JSONResponse:
        payload = await _object(request)
        key, epoch, now = parse_key(payload), parse_uint(payload.get("epoch"), "epoch"), clock()
        if not registry.heartbeat(key, epoch, now, draining=payload.get("draining") is True):
            return _error(404, "this life is not registered: register again")
        mine = payload.get("fingerprint")
        return JSONResponse(
            {"status": "ok", "peers": _peers(registry, key, now, mine if isinstance(mine, str) else None)}
        )

    @app.delete("/route", openapi_extra=LIFE)
    async def remove(request: Request) -> JSONResponse:
        payload = await _object(request)
        if not registry.remove(parse_key(payload), parse_uint(payload.get("epoch"), "epoch")):
            return _error(404, "this life is not registered")
        return JSONResponse({"status": "removed"})

    @app.get("/list", openapi_extra=_queries(*QUERY))
    async def list_role(request: Request) -> JSONResponse:
        return _listing(registry.list(_role(request), clock(), _asker(request)))

    @app.get("/route", openapi_extra=_queries(*QUERY, *ROUTE_QUERY))
    async def route(request: Request) -> JSONResponse:
        query = request.query_params
        role, instance = _role(request), query.get("instance_id")
        ranks = [parse_uint(query.get(f"{axis}_rank", "0"), f"{axis}_rank") for axis in AXES]
        found = registry.route(
            role,
            clock(),
            instance_id=instance,
            ranks=(ranks[0], ranks[1], ranks[2], ranks[3]),
            fingerprint=_asker(request),
        )
        if instance is None:
            return _listing(found)
        if not found:
            return _error(404, f"no {role} instance {instance!r:.80} with ranks {ranks}")
        return JSONResponse(found[0].to_json())

    @app.get("/health")
    async def health() -> JSONResponse:
        registry.sweep(clock())
        return JSONResponse({"status": "ok", "instances": len(registry), "counters": dict(registry.counters)})

    return app


def _listing(found: list[Listed]) -> JSONResponse:
    return JSONResponse({"instances": [listed.to_json() for listed in found]})


class HTTPBootstrapServer(BaseKVBootstrapServer):
    """The registry served by a thread of its own, inside P (``--with-bootstrap``) or alone (``pdjax bootstrap``).

    The socket is bound in the constructor, so that a taken port is a ConfigError at start; ``address`` is valid
    from then on. token: without it as bearer key every request but /health is 401; "" lets everybody in.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        ttl_s: float | None = None,
        *,
        door: Door | None = None,
        token: str = "",
    ) -> None:
        self.registry = Registry(PDSettings().heartbeat_ttl_s if ttl_s is None else ttl_s)
        counters = self.registry.counters
        app = guarded(
            build_app(self.registry),
            token,
            open_paths=OPEN_PATHS,
            refusal=msgspec.json.encode(_error_body(401, MISSING)),
            counters=counters,
        )
        sock = bind(host, port)
        self.host, self.port = sock.getsockname()[:2]
        self._http = HttpThread(app, sock, "pdjax-bootstrap", door=door, counters=counters)
        self.url = self._http.url
        self._started = False

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) as bound; the port is the kernel's choice when 0 was asked for."""
        return self.host, self.port

    def start(self) -> None:
        self._started = True
        self._http.start()

    def stop(self) -> None:
        self._http.stop()

    def poll(self) -> KVPoll:
        if not self._started:
            return KVPoll.Bootstrapping
        return KVPoll.WaitingForInput if self._http.alive else KVPoll.Failed

    @property
    def death(self) -> str:
        """What its thread has died of, for a log; without an error it has ended by itself."""
        return repr(self._http.error)
