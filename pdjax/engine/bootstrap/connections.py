"""Connections of an HTTP port: how long one may take to say what it wants. How many there may be: ``listener``.

uvicorn bounds neither: a stranger could hold every file descriptor of a process with connections that say nothing
(S12). Must never look at what a request means.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdjax.engine.bootstrap.listener import BoundedListener

MAX_CONNECTIONS = 2048  # clients of a full queue, and as many idle ones of the routers' pools
HEAD_TIMEOUT_S = 30.0  # of a TLS handshake; and from the first byte waited for to the end of a request's head
LAST_HEAD_S = 0.5  # the same once the server ends


class BoundedConfig(uvicorn.Config):
    """counters get ``slow_heads``."""

    def __init__(
        self,
        app: Any,
        *,
        listener: BoundedListener,
        head_timeout_s: float,
        counters: Counter[str],
        **more: Any,
    ) -> None:
        # another loop would accept in its own way, past the listener's limit
        super().__init__(app, http=BoundedProtocol, loop="asyncio", **more)
        self.listener = listener
        self.head_timeout_s = head_timeout_s
        self.counters = counters
        self.closing = False  # the server ends: each connection has its last request


class BoundedProtocol(H11Protocol):
    """One connection. If its head does not come it is closed, unanswered."""

    config: BoundedConfig

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_timer: asyncio.TimerHandle | None = None
        self._last_call: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.config.listener.greeted(transport.get_extra_info("socket").fileno())
        super().connection_made(transport)
        self._await_head()
        if self.config.closing:
            self.shutdown()

    def handle_events(self) -> None:
        """Called with new bytes, and with those that came behind a request once that is answered."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._await_head()
        if self._last_call is not None and self.cycle is not None:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """To bytes that are no HTTP. What was asked before them on this connection cannot be answered any more.

        uvicorn lets its application try, and says an error into its own connection while that answers: either is a
        traceback in the log for each such connection of a stranger.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        """The server ends: what is being answered is the last, and who has only just begun to ask is answered, too."""
        left_s = 0.0
        if self._head_timer is not None:
            began = self._head_timer.when() - self.config.head_timeout_s
            left_s = began + LAST_HEAD_S - self.loop.time()
        if left_s > 0:
            self._last_call = self.loop.call_later(left_s, super().shutdown)
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._last_call is not None:
            self._last_call.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.config.head_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self.config.counters["slow_heads"] += 1
        self.transport.abort()
