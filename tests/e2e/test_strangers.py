"""Strangers at every port but the transport's, while requests are served: what they send is refused and counted, and nothing else.

What reaches the transport's ports, and what that can do, is on docs/security.md: they have no authentication to test.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import socket
import threading
import time

import httpx
import pytest
import zmq
from fleets import REGISTRY_KEY, SECRET, WAIT_S
from shims import until

from pdjax.core import wire
from pdjax.core.settings import PDSettings
from pdjax.engine.jax_transfer import curve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GOOD = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
}
REQUESTS = 12
RAW = [
    b"",
    b"\0" * 64,
    os.urandom(4096),
    b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\0" * 54,  # a ZMTP greeting and no more
    b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"PUT /route HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n{[}",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * (64 << 10) + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64),  # the begin of a TLS handshake
]
KEY = hashlib.blake2b(SECRET).digest()
LIMIT = PDSettings().max_frame_bytes


def frames(p_epoch):
    """Frames with no MAC or another's, and old ones of D's. Who sends them has come past the handshake (``curve``)."""
    hello = wire.Hello(room=1, attempt=1, ack_epoch=0, fingerprint="f", digest="d")
    abort = wire.Abort(room=2, attempt=1, uuid=0, quiet=True, reason="client", digest="d")

    def frame(*messages, echo_us=0, echo_epoch=0, instance="decode-0"):
        return wire.Frame(instance, (1 << 63) - 1, 5, echo_us, echo_epoch, 0, messages)

    whole = wire.encode(frame(hello, abort), KEY)
    yield from ((wire.encode(frame(hello, abort), other), "checksum") for other in (b"", b"another"))
    yield whole[: len(whole) // 2], "checksum"
    yield whole[:10], "not_ours"
    yield whole[:4] + b"\xff" + whole[5:], "version"
    yield os.urandom(200), "not_ours"
    # Recorded and sent again: no echo of this life of P, or one that is older than any message may be.
    yield whole, "no_echo"
    yield wire.encode(frame(hello, echo_us=1, echo_epoch=p_epoch), KEY), "too_old"


class Strangers(threading.Thread):
    """Send everything, again and again, until ``leave``. It keeps no answer and no connection."""

    def __init__(self, ports, side_channel, p_epoch):
        super().__init__(daemon=True)
        self._ports, self._side_channel, self._epoch = ports, side_channel, p_epoch
        self._leaving = threading.Event()
        self.rounds, self.error = 0, None

    def run(self):
        context = zmq.Context()
        insider, *outsiders = (self._dealer(context, secret) for secret in (KEY, b"", b"another" + KEY))
        try:
            while not self._leaving.is_set():
                self._one_round(insider)
                for outsider in outsiders:
                    with contextlib.suppress(zmq.Again):  # nobody takes it, so its queue fills up
                        outsider.send_multipart([b""] * 1000, zmq.NOBLOCK)
                self.rounds += 1
        except Exception as error:
            self.error = error
        finally:
            for dealer in (insider, *outsiders):
                dealer.close()
            context.term()

    def _dealer(self, context, secret):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, b"stranger")
        curve.knock(dealer, secret)
        dealer.connect(f"tcp://{self._side_channel}")
        return dealer

    def _one_round(self, dealer):
        for where in self._ports:
            host, _, port = where.rpartition(":")
            for blob in RAW:
                # It may be closed before everything is sent.
                with socket.create_connection((host, int(port)), WAIT_S) as to, contextlib.suppress(OSError):
                    to.sendall(blob)
        for frame, _ in frames(self._epoch):
            dealer.send(frame, zmq.NOBLOCK)
        dealer.send_multipart([b"two", b"parts"], zmq.NOBLOCK)
        dealer.send(b"x" * (LIMIT + 1), zmq.NOBLOCK)
        self._leaving.wait(0.2)

    def leave(self):
        self._leaving.set()
        self.join(WAIT_S)
        assert not self.is_alive() and self.error is None, self.error


def counters(fleet):
    state = fleet.state("prefill-0")
    registry = fleet.http.get(f"{fleet.url('bootstrap')}/health").json()["counters"]
    return {**state["counters"], **state["channel"], "unauthorized": registry.get("unauthorized", 0)}


def expected(p_epoch):
    for _, why in frames(p_epoch):
        yield why if why in ("no_echo", "too_old") else f"bad_frame_{why}"
    yield from ("dropped_malformed", "dropped_too_long", "unauthorized")
    yield from ("handshakes_refused", "handshakes_unfinished")


def ask(fleet, i):
    body = {
        **GOOD,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": fleet.bootstrap_port,
        "bootstrap_room": 70_000 + i,
    }
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        p, d = pool.map(lambda node: fleet.post(node, "/generate", body), ("prefill-0", "decode-0"))
    assert (p.status_code, d.status_code) == (200, 200), (p.text, d.text)
    return d.json()["output_ids"]


def test_all_ports_are_attacked_and_requests_are_served_meanwhile(fleet):
    registry = fleet.url("bootstrap")
    seats = fleet.http.get(f"{registry}/list?role=prefill", headers=REGISTRY_KEY).json()["instances"]
    (seat,) = [one for one in seats if one["instance_id"] == "prefill-0"]
    epoch, side_channel = int(seat["epoch"]), seat["zmq_addr"]
    alone, before = ask(fleet, 0), counters(fleet)
    ports = [url.removeprefix("http://") for url in (fleet.url("prefill-0"), fleet.url("decode-0"), registry)]
    strangers = Strangers([*ports, side_channel], side_channel, epoch)
    strangers.start()
    try:
        for i in range(1, REQUESTS):
            assert ask(fleet, i) == alone
            forged = {**seat, "epoch": str(epoch + 1), "zmq_addr": "127.0.0.1:9"}
            assert fleet.http.put(f"{registry}/route", json=forged).status_code == 401
        assert until(lambda: strangers.rounds >= 2, WAIT_S)
    finally:
        strangers.leave()
    assert until(
        lambda: all(counters(fleet).get(why, 0) > before.get(why, 0) for why in expected(epoch)), WAIT_S
    )
    assert ask(fleet, REQUESTS) == alone
    listed = fleet.http.get(f"{registry}/list?role=prefill", headers=REGISTRY_KEY).json()["instances"]
    assert {one["instance_id"]: one["epoch"] for one in listed}["prefill-0"] == str(epoch)


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_connections_that_say_nothing_cost_nobody_anything(fleet):
    """Held at once on an HTTP port and on the side channel; afterwards every file is closed again."""
    process = fleet.child("prefill-0").process.pid
    seats = fleet.http.get(f"{fleet.url('bootstrap')}/list?role=prefill", headers=REGISTRY_KEY).json()[
        "instances"
    ]
    side_channel = next(one["zmq_addr"] for one in seats if one["instance_id"] == "prefill-0")
    ask(fleet, 100)
    before = open_files(process)
    with contextlib.ExitStack() as held:
        for where in (fleet.url("prefill-0").removeprefix("http://"), side_channel):
            host, _, port = where.rpartition(":")
            for _ in range(100):
                held.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
        assert until(lambda: open_files(process) > before + 100, WAIT_S)
        began = time.monotonic()
        ask(fleet, 101)
        assert httpx.get(f"{fleet.url('prefill-0')}/health", trust_env=False).status_code == 200
        assert time.monotonic() - began < WAIT_S
    assert until(lambda: open_files(process) < before + 20, WAIT_S)
