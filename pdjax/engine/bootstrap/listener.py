"""The listening socket of an HTTP port: it bounds connections where they begin, and never takes a process's last descriptors.

An HTTP server hears of a connection only after its TLS handshake, and asyncio accepts a whole backlog before it hands
over the first: counted there, a stranger who says nothing takes every descriptor (S12). Must never wait for a peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
import weakref
from collections import Counter
from typing import Any

from pdjax.engine.descriptors import usable_descriptors

FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
# The loop comes back at once to a newcomer that nobody can accept, and would do nothing else.
NONE_LEFT_S = 0.005
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Connection(socket.socket):
    """An accepted socket; asyncio closes it and never detaches it. held: every open one by its descriptor."""

    held: Held | None = None
    handshake: asyncio.TimerHandle | None = None

    def greeted(self) -> None:
        """Its TLS handshake is over."""
        if self.handshake is not None:
            self.handshake.cancel()

    def close(self) -> None:
        self.greeted()
        if self.held is not None and self.fileno() >= 0:
            self.held.pop(self.fileno(), None)
        super().close()


Held = weakref.WeakValueDictionary[int, Connection]  # one that is dropped without close() leaves as well


def _spare() -> socket.socket | None:
    try:
        return socket.socket()
    except OSError:
        return None


class BoundedListener(socket.socket):
    """Takes over a listening socket, for asyncio's selector loop. counters get ``connections_refused`` and ``slow_heads``.

    tls: a newcomer beyond the limit is closed, since it cannot read a 503; and a handshake has handshake_timeout_s.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_connections: int,
        handshake_timeout_s: float,
        tls: bool,
        counters: Counter[str],
    ) -> None:
        family, kind, proto = sock.family, sock.type, sock.proto
        super().__init__(family, kind, proto, fileno=sock.detach())
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._tls = tls
        self._counters = counters
        self._held: Held = weakref.WeakValueDictionary()
        # given up to refuse a newcomer when there is no descriptor left
        self._spare = _spare()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError when it has refused one: asyncio then goes on with its other work."""
        try:
            plain, address = super().accept()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            self._refuse_without_descriptors()
            raise ConnectionAbortedError from None
        if len(self._held) >= self._max_connections or plain.fileno() >= usable_descriptors():
            self._refuse(plain)
            raise ConnectionAbortedError
        connection = Connection(plain.family, plain.type, plain.proto, fileno=plain.detach())
        connection.held = self._held
        self._held[connection.fileno()] = connection
        if self._tls:
            loop = asyncio.get_running_loop()
            connection.handshake = loop.call_later(self._handshake_timeout_s, self._too_slow, connection)
        return connection, address

    def greeted(self, descriptor: int) -> None:
        """The TLS handshake of this connection is over."""
        connection = self._held.get(descriptor)
        if connection is not None:
            connection.greeted()

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            self._spare.close()

    def _too_slow(self, connection: Connection) -> None:
        self._counters["slow_heads"] += 1
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # asyncio reads the end, and closes it

    def _refuse(self, newcomer: socket.socket) -> None:
        self._counters["connections_refused"] += 1
        with newcomer, contextlib.suppress(OSError):
            newcomer.setblocking(False)
            if not self._tls:
                newcomer.send(FULL)
                newcomer.shutdown(socket.SHUT_WR)
                newcomer.recv(1 << 16)  # what is unread would turn the end into a reset

    def _refuse_without_descriptors(self) -> None:
        """Another thread may take the number that is given up: then nobody is refused, or there is no spare for the next."""
        if self._spare is not None:
            self._spare.close()
        try:
            self._refuse(super().accept()[0])
        except OSError:
            time.sleep(NONE_LEFT_S)
        self._spare = _spare()
