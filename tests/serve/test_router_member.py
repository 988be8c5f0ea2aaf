"""Self-registration with the real rust router (facts/router §5), and with a scripted one for what that never shows."""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from pdjax.engine.bootstrap.httpd import HttpThread, bind
from pdjax.serve.children import Child, end_all
from pdjax.serve.log import ServerLog
from pdjax.serve.router import free_ports, router_command, router_environ
from pdjax.serve.router_member import RouterMember

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from stranger import Stranger, answer

WAIT_S = 60.0
SOON_S = 0.1


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    return found


@contextlib.contextmanager
def member(routers, url, role, ready=lambda: True, key="", bootstrap_port=9333, log=None):
    one = RouterMember(
        routers,
        url=url,
        role=role,
        bootstrap_port=bootstrap_port,
        ready=ready,
        log=log or ServerLog(level="error"),
        interval_s=SOON_S,
        key=key,
    )
    one.start()
    try:
        yield one
    finally:
        one.leave()


# ---------------------------------------------------------------- the rust router


@contextlib.contextmanager
def rust(port, metrics, *options):
    command = [*router_command("rust", "127.0.0.1", port, metrics, [], []), *options]
    child = Child("router", command, router_environ("127.0.0.1", dict(os.environ)), lambda line: None)
    try:
        yield child
    finally:
        end_all([child])


