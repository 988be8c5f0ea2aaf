"""The end of an HTTP server answers whoever has connected before it, and waits for nobody who has nothing to say."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time

import pytest
from test_access import certificate, until

from pdjax.engine.bootstrap import connections
from pdjax.engine.bootstrap.httpd import Door, HttpThread, bind

__all__ = ["certificate"]
WAIT_S = 60.0
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Served:
    """An app that says "here", and its loop."""

    def __init__(self, door=None):
        self.loop = None
        self.http = HttpThread(self, bind("127.0.0.1", 0), "http", door=door)
        self.address = self.http._listener.getsockname()
        self.http.start()
        with self.connected(door) as stream:
            assert answered(stream)

    async def __call__(self, scope, receive, send):
        self.loop = asyncio.get_running_loop()
        headers = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"here"})

    def connected(self, door=None):
        stream = socket.create_connection(self.address, timeout=WAIT_S)
        return over_tls(stream, door) if door else stream

    @property
    def open(self):
        return self.http._server.server_state.connections

    @contextlib.contextmanager
    def blocked_at_its_end(self):
        """Whatever comes meanwhile is neither accepted nor read before the end begins."""
        blocked, go_on = threading.Event(), threading.Event()

        async def on_tick(counter):
            blocked.set()
            return go_on.wait(WAIT_S)

        self.http._server.on_tick = on_tick
        assert blocked.wait(WAIT_S)
        yield
        go_on.set()

    @contextlib.contextmanager
    def stopping(self):
        """Its end has begun: it has no listening socket any more."""
        end = threading.Thread(target=self.http.stop, args=(WAIT_S,))
        end.start()
        until(lambda: self.http._server.config.closing, "the end")
        try:
            yield
        finally:
            end.join(WAIT_S)
            assert not self.http.alive and self.http.error is None


def answered(stream):
    """Whether a request is answered, its end included."""
    stream.sendall(ASK)
    return rest(stream)


def rest(stream):
    got = b""
    while not got.endswith(b"here"):
        more = stream.recv(4096)
        if not more:
            return False
        got += more
    return True


def over_tls(stream, door):
    context = ssl.create_default_context(cafile=door.certfile)
    return context.wrap_socket(stream, server_hostname="127.0.0.1")


@pytest.mark.parametrize("n", [0, 20])
def test_n_in_the_listen_backlog_and_one_on_an_idle_connection_are_answered(n):
    served = Served()
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(served.connected())
        assert answered(idle)
        with served.blocked_at_its_end():
            streams = [idle, *(stack.enter_context(served.connected()) for _ in range(n))]
            for stream in streams:
                stream.sendall(ASK)
        with served.stopping():
            assert all(rest(stream) and stream.recv(1) == b"" for stream in streams)


def test_those_in_the_listen_backlog_of_a_tls_port_are_answered(certificate):
    door = Door(*certificate)
    served = Served(door)
    with contextlib.ExitStack() as stack:
        with served.blocked_at_its_end():
            plain, silent = (
                stack.enter_context(socket.create_connection(served.address, WAIT_S)) for _ in range(2)
            )
        with served.stopping(), over_tls(plain, door) as stream:
            assert answered(stream) and stream.recv(1) == b""
        assert silent.recv(1) == b"", "its handshake did not hold the end"


def test_a_handshake_that_ends_during_the_end_has_its_last_request(certificate, monkeypatch):
    monkeypatch.setattr(connections, "LAST_HEAD_S", WAIT_S)
    door = Door(*certificate)
    served = Served(door)
    other, plain = served.connected(door), socket.create_connection(served.address, WAIT_S)
    until(lambda: len(served.open) == 1 and len(served.http._listener._held) == 2, "both")
    with served.stopping():
        for connect in (lambda: over_tls(plain, door), lambda: other):
            with connect() as stream:
                assert answered(stream) and stream.recv(1) == b""


def test_who_has_connected_and_not_asked_yet_is_answered_and_that_is_his_last(monkeypatch):
    monkeypatch.setattr(connections, "LAST_HEAD_S", WAIT_S)
    served = Served()
    with served.connected() as stream:
        until(lambda: len(served.open) == 1, "the connection")
        stream.sendall(ASK[:10])
        with served.stopping():
            with pytest.raises(ConnectionRefusedError):
                served.connected()
            stream.sendall(ASK[10:])
            assert rest(stream) and stream.recv(1) == b""


def test_one_that_never_asks_and_one_that_has_been_answered_do_not_hold_the_end(monkeypatch):
    monkeypatch.setattr(connections, "LAST_HEAD_S", 0.2)
    served = Served()
    with served.connected() as silent, served.connected() as idle:
        assert answered(idle)
        began = time.monotonic()
        with served.stopping():
            assert idle.recv(1) == b"" and silent.recv(1) == b""
        assert time.monotonic() - began < 4.0, "uvicorn would have cut it off after 5 s"
