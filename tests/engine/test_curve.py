"""With a secret nobody who lacks it gets as far as a message: neither into P's memory nor into its driver's time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from functools import partial

import pytest
import zmq

from pdjax.core.settings import PDSettings
from pdjax.engine.bootstrap.reach import Reach
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.ports import FrameIn

BOUND_S = 30.0
SECRET, OTHER = b"s" * 64, b"o" * 64
LOOK_S = 1.0  # real time: who may talk is heard within some milliseconds
PARTS = 20_000


@pytest.fixture
def made():
    with contextlib.ExitStack() as left:

        def make(channel):
            left.callback(channel.close)
            return channel

        yield make


def p_with(made, secret):
    return made(ZmqSideChannel.bind("127.0.0.1", settings=PDSettings(), secret=secret))


def d_with(made, secret):
    return made(ZmqSideChannel.dealer(settings=PDSettings(), secret=secret))


def until(p, condition):
    """What P receives until then."""
    deadline, heard = time.monotonic() + BOUND_S, []
    while not condition(heard):
        assert time.monotonic() < deadline, (heard, p.counters)
        p.wait(0.02)
        heard += p.receive()
    return heard


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_who_has_the_secret_talks(made, secret):
    p, d = p_with(made, secret), d_with(made, secret)
    assert d.send(p.address, b"there")
    (heard,) = until(p, lambda heard: heard)
    assert heard.frame == b"there" and p.send(heard.address, b"back")
    assert until(d, lambda heard: heard) == [FrameIn(p.address, b"back")]
    assert p.counters.handshakes_refused == 0


@pytest.mark.parametrize(("of_p", "of_d"), [(SECRET, OTHER), (SECRET, b""), (b"", SECRET)])
def test_who_lacks_it_says_nothing(made, of_p, of_d):
    p, d = p_with(made, of_p), d_with(made, of_d)
    assert d.send(p.address, b"there")
    deadline = time.monotonic() + LOOK_S
    while time.monotonic() < deadline:
        p.wait(0.02)
        assert p.receive() == []
        assert d.receive() == [], "P lives: this is no refusal"
    assert p.counters.received == p.counters.dropped_malformed == 0


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_a_stranger_who_offers_no_key_is_closed_and_counted(made):
    """From the wire, since a stranger's own ZMQ may leave before P has noticed."""
    p = p_with(made, SECRET)
    host, port = p.address.split(":")
    with socket.create_connection((host, int(port)), timeout=BOUND_S) as stranger:
        stranger.sendall(GREETING)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
        until(p, lambda _: p.counters.handshakes_refused == 1)


def test_another_secret_is_counted_and_a_look_whether_p_is_there_is_none(made):
    """An operator finds a wrong secret by the counter, though each D looks beside each of its heartbeats."""
    p = p_with(made, SECRET)
    for looks in range(1, 4):
        assert asyncio.run(Reach(partial(asyncio.sleep, 0, [p.address])).look())
        until(p, lambda _, looks=looks: p.counters.handshakes_unfinished == looks)
    assert p.counters.handshakes_refused == 0
    d_with(made, OTHER).send(p.address, b"there")
    until(p, lambda _: p.counters.handshakes_refused)
    assert p.counters.handshakes_unfinished == 3


def test_without_a_secret_a_message_of_many_parts_is_read_to_its_end_and_dropped(made):
    p = p_with(made, b"")
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.connect(f"tcp://{p.address}")
        stranger.send_multipart([b""] * PARTS)
        assert until(p, lambda _: p.counters.dropped_malformed) == []
    finally:
        stranger.close(0)
        context.term()


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_what_passes_cannot_be_read_on_the_way(made, secret):
    p, d, seen = p_with(made, secret), d_with(made, secret), []
    host, port = p.address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def copy(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    seen.append(data)
                    target.sendall(data)

        def serve():
            one, _ = middle.accept()
            other = socket.create_connection((host, int(port)))
            with one, other:
                back = threading.Thread(target=copy, args=(other, one), daemon=True)
                back.start()
                copy(one, other)
                other.shutdown(socket.SHUT_RDWR)
                back.join()

        way = threading.Thread(target=serve, daemon=True)
        way.start()
        address = f"127.0.0.1:{middle.getsockname()[1]}"
        assert d.send(address, b"in the clear")
        until(p, lambda heard: heard)
        d.close()
        way.join(BOUND_S)
    assert (b"in the clear" in b"".join(seen)) == (not secret)
