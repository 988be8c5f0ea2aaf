"""The side-channel contract on ZMQ, and what only real sockets have."""

from __future__ import annotations

import ctypes
import itertools
import socket
import threading
import time
from collections.abc import Callable

import pytest
import zmq
from contract.channel_contract import ChannelContract, ChannelPair

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.engine.jax_transfer import channel as channel_module
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.ports import ChannelEvent, FrameIn, Refused, SideChannel

BOUND_S = 20.0
SETTINGS = PDSettings(max_frame_bytes=1 << 16, max_peers=8)


class ZmqPair(ChannelPair):
    max_frame_bytes = SETTINGS.max_frame_bytes

    def __init__(self) -> None:
        self._made: list[SideChannel] = []
        self.p = self._keep(ZmqSideChannel.bind("127.0.0.1", settings=SETTINGS))
        self.d = self.new_d("d0:1")

    def _keep(self, channel: ZmqSideChannel) -> ZmqSideChannel:
        self._made.append(channel)
        return channel

    def new_d(self, name: str) -> ZmqSideChannel:
        return self._keep(ZmqSideChannel.dealer(settings=SETTINGS))

    def kill_p(self) -> None:
        self.p.close()

    def revive_p(self) -> None:
        port = int(self.p.address.rpartition(":")[2])
        self.p = self._keep(ZmqSideChannel.bind("127.0.0.1", port, settings=SETTINGS))

    def dead_address(self) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"

    def settle(self, channel: SideChannel, until: Callable[[list[ChannelEvent]], bool]) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        deadline = time.monotonic() + BOUND_S
        while not until(events):
            assert time.monotonic() < deadline, f"nothing in {BOUND_S} s; received {events}"
            channel.wait(0.05)
            events += channel.receive()
        return events

    def idle(self, channel: SideChannel) -> list[ChannelEvent]:
        """Longer than two reconnect intervals."""
        events: list[ChannelEvent] = []
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:
            channel.wait(0.1)
            events += channel.receive()
        return events

    def close(self) -> None:
        for channel in self._made:
            channel.close()


@pytest.fixture
def pair():
    pair = ZmqPair()
    yield pair
    pair.close()


class TestZmq(ChannelContract):
    @pytest.fixture
    def pair(self):
        pair = ZmqPair()
        yield pair
        pair.close()


def test_a_refusal_is_reported_within_milliseconds(pair):
    took = []
    for _ in range(5):
        dead = pair.dead_address()
        start = time.monotonic()
        pair.d.send(dead, b"x")
        assert pair.settle(pair.d, bool) == [Refused(dead)]
        took.append(time.monotonic() - start)
        pair.d.forget(dead)
    assert min(took) < 0.05, took


class Path:
    """A network between D and P, whose connections can be cut while both ends live."""

    def __init__(self, address: str) -> None:
        self._silent: list[socket.socket] = []
        self._to = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._d_ends: list[socket.socket] = []
        self._p_ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._to)
                self._d_ends.append(ends[0])
                self._p_ends.append(ends[1])
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()
        except OSError:
            return  # closed

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(4096):
                other.sendall(data)
        except OSError:
            return  # cut

    def cut(self, unseen_by_p: bool = False) -> None:
        """unseen_by_p: to P the connections look alive, as when their machine has vanished."""
        for ends in (self._d_ends,) if unseen_by_p else (self._d_ends, self._p_ends):
            while ends:
                end = ends.pop()
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
                finally:
                    end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def test_a_connection_that_breaks_is_no_refusal(pair):
    """P lives: a heartbeat that a stopped D missed, or a box on the way, ended the connection. D once gave up each
    room of that P, and forgot the notices that it owed."""
    path = Path(pair.address)
    try:
        for i in range(3):
            assert pair.d.send(path.address, b"%d" % i)
            assert [e.frame for e in pair.frames(pair.p, 1)] == [b"%d" % i]
            path.cut()
            assert pair.idle(pair.d) == []
        assert pair.d.counters.refused == 0
        path.close()
        assert pair.settle(pair.d, bool) == [Refused(path.address)], "and now nobody listens"
    finally:
        path.cut()


