"""The registry over HTTP, and the client that keeps an instance listed (RFC-2 §5.3; V5, V6)."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import httpx
import msgspec
import pytest

from pdjax.core.errors import ConfigError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import Fingerprint, KVArgs
from pdjax.engine.bootstrap import client as client_module
from pdjax.engine.bootstrap.client import HttpRegistryClient
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.bootstrap.server import MAX_BODY_BYTES, HTTPBootstrapServer
from pdjax.engine.ports import Entry

FP = Fingerprint(1, "m", "w", "float32", 16, 2, 1, 64, "paged", "1x1", 4 << 20, 1, "0.10.2")
OTHER = msgspec.structs.replace(FP, page_size=8)
WAIT_S = 30.0


def args(instance, fingerprint=FP, url="http://127.0.0.1:1"):
    return KVArgs(pools=[], page_size=16, fingerprint=fingerprint, instance_id=instance, serving_url=url)


def prefill(instance="p0", epoch=(1 << 64) - 1, **more):
    return registration(args(instance, **more), "prefill", epoch, zmq_addr="127.0.0.1:9")


def until(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        threading.Event().wait(0.01)


@pytest.fixture
def server():
    server = HTTPBootstrapServer(port=0, ttl_s=15)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=20) as http:
        yield http


class Lookups:
    """A sink that answers can be waited for."""

    def __init__(self):
        self.done, self._changed = [], threading.Condition()

    def __call__(self, answer):
        with self._changed:
            self.done.append(answer)
            self._changed.notify_all()

    def wait(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count, WAIT_S)
            return self.done[:count]


@pytest.fixture
def clients():
    made = []

    def make(host, port, **more):
        sink = Lookups()
        client = HttpRegistryClient(host, port, **more)
        client.start(sink)
        made.append(client)
        return client, sink

    yield make
    for client in made:
        client.close()


def test_register_list_route_heartbeat_remove(http):
    assert http.put("/route", json=prefill()).json()["status"] == "new"
    (seat,) = http.get("/list", params={"role": "prefill"}).json()["instances"]
    assert seat["epoch"] == "18446744073709551615" and seat["compatible"] and seat["page_size"] == 16
    assert http.get("/list", params={"role": "decode"}).json() == {"instances": []}
    query = {"role": "prefill", "instance_id": "p0", "tp_rank": 0, "cp_rank": 0, "dp_rank": 0, "pp_rank": 0}
    assert http.get("/route", params=query).json()["zmq_addr"] == "127.0.0.1:9"
    assert len(http.get("/route", params={"role": "prefill"}).json()["instances"]) == 1
    assert http.get("/route", params=query | {"tp_rank": 1}).status_code == 404
    assert http.get("/route", params=query | {"instance_id": "p9"}).status_code == 404
    beat = {"role": "prefill", "instance_id": "p0", "epoch": (1 << 64) - 1}
    assert http.post("/heartbeat", json=beat).status_code == 200
    assert http.post("/heartbeat", json=beat | {"epoch": 5}).status_code == 404
    assert http.request("DELETE", "/route", json=beat | {"epoch": 5}).status_code == 404
    assert http.get("/health").json()["instances"] == 1
    assert http.request("DELETE", "/route", json=beat).status_code == 200
    assert http.get("/health").json()["instances"] == 0


def test_an_older_life_gets_409(http):
    http.put("/route", json=prefill(epoch=9))
    answer = http.put("/route", json=prefill(epoch=8))
    assert answer.status_code == 409 and "newer life" in answer.json()["error"]["message"]


def test_a_registration_answers_how_many_peers_fit_and_why_others_do_not(http):
    http.put("/route", json=prefill())
    http.put("/route", json=prefill("p1", fingerprint=OTHER))
    peers = http.put("/route", json=registration(args("d0"), "decode", 3)).json()["peers"]
    assert peers == {"compatible": 1, "rejected": {"p1": "page_size: 8 there, 16 here"}}


@pytest.mark.parametrize("asker", [FP.hash, '{"hash":"h","fields":{"page_size":16}}'])
def test_list_judges_against_the_askers_fingerprint(http, asker):
    http.put("/route", json=prefill())
    http.put("/route", json=prefill("p1", fingerprint=OTHER))
    seats = http.get("/list", params={"role": "prefill", "fingerprint": asker}).json()["instances"]
    assert "page_size: 8 there, 16 here" in seats[1]["reason"]
    assert not seats[1]["compatible"]


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("PUT", "/route", b"{"),
        ("PUT", "/route", b"[]"),
        ("PUT", "/route", b'{"role":"prefill"}'),
        ("PUT", "/route", b"\xff\xfe"),
        ("PUT", "/route", b"[" * 60000),
        ("PUT", "/route", b'{"a":"' + b"x" * MAX_BODY_BYTES + b'"}'),
        ("POST", "/heartbeat", b'{"role":"prefill","instance_id":"p0","epoch":1.0}'),
        ("DELETE", "/route", b"{}"),
        ("GET", "/list", b""),
        ("GET", "/list?role=router", b""),
        ("GET", "/route?role=prefill&tp_rank=x", b""),
        ("GET", "/route?role=prefill&fingerprint={", b""),
        ("GET", "/route?role=prefill&fingerprint=" + quote('{"hash":' + "[" * 3000), b""),
    ],
)
def test_wrong_input_is_400_with_a_sentence(http, method, path, content):
    answer = http.request(method, path, content=content)
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"]) > 5


@pytest.mark.parametrize(
    "field",
    [
        b'"more":' + b"[" * 960 + b"]" * 960,
        b'"more":{"a":' + b"[" * 9 + b"]" * 9 + b"}",
        b'"serving_url":"http://["',
    ],
    ids=["deepest", "deep", "url"],
)
def test_a_registration_that_would_spoil_every_answer_is_refused(http, field):
    """One PUT once made each later GET /route a 500, and each look-up of every D unanswered."""
    good = msgspec.json.encode({**prefill(), "serving_url": None})
    answer = http.put("/route", content=good[:-1] + b"," + field + b"}")
    assert answer.status_code == 400, answer.text
    assert http.get("/route?role=prefill").json() == {"instances": []}


def test_poll_tells_before_serving_and_dead():
    server = HTTPBootstrapServer(port=0)
    assert server.poll() == KVPoll.Bootstrapping
    server.start()
    assert server.poll() == KVPoll.WaitingForInput
    server.stop()
    assert server.poll() == KVPoll.Failed


def test_a_taken_port_is_an_operator_error(server):
    with pytest.raises(ConfigError, match=f"{server.port}.*another port"):
        HTTPBootstrapServer(port=server.port)


def test_announce_lists_the_instance_and_close_takes_it_out(server, http, clients):
    client, _ = clients(*server.address, heartbeat_interval_s=0.05)
    client.announce(prefill())
    until(lambda: client.counters["heartbeat"] >= 2, "two heartbeats")
    assert client.membership.registered and client.membership.compatible == 0
    http.put("/route", json=registration(args("d0"), "decode", 3))
    until(lambda: client.membership.compatible == 1, "the new peer is seen with a heartbeat")
    client.close()
    assert http.get("/list", params={"role": "prefill"}).json()["instances"] == []


def test_announce_takes_a_fingerprint_object(server, http, clients):
    client, _ = clients(*server.address)
    client.announce(prefill() | {"fingerprint": FP, "epoch": 77})
    until(lambda: client.membership.registered, "registered")
    (seat,) = http.get("/list", params={"role": "prefill"}).json()["instances"]
    assert seat["epoch"] == "77" and seat["fingerprint"]["hash"] == FP.hash


def test_a_restarted_registry_gets_the_instance_again(clients):
    first = HTTPBootstrapServer(port=0)
    first.start()
    client, sink = clients(*first.address, heartbeat_interval_s=0.05, fingerprint=FP)
    client.announce(prefill())
    until(lambda: client.membership.registered, "registered")
    client.lookup(1, "127.0.0.1", None)
    sink.wait(1)
    first.stop()
    until(lambda: client.counters["registry_silent"] >= 1, "the client notices")

    # Serving goes on with known routes (protocol §8), also past the short cache.
    until(
        lambda: client._clock() - client._known[first.address].at > client_module.LOOKUP_CACHE_S,
        "cache is old",
    )
    client.lookup(2, "127.0.0.1", None)
    again = sink.wait(2)[1]
    assert again.error is None and [e.instance_id for e in again.entries] == ["p0"]
    assert client.counters["lookup_last_known"] == 1

    second = HTTPBootstrapServer(port=first.port)
    second.start()
    try:
        until(lambda: len(second.registry) == 1, "listed again (V6)")
        assert client.counters["refused_404"] == 1
    finally:
        client.close()
        second.stop()


def test_registry_that_starts_late_is_found(clients):
    placeholder = socket.create_server(("127.0.0.1", 0))
    port = placeholder.getsockname()[1]
    placeholder.close()
    client, sink = clients("127.0.0.1", port, heartbeat_interval_s=0.05)
    client.announce(prefill())
    client.lookup(1, "127.0.0.1", None)
    assert "does not answer" in sink.wait(1)[0].error
    until(lambda: client.membership.error is not None, "the failure is told")
    server = HTTPBootstrapServer(port=port)
    server.start()
    try:
        until(lambda: client.membership.registered, "registered once it is up")
    finally:
        client.close()
        server.stop()


def test_a_burst_of_lookups_is_one_request(server, http, clients):
    http.put("/route", json=prefill())
    http.put("/route", json=prefill("p1", fingerprint=OTHER))
    client, sink = clients(None, 1, fingerprint=FP, clock=lambda: 0.0)
    for tag in range(50):
        client.lookup(tag, *server.address)
    done = sink.wait(50)
    assert client.counters["lookup_sent"] == 1
    assert sorted(d.tag for d in done) == list(range(50))
    for answer in done:
        assert [(e.instance_id, e.epoch, e.zmq_addr) for e in answer.entries] == [
            ("p0", (1 << 64) - 1, "127.0.0.1:9")
        ]
        assert answer.rejected == {"p1": "page_size: 8 there, 16 here"}


def test_a_null_port_means_the_configured_one(server, http, clients):
    http.put("/route", json=prefill())
    client, sink = clients(None, server.port)
    client.lookup(1, server.host, None)
    assert len(sink.wait(1)[0].entries) == 1


def test_a_configured_registry_is_asked_and_the_injected_host_only_prefers(server, http, clients):
    http.put("/route", json=prefill("here", url="http://127.0.0.1:1"))
    http.put("/route", json=prefill("there", url="http://10.0.0.7:1"))
    client, sink = clients(*server.address)
    client.lookup(1, "10.0.0.7", 1)
    client.lookup(2, "localhost", 1)
    answers = {a.tag: [e.instance_id for e in a.entries] for a in sink.wait(2)}
    assert answers == {1: ["there"], 2: ["here", "there"]}


@pytest.mark.parametrize("host", ["no such host", "", "x" * 300, "http://[", "a\0b", "ä..ö"])
def test_a_hostile_host_is_an_error_for_its_own_lookup_only(server, http, clients, host):
    http.put("/route", json=prefill())
    client, sink = clients(None, 1)
    client.lookup(1, host, 1)
    client.lookup(2, *server.address)
    answers = {a.tag: a for a in sink.wait(2)}
    assert answers[1].error is not None and answers[2].error is None


def test_a_registry_that_never_answers_delays_no_other(server, http, clients):
    http.put("/route", json=prefill())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client, sink = clients(None, 1)
        client.lookup(1, *silent.getsockname())
        client.lookup(2, *server.address)
        first, second = sink.wait(2)
        assert (first.tag, second.tag) == (2, 1)
        assert second.error is not None


def test_a_seat_with_a_broken_serving_url_costs_no_look_up(clients):
    """A registry of another version may list what ours refuses."""
    client, sink = clients("127.0.0.1", 1)
    entries = tuple(
        Entry(name, 7, "127.0.0.1:9", url)
        for name, url in (("broken", "http://["), ("good", "http://10.0.0.7:1"))
    )
    client._answer(1, "10.0.0.7", client_module._Answer(entries, {}, None, 0.0))
    client._answer(2, "localhost", client_module._Answer(entries, {}, None, 0.0))
    answers = {a.tag: [e.instance_id for e in a.entries] for a in sink.wait(2)}
    assert answers == {1: ["good"], 2: ["broken", "good"]}


@pytest.mark.parametrize("host", ["no such host", "http://[", "ä..ö"])
def test_a_configured_host_that_is_none_is_told(clients, host):
    client, _ = clients(host, 1, heartbeat_interval_s=0.05)
    client.announce(prefill())
    until(lambda: client.counters["registry_silent"] >= 2, "it tries again")
    assert host in client.membership.error and not client.membership.registered


def test_a_registry_that_falls_silent_delays_one_look_up_and_not_each(monkeypatch):
    """A stopped machine answers nothing, not even a refusal: once each request waited for the whole call timeout."""
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 1.0)
    speaks, names = threading.Event(), ["old"]

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self):
            speaks.wait(WAIT_S)
            seat = {"epoch": "7", "zmq_addr": "127.0.0.1:9", "serving_url": "", "compatible": True}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode({"instances": [{**seat, "instance_id": n} for n in names]}))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as registry:
        threading.Thread(target=registry.serve_forever, args=(0.01,), daemon=True).start()
        client, seen = HttpRegistryClient(*registry.server_address), []
        client.start(
            lambda a: seen.append(([e.instance_id for e in a.entries], client.counters["lookup_failed"]))
        )
        monkeypatch.setattr(client_module, "LOOKUP_CACHE_S", 0.0)

        def ask():
            n = len(seen)
            client.lookup(n, "h", None)
            until(lambda: len(seen) > n, "an answer")
            return seen[n]

        speaks.set()
        assert ask() == (["old"], 0)
        speaks.clear()
        assert ask() == (["old"], 1), "the one that finds out waits"
        assert ask()[1] == 1, "the next one gets what was known before anything more has failed"
        names[:] = ["new"]
        speaks.set()
        until(lambda: ask()[0] == ["new"], "a registry that is back is believed")
        client.close()
        registry.shutdown()


def test_a_failing_sink_costs_only_itself(server, http):
    http.put("/route", json=prefill())
    seen, both = [], threading.Event()

    def sink(answer):
        seen.append(answer.tag)
        if len(seen) == 2:
            both.set()
        raise RuntimeError("bad sink")

    client = HttpRegistryClient(*server.address)
    client.start(sink)
    client.lookup(1, "h", None)
    client.lookup(2, "h", None)
    assert both.wait(WAIT_S)
    client.close()
    assert client.counters["sink_errors"] == 2


def test_nothing_is_promised_after_close(server):
    client = HttpRegistryClient(*server.address)
    client.start(lambda answer: None)
    client.close()
    client.lookup(1, "h", None)
    client.close()
    assert client.counters["after_close"] == 1


def test_announce_without_a_registry_says_what_to_do(clients):
    client, _ = clients(None, 1)
    with pytest.raises(ValueError, match="bootstrap host"):
        client.announce(prefill())


def test_a_replaced_life_says_so_and_does_not_fight_for_the_seat(server, http, clients):
    client, _ = clients(*server.address, heartbeat_interval_s=0.05)
    client.announce(prefill(epoch=7))
    until(lambda: client.membership.registered, "registered")
    http.put("/route", json=prefill(epoch=8))
    until(lambda: client.counters["refused_409"] >= 2, "it asks again and again")
    assert not client.membership.registered and "newer life" in client.membership.error
    assert server.registry.list("prefill", 0.0)[0].seat.epoch == 8


def test_a_proxy_of_the_environment_does_not_stand_between_instances(server, http, clients, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    http.put("/route", json=prefill())
    client, sink = clients(*server.address)
    client.lookup(1, "127.0.0.1", None)
    assert sink.wait(1)[0].error is None
