"""The bound of an HTTP port where connections begin: silent ones, with and without TLS, and a process short of descriptors."""

import contextlib
import errno
import os
import socket
import ssl
import subprocess
import sys

import httpx
import pytest
from test_access import answers, certificate, start, until

from pdjax.engine.bootstrap import listener
from pdjax.engine.bootstrap.httpd import Door
from pdjax.engine.descriptors import SPARE_DESCRIPTORS
from pdjax.serve.ready import parse_ready

__all__ = ["certificate", "start"]


def silent(server, n):
    """n connections that say nothing, in a context that closes them."""
    stack = contextlib.ExitStack()
    for _ in range(n):
        stack.enter_context(socket.create_connection(server.address, timeout=30))
    return stack


def over_tls(url, trusted):
    with httpx.Client(verify=ssl.create_default_context(cafile=trusted), trust_env=False, timeout=60) as http:
        return http.get(url + "/health").status_code


def test_silent_connections_of_a_tls_port_are_bounded_and_their_handshake_has_a_time(start, certificate):
    server = start(door=Door(*certificate, max_connections=3, head_timeout_s=5.0))
    counters = server.registry.counters
    with silent(server, 10):
        until(lambda: counters["connections_refused"] == 7, "the refusal of what is beyond the limit")
        assert not counters["slow_heads"]
        until(lambda: counters["slow_heads"] == 3, "the end of the patience with the others")
        until(lambda: not server._http._listener._held, "their descriptors")
        assert over_tls(server.url, certificate[0]) == 200
    assert (counters["connections_refused"], counters["slow_heads"]) == (7, 3)


def test_a_handshake_that_is_over_is_not_timed_any_more(start, certificate):
    server = start(door=Door(*certificate, head_timeout_s=0.5))
    context = ssl.create_default_context(cafile=certificate[0])
    with (
        socket.create_connection(server.address, timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as stream,
    ):
        for _ in range(2):
            stream.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert stream.recv(12) == b"HTTP/1.1 200"
            while not stream.recv(65536).endswith(b"}"):
                pass
            with silent(server, 1):  # its patience ends after that of this connection would have
                slow = server.registry.counters["slow_heads"]
                until(lambda slow=slow: server.registry.counters["slow_heads"] > slow, "the patience")


def test_the_limit_of_a_plain_port_is_exact_at_once(start):
    server = start(door=Door(max_connections=2))
    with silent(server, 2):
        until(lambda: len(server._http._listener._held) == 2, "both")
        assert answers(server) == 503
    until(lambda: not server._http._listener._held, "their end")
    assert answers(server) == 200


def test_a_process_short_of_descriptors_refuses_and_keeps_its_last(start, monkeypatch):
    server = start()
    monkeypatch.setattr(listener, "usable_descriptors", lambda: 0)
    assert answers(server) == 503
    monkeypatch.undo()
    assert answers(server) == 200


def test_without_any_descriptor_a_newcomer_is_refused_with_the_one_kept_for_it(start, monkeypatch):
    server = start()
    accept, short = socket.socket.accept, [errno.EMFILE, 0]

    def accept_short_of_descriptors(sock):
        if short and (number := short.pop(0)):
            raise OSError(number, os.strerror(number))
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", accept_short_of_descriptors)
    with socket.create_connection(server.address, timeout=30) as stream:
        assert stream.recv(12) == b"HTTP/1.1 503"
    assert server.registry.counters["connections_refused"] == 1
    assert answers(server) == 200


def test_when_even_that_one_is_taken_a_newcomer_waits_and_nothing_is_logged(start, monkeypatch, caplog):
    """ZMQ takes numbers in the same process: asyncio would log a traceback and not accept for a second."""
    server = start()
    accept, short, spares = socket.socket.accept, [errno.EMFILE] * 6, []

    def accept_short_of_descriptors(sock):
        if short:
            raise OSError(short.pop(), "none left")
        return accept(sock)

    def none_at_first():
        spares.append(None if len(spares) < 2 else socket.socket())
        return spares[-1]

    monkeypatch.setattr(listener, "_spare", none_at_first)
    monkeypatch.setattr(socket.socket, "accept", accept_short_of_descriptors)
    assert answers(server) == 200
    assert short == [] and len(spares) == 3 and caplog.text == ""
    spares[-1].close()


@pytest.mark.e2e
@pytest.mark.parametrize("tls", [False, True])
def test_a_flood_never_takes_the_last_descriptors_of_a_registry(certificate, tls):
    few = 100
    # Not by preexec_fn: the tests' own process may have JAX in it, which warns of a fork.
    argv = ["sh", "-c", f'ulimit -n {few}; exec "$@"', "_"]
    argv += [sys.executable, "-m", "pdjax.serve.cli", "bootstrap", "--port", "0"]
    argv += ["--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1]] if tls else []
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = parse_ready(process.stdout.readline())["url"]
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with contextlib.ExitStack() as flood:
            for _ in range(3 * few):
                flood.enter_context(socket.create_connection(address, timeout=60))
            with socket.create_connection(address, timeout=60) as late:
                if tls:
                    with contextlib.suppress(ConnectionResetError):
                        assert late.recv(1) == b""
                else:
                    assert late.recv(12) == b"HTTP/1.1 503"
            taken = len(os.listdir(f"/proc/{process.pid}/fd"))
            assert taken <= few - SPARE_DESCRIPTORS + 1
        until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) < few // 2, "their descriptors")
        if tls:
            assert over_tls(url, certificate[0]) == 200
        else:
            assert httpx.get(url + "/health", trust_env=False, timeout=60).status_code == 200
    finally:
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert said == "" and process.returncode == 0