def test_a_d_whose_connection_died_unseen_gets_through_at_once(pair):
    """P took the new connection for a second one of the same name once; its heartbeat sees the end of the old after 6 s."""
    path = Path(pair.address)
    try:
        assert pair.d.send(path.address, b"before")
        (before,) = pair.frames(pair.p, 1)
        path.cut(unseen_by_p=True)
        began, heard = time.monotonic(), []
        while not heard:
            pair.d.send(path.address, b"after")  # one that was on its way when it broke is lost
            pair.p.wait(0.05)
            pair.d.receive()
            heard = pair.p.receive()
            assert time.monotonic() - began < channel_module.HEARTBEAT_TIMEOUT_MS / 1000 / 2
        assert heard[-1].address != before.address
        assert pair.p.send(before.address, b"lost"), "the old one still looks alive"
        assert pair.p.send(heard[-1].address, b"here")
        assert pair.frames(pair.d, 1) == [FrameIn(path.address, b"here")]
    finally:
        path.close()


def test_few_frames_wait_for_a_p_that_is_not_there(pair):
    dead = pair.dead_address()
    n = channel_module.CONNECTING_FRAMES
    assert [pair.d.send(dead, b"x") for _ in range(n + 5)] == [True] * n + [False] * 5
    assert (pair.d.counters.sent, pair.d.counters.dropped_full) == (n, 5)


def test_wake_ends_a_wait_from_another_thread_and_before_it(pair):
    thread = threading.Timer(0.05, pair.p.wake)
    thread.start()
    start = time.monotonic()
    pair.p.wait(60.0)
    thread.join()
    assert time.monotonic() - start < BOUND_S
    for _ in range(100_000):  # more than a pipe holds: must not block
        pair.p.wake()
    pair.p.wait(60.0)
    start = time.monotonic()
    pair.p.wait(0.05)  # all wakes were taken by the wait before
    assert time.monotonic() - start >= 0.04


def test_a_frame_that_arrives_ends_a_wait(pair):
    pair.meet()
    pair.d.send(pair.address, b"x")
    start = time.monotonic()
    pair.p.wait(60.0)
    assert time.monotonic() - start < BOUND_S
    assert [e.frame for e in pair.p.receive()] == [b"x"]


def test_receive_is_bounded_and_the_rest_comes_later(pair, monkeypatch):
    monkeypatch.setattr(channel_module, "BATCH_EVENTS", 10)
    for i in range(25):
        assert pair.d.send(pair.address, b"%d" % i)
    batches = []
    pair.settle(pair.p, lambda got: batches.append(len(got)) or len(got) == 25)
    assert max(b - a for a, b in itertools.pairwise(batches)) <= 10


def test_a_peer_that_does_not_read_costs_false_and_never_a_wait(pair):
    at_p = pair.meet()
    frame = b"x" * 65536
    start = time.monotonic()
    results = [pair.p.send(at_p, frame) for _ in range(4000)]
    assert time.monotonic() - start < BOUND_S
    assert results[0]
    assert not results[-1]
    assert pair.p.counters.dropped_full == results.count(False)
    assert pair.p.counters.sent == results.count(True) + 1


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" * 4,
    b"\x00" * 4096,
    b"\xff" * 10 + b"\x7f" + b"\xff" * 5000,
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL"
    + b"\x00" * 48
    + b"\x02"
    + b"\xff" * 8
    + b"x" * 100,
    b"",
]


def test_garbage_from_other_clients_is_survived(pair):
    pair.meet()
    ip, _, port = pair.address.rpartition(":")
    clients = []
    for blob in GARBAGE:
        client = socket.create_connection((ip, int(port)), timeout=BOUND_S)
        client.sendall(blob)
        clients.append(client)
    assert pair.idle(pair.p) == []
    pair.meet()
    for client in clients:
        client.close()
    pair.meet()


