"""Requests made from both OpenAPI pages, right and wrong ones, and raw bytes: never a 5xx, never an answer that does not come."""

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path

import httpx
import pytest
import schemathesis
from fuzzing import keeps_nothing, tries
from hypothesis import given
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.bootstrap.server import HTTPBootstrapServer
from pdjax.engine.bootstrap.server import build_app as registry_app
from pdjax.serve.app import build_app
from pdjax.serve.limits import HttpLimits

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from serve_fakes import FakeEngine, text_outputs
from served import Served

WAIT_S = 30.0
POOLS = ("asyncio_", "AnyIO worker thread")


@pytest.fixture(scope="module")
def server():
    few = HttpLimits(max_batch=8, max_n=4)  # the scripted engine has a thread for each output
    with contextlib.closing(Served(few, script=lambda request: text_outputs("hello"))) as served:
        yield served


@pytest.fixture(scope="module")
def registry():
    started = HTTPBootstrapServer(port=0)
    started.start()
    yield started
    started.stop()


def send(url, sent):
    """All that is answered until the server ends the connection."""
    where = httpx.URL(url)
    told = b""
    with socket.create_connection((where.host, where.port), timeout=WAIT_S) as stream:
        with contextlib.suppress(OSError):
            stream.sendall(sent)
            stream.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while piece := stream.recv(65536):
                told += piece
    return told


@pytest.fixture(scope="module")
def before(server, registry):
    """What the process holds once both have answered on a connection that is kept."""
    with httpx.Client(trust_env=False, timeout=WAIT_S) as http:
        well(http, server, registry)
        yield http, held()


def held():
    """Open files (a connection is one at each end) and threads, but for those of pools, which grow to a fixed number."""
    names = [thread.name for thread in threading.enumerate()]
    pooled = [name for name in names if name.startswith(POOLS)]
    return len(os.listdir("/proc/self/fd")), sorted(set(names) - set(pooled))


def well(http, server, registry):
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
    assert http.post(f"{server.url}/generate", json=body).json()["text"] == "hello"
    assert http.get(f"{registry.url}/health").status_code == 200


def page_of(app, *but):
    page = app.openapi()
    for path in but:
        del page["paths"][path]
    return schemathesis.openapi.from_dict(page)


ENGINE = FakeEngine()
# /drain answers once and then everything is 503 by right; /health_generate takes no input.
SERVING = page_of(build_app(ENGINE), "/drain", "/health_generate")
ENGINE.close()
REGISTRY = page_of(registry_app(Registry(15.0)))


@SERVING.parametrize()
@tries(3)
def test_the_serving_api_answers_everything_that_its_page_can_make(case, before, server):
    answer = case.call(base_url=server.url, timeout=WAIT_S)
    case.validate_response(answer, checks=[not_a_server_error])


@REGISTRY.parametrize()
@tries(6)
def test_the_registry_answers_everything_that_its_page_can_make(case, before, registry):
    answer = case.call(base_url=registry.url, timeout=WAIT_S)
    case.validate_response(answer, checks=[not_a_server_error])
    assert len(registry.registry) <= registry.registry.max_entries


def test_the_pages_know_every_endpoint(server):
    for app, page in ((server.app, SERVING), (registry_app(Registry(15.0)), REGISTRY)):
        told = {operation.ok().path for operation in page.get_all_operations()}
        served = {route.path for route in app.routes if hasattr(route, "methods")}
        assert told >= served - {"/drain", "/health_generate", "/openapi.json"}


# ---------------------------------------------------------------- raw bytes

HEAD = st.sampled_from(
    [
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n",
        b"PUT /route HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n",
    ]
)
PIECE = st.sampled_from(
    [b"{", b"}", b"[", b'"', b":", b",", b"\\ud800", b"1e999", b"-0", b"nan", b"null", b'"text"', b'"input_ids"',
     b'"sampling_params"', b"9" * 400, b"[" * 2000, b"\xff", b"\0", b"\xef\xbb\xbf", b'"role"', b'"prefill"', b'"epoch"']
)  # fmt: skip
BODY = st.one_of(st.binary(max_size=200), st.lists(PIECE, max_size=12).map(b"".join))


@given(head=HEAD, body=BODY, lie=st.integers(-3, 3), noise=st.one_of(st.just(b""), st.binary(max_size=80)))
@tries(50)
def test_raw_bytes_at_both_ports(before, server, registry, caplog, head, body, lie, noise):
    """The stated length may be wrong and the head broken: an answer of ours or an end, others are served, the log is silent."""
    sent = noise + head % max(len(body) + lie, 0) + body
    for url in (server.url, registry.url):
        told = send(url, sent)
        assert b"HTTP/1.1 5" not in told, (sent, told)
    assert caplog.text == ""


def test_after_all_that_both_serve_and_nothing_is_left(before, server, registry):
    http, was = before
    server.engine.wait(lambda: server.desk.live() == 0)
    while held() != was:  # what is closed is closed a moment later; or the test's own time limit
        well(http, server, registry)


ROUND = [
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n" + b"[" * 9,
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n" + b'{"text": "x"}',
    b"PUT /route HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffff\r\n{",
    b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 2000 + b"\r\n\r\n",
    b"\0\xff" * 50,
]


def test_the_same_bytes_again_keep_nothing(before, server, registry):
    """Of 200 connections, so one kB of each that is kept would be seen."""

    def bombard():
        for sent in ROUND:
            for url in (server.url, registry.url):
                send(url, sent)
        server.engine.requests.clear()  # the test's own records
        server.log_text.truncate(0)

    keeps_nothing(lambda _: bombard(), [None] * 5, times=4, kept_bytes=200 << 10)
