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
from collections.abc import Callable

import zmq

log = logging.getLogger(__name__)

LOG_AGAIN_S = 60.0  # a flood is one line a minute; the counter has them all

_ENDPOINT = "inproc://side-channel-connections"
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _HANDSHAKE_FAILED
_EVENT = struct.Struct("=HI")  # event, value: here the descriptor


class ConnectionLimit:
    """Watches ``listener``. Make it before the listener binds, so that no connection is missed; then ``watch``.

    count_refused: called for each connection that is cut, count_failed for each that ZMQ ends during its handshake;
    from this object's own thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: zmq.Socket[bytes],
        max_connections: int,
        count_refused: Callable[[], None],
        count_failed: Callable[[], None],
    ) -> None:
        self._max_connections = max_connections
        self._count_refused, self._count_failed = count_refused, count_failed
        self._held: set[int] = set()
        self._port = 0
        self._listener = listener
        self._log_after_s = 0.0
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

    def _run(self) -> None:
        try:
            while True:
                event, descriptor = _EVENT.unpack(self._monitor.recv_multipart()[0])
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event & _HANDSHAKE_FAILED:
                    self._count_failed()
                elif event == zmq.EVENT_DISCONNECTED:
                    self._held.discard(descriptor)
                elif len(self._held) < self._max_connections:
                    self._held.add(descriptor)
                else:
                    self._refuse(descriptor)
        finally:
            self._monitor.close(0)

    def _refuse(self, descriptor: int) -> None:
        """Cut it; ZMQ then sees its end and closes it. A D that is cut connects again and takes it for no refusal."""
        self._count_refused()
        now_s = time.monotonic()
        if now_s >= self._log_after_s:
            self._log_after_s = now_s + LOG_AGAIN_S
            log.warning(
                "the side channel holds %d connections, its limit (--disaggregation-max-connections): more are cut",
                self._max_connections,
            )
        with contextlib.suppress(OSError), self._opened(descriptor) as connection:
            # It may have left meanwhile, and its number be another file's: cut only what has come to our port.
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _opened(descriptor: int) -> socket.socket:
        """A second handle, so that the number stands for one file as long as it is looked at. Raises OSError."""
        copy = os.dup(descriptor)
        try:
            return socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            raise