@pytest.fixture
def raw(pair):
    """A ZMQ client without manners."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IDENTITY, b"raw\xff")
    sock.connect(f"tcp://{pair.address}")
    yield sock
    sock.close()
    context.term()


def test_malformed_and_long_frames_are_dropped_and_counted(pair, raw):
    raw.send_multipart([b"one", b"two"])
    raw.send_multipart([b"", b"two", b"three"])
    raw.send(b"x" * (SETTINGS.max_frame_bytes + 1))
    raw.send(b"good")
    (event,) = pair.frames(pair.p, 1)
    assert event.frame == b"good"
    assert pair.p.counters.dropped_malformed == 2
    assert pair.p.counters.dropped_too_long == 1
    assert pair.p.send(event.address, b"back")
    assert raw.poll(BOUND_S * 1000)
    assert raw.recv() == b"back"


def test_a_far_too_long_frame_is_cut_off(pair, raw):
    pair.meet()
    raw.send(b"x" * (4 * SETTINGS.max_frame_bytes))
    assert pair.idle(pair.p) == []
    assert pair.p.counters.dropped_too_long == 0, "it was received whole"
    pair.meet()


def test_the_routing_ids_of_a_p_cannot_be_foreseen():
    """libzmq numbers connections from the C library's rand(), which nobody has seeded: 6b8b4567 in every process. Who claims
    the next number ends the process (an assertion of libzmq 4.3.5)."""
    first = []
    for _ in range(2):
        ctypes.CDLL(None).srand(1)
        pair = ZmqPair()
        try:
            first.append(pair.meet())
        finally:
            pair.close()
    assert first[0] != first[1]


def test_a_name_that_is_claimed_takes_no_connection_away(pair):
    """Whoever connected under D's routing id was sent D's next ready, with the uuid and the first token, before a MAC was
    checked, and D was not heard. Names that a D would have are not to be had, either."""
    at_p = pair.meet()
    context = zmq.Context()
    claims = []
    try:
        for name in (bytes.fromhex(at_p), b"d0:1"):
            claim = context.socket(zmq.DEALER)
            claim.setsockopt(zmq.LINGER, 0)
            claim.setsockopt(zmq.IDENTITY, name)
            claim.connect(f"tcp://{pair.address}")
            claims.append(claim)
        claims[1].send(b"I am here")
        assert [e.frame for e in pair.frames(pair.p, 1)] == [b"I am here"]
        assert pair.idle(pair.p) == []  # and the first claim was judged meanwhile
        assert pair.p.send(at_p, b"ready")
        assert pair.frames(pair.d, 1) == [FrameIn(pair.address, b"ready")]
        assert pair.meet() == at_p
        assert [claim.poll(0) for claim in claims] == [0, 0]
    finally:
        for claim in claims:
            claim.close()
        context.term()


def test_the_number_of_peers_is_bounded(pair):
    port = pair.dead_address().rpartition(":")[2]
    addresses = [f"127.0.1.{i}:{port}" for i in range(1, SETTINGS.max_peers + 1)]
    assert all(pair.d.send(a, b"x") for a in addresses)
    assert not pair.d.send(pair.address, b"x")
    assert pair.d.counters.dropped_peer_limit == 1
    assert pair.d.counters.peers == SETTINGS.max_peers
    pair.d.forget(addresses[0])
    pair.heard(pair.d, b"x")


def test_a_connect_without_an_answer_is_started_afresh():
    """A full backlog drops SYNs like an address in a black hole; the kernel would try again ever more seldom."""
    now = [0.0]
    d = ZmqSideChannel.dealer(settings=SETTINGS, clock=lambda: now[0])
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)  # accepts TCP, speaks no ZMQ
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    try:
        assert d.send(address, b"x")
        d.receive()
        now[0] = channel_module.STALE_CONNECT_S - 0.1
        assert d.send(address, b"x")
        assert d.counters.recycled == 0
        now[0] = 3 * channel_module.STALE_CONNECT_S
        assert d.send(address, b"x")
        assert d.counters.recycled == 1
        assert d.counters.dropped_unreachable == 2
        assert d.counters.peers == 1
    finally:
        d.close()
        silent.close()


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::", "eth0", ""])
def test_a_host_that_peers_could_not_dial_is_refused(host):
    with pytest.raises(ConfigError):
        ZmqSideChannel.bind(host)


def test_a_wildcard_with_an_advertised_ip():
    p = ZmqSideChannel.bind("0.0.0.0", advertise="127.0.0.1", settings=SETTINGS)
    d = ZmqSideChannel.dealer(settings=SETTINGS)
    try:
        assert p.address.startswith("127.0.0.1:")
        assert d.send(p.address, b"x")
        p.wait(BOUND_S)
        assert [e.frame for e in p.receive()] == [b"x"]
    finally:
        d.close()
        p.close()


def test_a_taken_port_is_a_config_error(pair):
    with pytest.raises(ConfigError, match="cannot bind"):
        ZmqSideChannel.bind("127.0.0.1", int(pair.address.rpartition(":")[2]))
