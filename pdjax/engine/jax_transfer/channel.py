"""ZmqSideChannel: the small messages between P and D over ZMQ (protocol §3).

P binds one ROUTER, which makes a routing id for each connection: in hex, that is a frame's address on P. D has one
DEALER for each P address, made at the first send, and names itself in its frames alone: a routing id in the clear would
be anybody's who connects with it, before a MAC is checked (docs/security.md).
Nothing here blocks or raises on what a peer does: a full queue, a peer that is gone and a frame that is too long are
counted and dropped. Everything but ``wake`` belongs to one thread, because ZMQ sockets do. Must never decode a frame.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.engine.jax_transfer import addresses, curve
from pdjax.engine.jax_transfer.connection_limit import ConnectionLimit
from pdjax.engine.jax_transfer.stalls import Stalls
from pdjax.engine.ports import ChannelEvent, FrameIn, Refused, SideChannel

QUEUE_FRAMES = 256  # ZMQ high-water mark, each way, each peer: bounds what a peer that does not read can cost
CONNECTING_FRAMES = (
    64  # queued to a P that has not answered the TCP connect: enough for every room's first hello
)
BATCH_EVENTS = 256  # most events of one receive(), so that timers of the driver are never starved
BATCH_FRAMES = 64  # most frames of one socket in one receive(), so that one loud peer starves no other
RECONNECT_MS = 50
RECONNECT_MAX_MS = 500
STALE_CONNECT_S = (
    5.0  # a connect without any answer is started afresh: the kernel's SYN retries back off to a minute
)
HANDSHAKE_MS = 5000  # a TCP client that does not speak ZMQ is closed after this
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = (
    6000  # a connection whose other machine vanished is closed, so that P's table stays bounded
)

_MONITORED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_DELAYED
)


@dataclass
class ChannelCounters:
    """Frames, but for the last six. Every dropped frame is in exactly one ``dropped_`` field.

    refused: connects that P's machine refused. connections_refused: that this P cut (``ConnectionLimit``).
    handshakes_refused: connections that this P ended before they could say anything, as it does with another secret
    (``curve``). handshakes_unfinished: those that ended so by themselves or said nothing in time.
    """

    sent: int = 0
    received: int = 0
    dropped_full: int = 0
    dropped_unreachable: int = 0
    dropped_too_long: int = 0
    dropped_malformed: int = 0
    dropped_peer_limit: int = 0
    refused: int = 0
    recycled: int = 0
    connections_refused: int = 0
    handshakes_refused: int = 0
    handshakes_unfinished: int = 0
    peers: int = 0

    def as_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclass
class _Dealer:
    """D's socket to one P. owed: a refusal would be news, since something was sent or connected after the last.

    broke: the last that the monitor told is the end of a connection.
    """

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    since: float
    connected: bool = False
    queued: int = 0
    owed: bool = True
    broke: bool = False


class ZmqSideChannel(SideChannel):
    """``SideChannel`` over ZMQ. Make it with ``bind`` on P and with ``dealer`` on D."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: PDSettings,
        clock: Callable[[], float],
        secret: bytes,
    ) -> None:
        self.counters = ChannelCounters()
        self._context, self._secret = context, secret
        self._limit: ConnectionLimit | None = None
        self._max_connections = settings.max_channel_connections
        self._max_frame_bytes = settings.max_frame_bytes
        self._max_peers = settings.max_peers
        self._clock = clock
        self._stalls = Stalls(clock)
        self._router: zmq.Socket[bytes] | None = None
        self._address: str | None = None
        self._dealers: dict[str, _Dealer] = {}
        self._turn = 0
        self._poller = zmq.Poller()
        self._wake_lock = threading.Lock()
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)

    # ------------------------------------------------------------------ making one

    @classmethod
    def bind(
        cls,
        host: str,
        port: int = 0,
        *,
        advertise: str | None = None,
        settings: PDSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes = b"",
    ) -> ZmqSideChannel:
        """P's side. host: numeric ip; port 0: the kernel's choice. Raises ConfigError for a name or a taken port."""
        where = addresses.host_address(host, advertise)
        channel = cls._make(settings, clock, secret)
        try:
            channel._bind(where, port)
        except BaseException:
            channel.close()
            raise
        return channel

    @classmethod
    def dealer(
        cls,
        *,
        settings: PDSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes = b"",
    ) -> ZmqSideChannel:
        """D's side. secret: P's, or no connection comes about."""
        return cls._make(settings, clock, secret)

    @classmethod
    def _make(cls, settings: PDSettings | None, clock: Callable[[], float], secret: bytes) -> ZmqSideChannel:
        settings = settings or PDSettings()
        context = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, 4 * settings.max_peers + 16)
        return cls(context, settings, clock, secret)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
        # A little too long is a peer's bug, dropped and counted here; far too long is cut by ZMQ with its connection.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * self._max_frame_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _bind(self, where: addresses.HostAddress, port: int) -> None:
        # libzmq 4.3.5 begins its routing ids at rand(), seeded by nobody: the same in every process. Who claims the next
        # one would abort this one, and who claims one of a D that has just left is sent what is meant for it.
        ctypes.CDLL(None).srand(secrets.randbits(32))
        router = self._router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # No ROUTER_HANDOVER: whoever claims the routing id of a living connection is not listened to. A D whose
        # connection died unseen comes back under a new one, and PeerBook follows its newest frame.
        curve.guard_listener(router, self._secret)
        limit = self._limit = ConnectionLimit(self._context, router, self._max_connections, self.counters)
        try:
            router.bind(f"tcp://{addresses.join(where.bind, port)}")
        except zmq.ZMQError as e:
            raise ConfigError(f"side channel cannot bind {addresses.join(where.bind, port)}: {e}") from None
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        bound = int(endpoint.rpartition(":")[2])
        self._address = addresses.join(where.advertise, bound)
        limit.watch(bound)
        self._poller.register(router, zmq.POLLIN)

    def _connect(self, address: str) -> _Dealer:
        ip, port = addresses.split(address)
        socket = self._socket(zmq.DEALER)
        monitor = None
        try:
            curve.knock(socket, self._secret)
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
            monitor = socket.get_monitor_socket(_MONITORED)
            monitor.setsockopt(zmq.LINGER, 0)
            # Without IMMEDIATE a frame waits for the TCP connect, so that a first hello is not lost for a backoff.
            socket.connect(f"tcp://{addresses.join(ip, port)}")
        except BaseException:
            _shut(socket, monitor)
            raise
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        dealer = self._dealers[address] = _Dealer(socket, monitor, self._clock())
        self.counters.peers = len(self._dealers)
        return dealer

    # ------------------------------------------------------------------ sending

    @property
    def address(self) -> str | None:
        return self._address

    def send(self, address: str, frame: bytes) -> bool:
        """Queue one frame. False: dropped and counted."""
        if self._closed:
            self.counters.dropped_unreachable += 1
            return False
        if len(frame) > self._max_frame_bytes:
            self.counters.dropped_too_long += 1
            return False
        sent = (
            self._send_router(address, frame)
            if self._router is not None
            else self._send_dealer(address, frame)
        )
        self.counters.sent += sent
        return sent

    def _send_router(self, address: str, frame: bytes) -> bool:
        assert self._router is not None
        try:
            self._router.send_multipart([bytes.fromhex(address), frame], zmq.NOBLOCK)
        except zmq.Again:
            self.counters.dropped_full += 1
            return False
        except (ValueError, zmq.ZMQError):  # no hex; ROUTER_MANDATORY: EHOSTUNREACH, no such connection
            self.counters.dropped_unreachable += 1
            return False
        return True

    def _send_dealer(self, address: str, frame: bytes) -> bool:
        dealer = self._dealer_for(address)
        if dealer is None:
            return False
        dealer.owed = True
        if not dealer.connected:
            if dealer.queued >= CONNECTING_FRAMES:
                self.counters.dropped_full += 1
                return False
            dealer.queued += 1
        try:
            dealer.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.counters.dropped_full += 1
            return False
        return True

    def _dealer_for(self, address: str) -> _Dealer | None:
        dealer = self._dealers.get(address)
        if dealer is not None and not dealer.connected and self._clock() - dealer.since > STALE_CONNECT_S:
            self.counters.recycled += 1
            self.counters.dropped_unreachable += dealer.queued
            self.forget(address)
            dealer = None
        if dealer is None:
            if len(self._dealers) >= self._max_peers:
                self.counters.dropped_peer_limit += 1
                return None
            try:
                dealer = self._connect(address)
            except (ValueError, zmq.ZMQError):  # not ip:port, or no socket left
                self.counters.dropped_unreachable += 1
                return None
        return dealer

    # ------------------------------------------------------------------ receiving

    def receive(self) -> list[ChannelEvent]:
        """At most BATCH_EVENTS events; ``wait`` returns at once while more are there."""
        events: list[ChannelEvent] = []
        if self._closed:
            return events
        self._stalls.settle()
        # One look at all sockets: a receive that finds nothing raises, which costs four times as much for each of the
        # two sockets of every P, and most of them have nothing to say (docs/performance.md).
        ready = dict(self._poller.poll(0))
        if self._router is not None:
            if self._router in ready:
                self._drain_router(self._router, events)
            return events
        names = list(self._dealers)
        if names:
            self._turn = (self._turn + 1) % len(names)
        for address in names[self._turn :] + names[: self._turn]:
            dealer = self._dealers[address]
            if dealer.monitor in ready:
                self._drain_monitor(address, dealer, events)
            if dealer.socket in ready:
                self._drain_dealer(address, dealer, events)
            if len(events) >= BATCH_EVENTS:
                break
        return events

    def _drain_router(self, router: zmq.Socket[bytes], events: list[ChannelEvent]) -> None:
        for _ in range(BATCH_EVENTS):
            if not _readable(router):
                return
            routing_id = router.recv(zmq.NOBLOCK)
            frame = self._last_part(router)
            if frame is not None:
                events.append(FrameIn(routing_id.hex(), frame))

    def _drain_dealer(self, address: str, dealer: _Dealer, events: list[ChannelEvent]) -> None:
        for _ in range(BATCH_FRAMES):
            if not _readable(dealer.socket):
                return
            frame = dealer.socket.recv(zmq.NOBLOCK)
            if dealer.socket.getsockopt(zmq.RCVMORE):
                self._drop_rest(dealer.socket)
            elif self._fits(frame):
                events.append(FrameIn(address, frame))

    def _last_part(self, router: zmq.Socket[bytes]) -> bytes | None:
        """The one part after the routing id; None when there is none or more than one."""
        if not router.getsockopt(zmq.RCVMORE):
            self.counters.dropped_malformed += 1
            return None
        frame = router.recv(zmq.NOBLOCK)
        if router.getsockopt(zmq.RCVMORE):
            self._drop_rest(router)
            return None
        return frame if self._fits(frame) else None

    def _drop_rest(self, socket: zmq.Socket[bytes]) -> None:
        while socket.getsockopt(zmq.RCVMORE):
            socket.recv(zmq.NOBLOCK)
        self.counters.dropped_malformed += 1

    def _fits(self, frame: bytes) -> bool:
        if len(frame) > self._max_frame_bytes:
            self.counters.dropped_too_long += 1
            return False
        self.counters.received += 1
        return True

    def _drain_monitor(self, address: str, dealer: _Dealer, events: list[ChannelEvent]) -> None:
        while _readable(dealer.monitor):
            event = recv_monitor_message(dealer.monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                dealer.connected, dealer.queued, dealer.owed = True, 0, True
                continue
            dealer.connected, dealer.since = False, self._clock()
            # ZMQ says "retried" also when it only waits to connect again after a connection broke. P may well be
            # there; if it is not, the connect that follows is refused.
            broke, dealer.broke = dealer.broke, event == zmq.EVENT_DISCONNECTED
            if event == zmq.EVENT_CONNECT_RETRIED and not broke and dealer.owed:
                dealer.owed = False
                self.counters.refused += 1
                events.append(Refused(address))

    # ------------------------------------------------------------------ waiting and closing

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame, a refusal or a ``wake``; at most timeout_s."""
        if self._closed:
            return
        self._stalls.expect(timeout_s)
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wake_read, 4096):
                    pass

    def wake(self) -> None:
        """End the present or the next ``wait``; from any thread, also after ``close``."""
        with self._wake_lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # the pipe is full of wakes already
                    os.write(self._wake_write, b"w")

    def forget(self, address: str) -> None:
        """D: close the connection to that P and drop what is queued. P: ZMQ keeps it until the D leaves."""
        dealer = self._dealers.pop(address, None)
        if dealer is not None:
            self._poller.unregister(dealer.socket)
            self._poller.unregister(dealer.monitor)
            _shut(dealer.socket, dealer.monitor)
            self.counters.peers = len(self._dealers)

    def close(self) -> None:
        """Close every socket; nothing queued is waited for."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_write)
            os.close(self._wake_read)
        for address in list(self._dealers):
            self.forget(address)
        if self._limit is not None:
            self._limit.stop()
        if self._router is not None:
            self._router.close(0)
            self._router = None
        self._context.term()


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _shut(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
    if monitor is not None:
        socket.disable_monitor()
        monitor.close(0)
    socket.close(0)
