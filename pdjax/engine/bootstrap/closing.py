"""The end of an HTTP server: whoever has connected before it is answered, those in the listen backlog included.

uvicorn closes the listening socket with connections in its backlog, and every connection without a request: what those
have sent is answered with a reset. Must never wait for a client longer than its own short bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from pdjax.engine.bootstrap.connections import LAST_HEAD_S, BoundedConfig, BoundedProtocol

TURNS = 3  # of the loop: it looks at its sockets in the first, and reads in the second


class ClosingServer(uvicorn.Server):
    """For asyncio's own loop, and sockets that were bound before."""

    config: BoundedConfig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        backlog = [one for listener in sockets or [] for one in _backlog(listener, self.config.backlog)]
        # Nothing is awaited between the last accept and the close: a client may come in between, but hardly.
        for server in self.servers:
            server.close()
        self.config.closing = True
        newcomers = [self._welcome(one) for one in backlog]
        if newcomers:
            with contextlib.suppress(
                TimeoutError
            ):  # of a TLS handshake; one that fails is its client's affair
                await asyncio.wait_for(asyncio.gather(*newcomers, return_exceptions=True), LAST_HEAD_S)
        for _ in range(TURNS):  # a request that is here to be read is no idle connection
            await asyncio.sleep(0)
        await super().shutdown(sockets)

    def _welcome(self, newcomer: socket.socket) -> asyncio.Task[object]:
        loop = asyncio.get_running_loop()
        return loop.create_task(
            loop.connect_accepted_socket(self._protocol, newcomer, ssl=self.config.ssl or None)
        )

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state)


def _backlog(listener: socket.socket, at_most: int) -> Iterator[socket.socket]:
    """Whoever has connected and was not accepted yet; a listener may refuse one, and then goes on."""
    for _ in range(at_most):
        try:
            newcomer, _ = listener.accept()
        except ConnectionAbortedError:
            continue
        except OSError:  # nobody is left, or no descriptor
            return
        newcomer.setblocking(False)
        yield newcomer
