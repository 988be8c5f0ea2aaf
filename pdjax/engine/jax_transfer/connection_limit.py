"""ConnectionLimit: how many TCP connections P's side channel holds at once (docs/security.md, limits).

ZMQ accepts whoever connects and has no bound of its own, so a stranger who opens thousands would use up the descriptors
of the process. A thread of this module watches the listening socket's monitor and cuts each connection beyond the limit.
To unbind instead would end every connection that the endpoint has accepted (libzmq 4.3.5), those of our peers too.
Must never touch the channel's own socket, which belongs to the driver, and never make the driver wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from typing import Protocol

import zmq

from pdjax.engine.descriptors import descriptor_limit, side_channel_connections

log = logging.getLogger(__name__)

LOG_AGAIN_S = 60.0  # a flood is one line a minute; the counter has them all

_ENDPOINT = "inproc://side-channel-connections"
# What another secret comes to; measured with libzmq 4.3.5: PROTOCOL, once for each try.
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
# It has left, or said nothing in time: each look of a D at whether P is reached (bootstrap/reach), port scanners.
_UNFINISHED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _REFUSED | _UNFINISHED
_EVENT = struct.Struct("=HI")  # event, value: here the descriptor


class ConnectionCounts(Protocol):
    """What a ``ConnectionLimit`` counts, from its own thread; nobody else writes these."""

    connections_refused: int
    handshakes_refused: int
    handshakes_unfinished: int


class ConnectionLimit:
    """Watches ``listener``. Make it before the listener binds, so that no connection is missed; then ``watch``.

    max_connections: fewer are held when this process may not open enough descriptors (``descriptors``), and that is
    said in the log.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: zmq.Socket[bytes],
        max_connections: int,
        count: ConnectionCounts,
    ) -> None:
        self.max_connections = side_channel_connections(max_connections)
        if self.max_connections < max_connections:
            log.warning(
                "the side channel holds at most %d connections, less than --disaggregation-max-connections %d:"
                " this process may open %d files (ulimit -n)",
                self.max_connections,
                max_connections,
                descriptor_limit(),
            )
        self._count = count
        self._held: set[int] = set()
        self._port = 0
        self._listener = listener
        self._log_after_s = 0.0
        # Cutting takes no new descriptor, of which there may be none left: a number of our own stands for each in turn.
        self._rest = socket.socket()
        self._handle = os.dup(self._rest.fileno())
        listener.monitor(_ENDPOINT, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        # No high-water mark: ZMQ's I/O thread would wait for room in the queue with a lock held that stop() needs.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="side-channel-connections", daemon=True)

    def watch(self, port: int) -> None:
        """Begin. port: the listener's."""
        self._port = port
        self._thread.start()

    def stop(self) -> None:
        """Before the listener is closed; returns when the thread has ended. Nothing that is held is cut."""
        self._listener.monitor(None, 0)  # tells the thread
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._monitor.close(0)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._rest.close()

    def _run(self) -> None:
        try:
            while True:
                event, descriptor = _EVENT.unpack(self._monitor.recv_multipart()[0])
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event & _REFUSED:
                    self._count.handshakes_refused += 1
                elif event & _UNFINISHED:
                    self._count.handshakes_unfinished += 1
                elif event == zmq.EVENT_DISCONNECTED:
                    self._held.discard(descriptor)
                elif len(self._held) < self.max_connections:
                    self._held.add(descriptor)
                else:
                    self._refuse(descriptor)
        finally:
            self._monitor.close(0)

    def _refuse(self, descriptor: int) -> None:
        """Cut it; ZMQ then sees its end and closes it. A D that is cut connects again and takes it for no refusal."""
        self._count.connections_refused += 1
        now_s = time.monotonic()
        if now_s >= self._log_after_s:
            self._log_after_s = now_s + LOG_AGAIN_S
            log.warning(
                "the side channel holds %d connections, its limit (--disaggregation-max-connections, ulimit -n): more are cut",
                self.max_connections,
            )
        with contextlib.suppress(OSError):  # it has left
            self._cut(descriptor)

    def _cut(self, descriptor: int) -> None:
        """Through a handle of our own, so that the number stands for one file as long as it is looked at. Raises OSError."""
        os.dup2(descriptor, self._handle, inheritable=False)
        try:
            connection = socket.socket(fileno=self._handle)
            try:
                # It may have left meanwhile, and its number be another file's: cut only what has come to our port.
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getsockname()[1] == self._port:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
        finally:
            os.dup2(self._rest.fileno(), self._handle, inheritable=False)