def workers(port, key=""):
    """url → (type, bootstrap port) of the workers that the router lists."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(trust_env=False, timeout=10, headers=headers) as http:
            listed = http.get(f"http://127.0.0.1:{port}/workers").json()["workers"]
    except httpx.HTTPError:
        return None
    return {w["url"]: (w["worker_type"], w.get("bootstrap_port")) for w in listed}


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_p_and_d_enter_a_router_that_starts_later_and_again_one_that_was_restarted(serve):
    p, d = serve("prefill"), serve("decode")
    port, metrics = free_ports("127.0.0.1", 2)
    router = f"http://127.0.0.1:{port}"
    wanted = {p.url: ("prefill", 9333), d.url: ("decode", None)}
    with member([router], p.url, "prefill") as of_p, member([router + "/"], d.url, "decode"):
        until(lambda: of_p.errors)
        with rust(port, metrics):
            until(lambda: workers(port) == wanted)
            until(lambda: not of_p.errors)
            body = {"text": "x", "sampling_params": {"max_new_tokens": 8}}
            with httpx.Client(trust_env=False, timeout=30) as http:
                until(lambda: http.post(f"{router}/generate", json=body).status_code == 200)
            assert p.engine.requests[-1].bootstrap_port == 9333
            assert d.engine.requests[-1].room == p.engine.requests[-1].room
            assert of_p.counters["router_registered"] == 1, "one post is enough"
        with rust(port, metrics):
            until(lambda: workers(port) == wanted)
            of_p.leave()
            until(lambda: workers(port) == {d.url: wanted[d.url]})
            assert of_p.counters["router_removed"] == 1


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_router_with_a_key_wants_it(serve):
    server = serve("prefill")
    port, metrics = free_ports("127.0.0.1", 2)
    router = f"http://127.0.0.1:{port}"
    with rust(port, metrics, "--api-key", "k1"):
        until(lambda: workers(port, "k1") == {})
        with member([router], server.url, "prefill") as without:
            until(lambda: "401" in without.errors.get(router, ""))
        with member([router], server.url, "prefill", key="k1"):
            until(lambda: workers(port, "k1") == {server.url: ("prefill", 9333)})
        until(lambda: workers(port, "k1") == {})


# ---------------------------------------------------------------- a scripted one


class Scripted:
    """/workers as the router has it, with its calls kept."""

    def __init__(self, listed=()):
        self.listed, self.calls, self.body = list(listed), [], None
        app = FastAPI()

        @app.get("/workers")
        async def get():
            return JSONResponse({"workers": self.listed} if self.body is None else self.body)

        @app.post("/workers")
        async def post(request: Request):
            worker = await request.json()
            self.calls.append(("POST", worker))
            self.listed.append({"id": f"w{len(self.calls)}", **worker})
            return JSONResponse({"status": "accepted"}, status_code=202)

        @app.delete("/workers/{name}")
        async def delete(name: str):
            self.calls.append(("DELETE", name))
            self.listed = [w for w in self.listed if w["id"] != name]
            return JSONResponse({"status": "accepted"}, status_code=202)

        self._http = HttpThread(app, bind("127.0.0.1", 0), "scripted-router")
        self._http.start()
        self.url = self._http.url

    def close(self):
        self._http.stop()


@pytest.fixture
def scripted():
    made = []

    def make(*listed):
        made.append(Scripted(listed))
        return made[-1]

    yield make
    for one in made:
        one.close()


URL = "http://10.0.0.2:30000"


def test_nothing_is_posted_before_the_server_is_ready(scripted):
    router, ready = scripted(), threading.Event()
    with member([router.url], URL, "decode", ready=ready.is_set) as one:
        assert not one.errors
        assert router.calls == []
        ready.set()
        until(lambda: router.calls)
    assert router.calls == [("POST", {"url": URL, "worker_type": "decode"}), ("DELETE", "w1")]


def test_a_server_that_never_was_ready_has_nothing_to_take_back(scripted):
    router = scripted({"id": "other", "url": URL, "worker_type": "decode"})
    with member([router.url], URL, "decode", ready=lambda: False):
        pass
    assert router.calls == []


def test_what_an_earlier_life_on_this_address_was_is_corrected(scripted):
    old = {"id": "old", "url": URL, "worker_type": "prefill", "bootstrap_port": 1}
    other = {"id": "other", "url": URL + "1", "worker_type": "prefill", "bootstrap_port": 1}
    router = scripted(old, other)
    with member([router.url], URL, "prefill"):
        until(lambda: len(router.calls) == 2)
        assert [kind for kind, _ in router.calls] == ["DELETE", "POST"]
        assert router.listed[0] == other
    assert router.listed == [other]


def test_an_outage_is_one_line_of_the_log_and_costs_nothing_else(scripted, capsys):
    router = scripted()
    router.body = {"nothing": "here"}
    with member([router.url], URL, "prefill", log=ServerLog()) as one:
        until(lambda: one.counters["router_unreachable"] >= 3)
        router.body = None
        until(lambda: not one.errors)
    lines = capsys.readouterr().err.splitlines()
    assert [("unreachable" in line, "no sglang router" in line) for line in lines] == [
        (True, True),
        (False, False),
    ]


def test_several_routers_are_kept_each_for_itself(scripted):
    router = scripted()
    (gone,) = free_ports("127.0.0.1", 1)
    with member([f"http://127.0.0.1:{gone}", router.url], URL, "prefill") as one:
        until(lambda: router.calls)
        assert list(one.errors) == [f"http://127.0.0.1:{gone}"]
    assert one.counters["router_leave_unheard"] == 1


@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"workers":' + b"[" * 200_000, b"\xff", b'{"workers":Infinity}', b"[]"],
    ids=["deep", "deep in a field", "no text", "infinite", "a list"],
)
def test_no_answer_ends_the_thread(body):
    """It died, and nobody was told that the server was in no list any more."""
    stranger = Stranger()
    try:
        stranger.reply = answer(body)
        with member([stranger.url], URL, "prefill") as one:
            until(lambda: one.counters["router_unreachable"] >= 2)
            assert all(thread.is_alive() for thread in one._threads)
            stranger.reply = answer(b'{"workers":[]}')
            until(lambda: one.counters["router_registered"] >= 1 and not one.errors)
    finally:
        stranger.close()


def test_a_thread_that_dies_says_so(scripted, monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(RouterMember, "_be_listed", lambda *_: 1 / 0)
    router = scripted()
    with member([router.url], URL, "prefill", log=ServerLog()) as one:
        until(lambda: router.url in one.errors)
        assert "ZeroDivisionError" in one.errors[router.url]
    assert "thread has died" in capsys.readouterr().err


def test_a_router_that_is_given_twice_is_one(scripted):
    router = scripted()
    with member([router.url, router.url + "/"], URL, "prefill") as one:
        assert len(one._threads) == 1
        until(lambda: router.calls)
