"""The side channel holds so many TCP connections and no more; whoever is connected goes on, and who comes later gets in later."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
import time

import pytest

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.engine.jax_transfer import channel as channel_module
from pdjax.engine.jax_transfer import connection_limit
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.ports import FrameIn, Refused

BOUND_S = 30.0
LIMIT = 4
STRANGERS = 300


class Port:
    """A P of that limit, its D's and strangers who only connect."""

    def __init__(self, max_connections: int = LIMIT) -> None:
        self._left = contextlib.ExitStack()
        settings = PDSettings(max_channel_connections=max_connections)
        self.p = self._keep(ZmqSideChannel.bind("127.0.0.1", settings=settings))
        self.where = ("127.0.0.1", int(self.p.address.rpartition(":")[2]))
        self.strangers: list[socket.socket] = []

    def _keep(self, channel: ZmqSideChannel) -> ZmqSideChannel:
        self._left.callback(channel.close)
        return channel

    def d(self) -> ZmqSideChannel:
        return self._keep(ZmqSideChannel.dealer(settings=PDSettings()))

    def strange(self, n: int) -> None:
        for _ in range(n):
            self.strangers.append(
                self._left.enter_context(socket.create_connection(self.where, timeout=BOUND_S))
            )

    def talks(self, d: ZmqSideChannel, turns: int = 10) -> None:
        """So many frames there and back in a row while nobody is cut. What d sends into a cut connection is lost, as any
        frame may be (protocol §3), so it is sent again; a refusal told to d is an error."""
        deadline = time.monotonic() + BOUND_S
        answered, refused, sent_at = 0, self.p.counters.connections_refused, 0.0
        while answered < turns:
            now = time.monotonic()
            assert now < deadline, (answered, self.p.counters, d.counters)
            if self.p.counters.connections_refused != refused:
                answered, refused = 0, self.p.counters.connections_refused
            if now > sent_at + 0.2:
                d.send(self.p.address, b"there")
                sent_at = now
            self.p.wait(0.01)
            for event in self.p.receive():
                self.p.send(event.address, b"back")
            for event in d.receive():
                assert isinstance(event, FrameIn), event
                answered, sent_at = answered + 1, 0.0

    def refused(self, n: int) -> None:
        deadline = time.monotonic() + BOUND_S
        while self.p.counters.connections_refused < n:
            assert time.monotonic() < deadline, self.p.counters
            self.p.wait(0.01)

    def close(self) -> None:
        self._left.close()


@pytest.fixture
def port(monkeypatch):
    """Its strangers are not closed for saying nothing."""
    monkeypatch.setattr(channel_module, "HANDSHAKE_MS", 1000 * int(10 * BOUND_S))
    port = Port()
    yield port
    port.close()


def is_cut(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(4096):  # ZMQ greets before it is told
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_strangers_beyond_the_limit_are_cut_and_counted_and_who_is_connected_goes_on(port, caplog):
    old = port.d()
    port.talks(old)
    before = open_files()
    with caplog.at_level(logging.WARNING, connection_limit.__name__):
        port.strange(STRANGERS)
        port.refused(STRANGERS - (LIMIT - 1))
        port.talks(old)
    for stranger in port.strangers[LIMIT - 1 :]:
        assert is_cut(stranger)
    assert port.p.counters.connections_refused == STRANGERS - (LIMIT - 1)
    # Each stranger's own end is open in this process, too.
    deadline = time.monotonic() + BOUND_S
    while open_files() > before + STRANGERS + LIMIT - 1:
        assert time.monotonic() < deadline, (open_files(), before)
        port.p.wait(0.01)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line, however many are cut"
    assert "--disaggregation-max-connections" in caplog.text


def test_a_peer_that_comes_to_a_full_port_gets_in_when_others_have_left(port):
    port.strange(LIMIT)
    new = port.d()
    assert new.send(port.p.address, b"not now")
    port.refused(1)
    assert not any(isinstance(event, Refused) for event in new.receive()), "P lives"
    for stranger in port.strangers:
        stranger.close()
    port.talks(new)
    assert new.counters.refused == 0


def test_strangers_who_say_nothing_leave_by_themselves(monkeypatch):
    monkeypatch.setattr(channel_module, "HANDSHAKE_MS", 200)
    port = Port()
    try:
        port.strange(LIMIT)
        port.talks(port.d())
    finally:
        port.close()


def test_a_number_that_has_become_another_files_is_left_alone(port):
    """A connection can end, and its descriptor be given to another file, before the thread reads that it came."""
    limit = port.p._limit
    one, other = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    read, write = os.pipe()
    before = open_files()
    with one, other, listener, client, server:
        for number in (one.fileno(), listener.fileno(), server.fileno(), client.fileno(), read):
            limit._refuse(number)
        assert open_files() == before
        os.close(read)
        limit._refuse(read)
        os.close(write)
        for a, b in ((one, other), (client, server)):
            a.sendall(b"x")
            b.sendall(b"y")
            assert (a.recv(1), b.recv(1)) == (b"y", b"x")
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()


@contextlib.contextmanager
def no_descriptor_left():
    """This process may open nothing more meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
    taken: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_is_beyond_the_limit_is_cut_also_when_no_descriptor_is_left(port):
    port.strange(1)
    limit = port.p._limit
    deadline = time.monotonic() + BOUND_S
    while not limit._held:
        assert time.monotonic() < deadline
        port.p.wait(0.01)
    with no_descriptor_left():
        limit._refuse(*limit._held)
    assert is_cut(port.strangers[0])


def test_a_process_that_may_open_few_files_holds_fewer_connections_and_says_so(monkeypatch, caplog):
    """Else the limit would never be reached, and strangers who say nothing take every descriptor."""
    monkeypatch.setattr(channel_module, "HANDSHAKE_MS", 1000 * int(10 * BOUND_S))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (100, 4096))
    share = 34  # half of 100 less the 32 that are spare
    with caplog.at_level(logging.WARNING, connection_limit.__name__):
        port = Port(max_connections=1024)
    try:
        assert f"at most {share} connections" in caplog.text and "ulimit -n" in caplog.text
        port.strange(share + 5)
        port.refused(5)
        assert is_cut(port.strangers[-1]) and port.p.counters.connections_refused == 5
    finally:
        port.close()
    caplog.clear()
    monkeypatch.undo()
    Port().close()
    assert not caplog.records


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "side-channel-connections"]


def test_no_thread_is_left(port):
    port.strange(STRANGERS)
    assert threads()
    with pytest.raises(ConfigError, match="cannot bind"):
        ZmqSideChannel.bind(*port.where)
    port.close()
    assert threads() == []
