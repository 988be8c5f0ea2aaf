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


class BoundedProtocol(H11Protocol):
    """One connection. If its head does not come it is closed, unanswered."""

    config: BoundedConfig

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.config.listener.greeted(transport.get_extra_info("socket").fileno())
        super().connection_made(transport)
        self._await_head()

    def handle_events(self) -> None:
        """Called with new bytes, and with those that came behind a request once that is answered."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
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
