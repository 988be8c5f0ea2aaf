"""Small parts that every HTTP server of ours shares: sockets, a server thread, bodies read with a limit.

Must never answer a request itself or know what a body means.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from pdjax.core.errors import ConfigError
from pdjax.engine.bootstrap.access import base_url
from pdjax.engine.bootstrap.closing import ClosingServer
from pdjax.engine.bootstrap.connections import HEAD_TIMEOUT_S, MAX_CONNECTIONS, BoundedConfig
from pdjax.engine.bootstrap.listener import BoundedListener

# The routers' pools keep idle connections for less than this. uvicorn's 5 s would close one just as the
# router writes on it (facts/router §11).
KEEP_ALIVE_S = 120
END_GRACE_S = 5  # for the requests that run when the server is asked to end
# A body over its limit is read and thrown away up to this, so that the client can still read our answer.
MAX_DISCARD_BYTES = 64 << 20
BODY_TIMEOUT_S = 60.0  # from a request's head to the end of its body
BACKLOG = 2048


class BadBody(ValueError):
    """The body is too long, too late or no JSON; the text is fit for the client."""


@dataclass(frozen=True)
class Door:
    """How an HTTP port is opened. certfile and keyfile: PEM files of its certificate, "" for plain HTTP."""

    certfile: str = ""
    keyfile: str = ""
    max_connections: int = MAX_CONNECTIONS
    head_timeout_s: float = HEAD_TIMEOUT_S

    @property
    def scheme(self) -> str:
        return "https" if self.certfile else "http"


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 lets the kernel choose. Raises ConfigError when it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter: no name can be as long
        raise ConfigError(
            f"host {host!r} cannot be resolved ({getattr(error, 'strerror', error)}): give an address of this machine"
        ) from error
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another port, or 0 for a free one"
        ) from error
    return sock


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """scheme://host:port of a bound socket, without a trailing slash (routers mishandle one, facts/router §8)."""
    host, port = sock.getsockname()[:2]
    return base_url(host, port, scheme)


def http_server(app: Any, listener: BoundedListener, door: Door, counters: Counter[str]) -> ClosingServer:
    """A uvicorn server with our settings; run it with ``server.run(sockets=[listener])``."""
    config = BoundedConfig(
        app,
        listener=listener,
        head_timeout_s=door.head_timeout_s,
        counters=counters,
        ssl_certfile=door.certfile or None,
        ssl_keyfile=door.keyfile or None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_GRACE_S,
        access_log=False,
        log_config=None,
        lifespan="off",
        ws="none",
    )
    # The routers probe every worker with "PRI * HTTP/2.0" (facts/router §1): one warning each would be noise.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return ClosingServer(config)


class HttpThread:
    """One app served by a thread of its own. Owns the socket; ``stop`` closes it. counters: of ``connections``."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        name: str,
        *,
        door: Door | None = None,
        counters: Counter[str] | None = None,
    ) -> None:
        door = door or Door()
        self.url = url_of(sock, door.scheme)
        counters = Counter() if counters is None else counters
        self._listener = BoundedListener(
            sock,
            max_connections=door.max_connections,
            handshake_timeout_s=door.head_timeout_s,
            tls=bool(door.certfile),
            counters=counters,
        )
        self._server = http_server(app, self._listener, door, counters)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:
            self.error = error
            raise

    def start(self) -> None:
        """The socket listens already, so a client that connects from now on is answered."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, wait_s: float = 2.0 * END_GRACE_S) -> None:
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(wait_s)
        self._listener.close()


async def read_json(request: Request, limit_bytes: int, limit_s: float = BODY_TIMEOUT_S) -> tuple[Any, int]:
    """The body as strict JSON (integers exact, no NaN) and its length. Raises BadBody, ClientDisconnect."""
    body = bytearray()
    total = 0
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                total += len(chunk)
                if total <= limit_bytes:
                    body += chunk
                elif total > MAX_DISCARD_BYTES:
                    break
    except TimeoutError:
        raise BadBody(f"the body did not come within {limit_s:g} s") from None
    if total > limit_bytes:
        raise BadBody(f"the body is longer than the limit of {limit_bytes} bytes")
    try:
        return msgspec.json.decode(body), total
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadBody("the body is nested too deeply") from error


__all__ = ["BadBody", "ClientDisconnect", "Door", "HttpThread", "bind", "http_server", "read_json", "url_of"]
