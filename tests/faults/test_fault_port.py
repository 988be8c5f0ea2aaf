"""The fault port around parts that do nothing: what a harness arms, what a reset takes back, and a harness that dies."""

from __future__ import annotations

import json
import socket
import time
from types import SimpleNamespace

import pytest

from pdjax.core.transitions import RECEIVER
from pdjax.engine.manager import Ports
from pdjax.faults.port import FaultPort
from pdjax.faults.work import Injected

BOUND_S = 30.0


def nothing(*args):
    return "done"


class FakeNode:
    """A D whose threads turn whenever they are woken. running: rooms that it decodes."""

    def __init__(self, port):
        cache = SimpleNamespace(available_pages=lambda: 8)
        channel = SimpleNamespace(address=None, wake=lambda: self.manager.turn())
        transport = SimpleNamespace(pull=nothing, offer=nothing)
        self.runner = SimpleNamespace(prefill=nothing, decode=nothing)
        self.manager = SimpleNamespace(
            role=RECEIVER, turn=nothing, ports=port.wrap(Ports(transport, channel, None, time.monotonic))
        )
        self.scheduler = SimpleNamespace(
            cache=cache,
            host_work=nothing,
            device_work=nothing,
            running=[],
            wake=lambda: self.scheduler.host_work(),
        )
        self.submit = nothing

    def decodes(self, *rooms):
        self.scheduler.running = [SimpleNamespace(req=SimpleNamespace(room=room)) for room in rooms]
        return self.runner.decode([])


@pytest.fixture
def port(tmp_path):
    port = FaultPort(str(tmp_path / "x.sock"), "d0", b"")
    yield port
    port.close()


@pytest.fixture
def node(port):
    node = FakeNode(port)
    port.attach(node)
    return node


def test_an_armed_error_is_raised_once_for_its_room(port, node):
    port._do_error("decode", 7)
    assert node.decodes(6) == "done"
    with pytest.raises(Injected, match="decode"):
        node.decodes(6, 7)
    assert node.decodes(6, 7) == "done"


def test_each_armed_error_is_raised_at_its_own_work(port, node):
    for where, room in (("decode", None), ("decode", None), ("prefill", None)):
        port._do_error(where, room)
    for _ in range(2):
        with pytest.raises(Injected, match="decode"):
            node.decodes(6)
    assert node.decodes(6) == "done"
    with pytest.raises(Injected, match="prefill"):
        node.runner.prefill(SimpleNamespace(tokens=()))


def test_no_number_of_armed_errors_is_too_deep_for_the_stack(port, node):
    for room in range(2000):
        port._do_error("decode", room)
    assert node.decodes() == "done"


def test_a_reset_takes_armed_errors_back(port, node):
    port._do_error("decode", 7)
    port._do_reset()
    assert node.decodes(7) == "done"
    port._do_error("decode", 7)
    with pytest.raises(Injected):
        node.decodes(7)


def connected(port):
    harness = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    harness.settimeout(BOUND_S)
    harness.connect(port._path)
    return harness


def test_a_harness_that_dies_holds_nothing_and_the_next_one_is_heard(port):
    """A killed harness leaves answers unread: then the kernel resets the connection, and reading it raises."""
    port.start()
    port.gate.hold(1)
    with connected(port) as harness:
        harness.sendall(b'{"id": 1, "do": "watch", "events": []}\n')
        assert harness.recv(1, socket.MSG_PEEK) == b"{"
    with connected(port) as harness:
        harness.sendall(b'{"id": 2, "do": "watch", "events": []}\n')
        assert json.loads(harness.recv(4096)) == {"id": 2, "result": None}
    assert not port.gate._holds, "the process would stand still until the limit"
