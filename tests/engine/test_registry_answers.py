"""What a registry answers is somebody else's text: whatever it is, look-ups end, heartbeats go on, and memory stays small (S11, S12, V6)."""

import asyncio
import time

import msgspec
import pytest
from stranger import Stranger, answer
from test_bootstrap_http import FP, clients, http, prefill, server, until

from pdjax.engine.bootstrap import asking
from pdjax.engine.bootstrap import client as client_module
from pdjax.engine.bootstrap.asking import MAX_ANSWER_BYTES, NoAnswer
from pdjax.engine.bootstrap.registry_answers import listing

__all__ = ["clients", "http", "server"]
LISTED = answer(b'{"instances":[]}')
HEARD = answer(b'{"peers":{"compatible":1,"rejected":{}}}')
SEAT = {"instance_id": "p", "epoch": "7", "zmq_addr": "127.0.0.1:9", "serving_url": "", "compatible": True}
POISON = {
    "deep": b"[" * 200_000,
    "deep in a field": b'{"more":' + b"[" * 200_000,
    "infinite": b'{"peers":{"compatible":Infinity,"rejected":{}}}',
    "too large": b'{"peers":{"compatible":1e999,"rejected":{}}}',
    "digits": b'{"peers":{"compatible":' + b"9" * 5000 + b',"rejected":{}}}',
    "no text": b"\xff\xfe\x00",
    "half a pair": b'{"peers":{"compatible":1,"rejected":{"\\ud800":"x"}}}',
    "nothing": b"{}",
    "a list": b"[]",
    "a number": b'{"peers":5}',
    "no peers": b'{"peers":{}}',
    "pairs": b'{"peers":{"compatible":1,"rejected":[[1,2]]}}',
}


@pytest.fixture
def stranger():
    made = Stranger()
    yield made
    made.close()


@pytest.mark.parametrize("body", POISON.values(), ids=POISON.keys())
def test_no_answer_ends_the_heartbeats(stranger, clients, body):
    client, _ = clients(stranger.host, stranger.port, heartbeat_interval_s=0.02)
    stranger.reply = HEARD
    client.announce(prefill())
    until(lambda: client.membership.registered, "registered")
    for reply in (answer(body), answer(body, status=b"404 Not Found")):
        stranger.reply = reply
        asked = stranger.n_asked
        until(lambda asked=asked: stranger.n_asked >= asked + 2, "it goes on asking")
        assert client.membership.error is not None
    stranger.reply = HEARD
    until(lambda: client.membership.error is None and client.membership.registered, "heard again")
    assert client.failed() is None and not client.counters["died"]


@pytest.mark.parametrize("name", ["deep in a field", "infinite", "no text", "a list"])
def test_no_answer_leaves_a_look_up_open(stranger, clients, name):
    client, sink = clients(None, stranger.port)
    stranger.reply = answer(POISON[name])
    for tag in range(3):
        client.lookup(tag, stranger.host, None)
    assert all("does not answer" in done.error for done in sink.wait(3))
    stranger.reply = LISTED
    client.lookup(9, stranger.host, None)
    assert sink.wait(4)[3].error is None and not client._asking


def test_a_body_without_an_end_is_read_up_to_the_limit(stranger, clients):
    client, sink = clients(None, stranger.port)
    stranger.reply = stranger.endless
    client.lookup(1, stranger.host, None)
    assert f"longer than {MAX_ANSWER_BYTES} bytes" in sink.wait(1)[0].error
    assert stranger.n_bytes < 2 * MAX_ANSWER_BYTES, "what lies in the sockets comes on top"


def test_a_packed_answer_is_not_unpacked(stranger, clients):
    """A few bytes of gzip can stand for a thousand times as many."""
    client, sink = clients(None, stranger.port)
    stranger.reply = answer(b"\x1f\x8b\x08", more=b"content-encoding: gzip\r\n")
    client.lookup(1, stranger.host, None)
    assert "malformed" in sink.wait(1)[0].error


@pytest.mark.parametrize("how", ["trickle", "slow_head"])
def test_one_answer_has_a_time_however_it_comes(stranger, clients, monkeypatch, how):
    """Each byte came within the time of one read: once the look-up stayed open and no heartbeat followed."""
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 0.3)
    client, sink = clients(stranger.host, stranger.port, heartbeat_interval_s=0.02)
    stranger.reply = getattr(stranger, how)
    client.announce(prefill())
    client.lookup(1, stranger.host, None)
    assert "nothing whole within 0.3 s" in sink.wait(1)[0].error
    until(lambda: client.counters["registry_silent"] >= 2, "it tries again")
    assert client._known[stranger.host, stranger.port].silent


def test_no_cookie_is_kept_and_none_is_sent(stranger, clients):
    """A registry that sets another one each time would be remembered without end."""
    client, sink = clients(None, stranger.port)
    stranger.reply = answer(b'{"instances":[]}', more=b"set-cookie: a=b\r\n")
    client.lookup(1, stranger.host, None)
    sink.wait(1)
    assert not client._http.cookies


def test_what_is_remembered_of_all_registries_together_is_bounded(clients, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_KNOWN_BYTES", 300)
    client, _ = clients(None, 1)
    for n in range(6):
        client._remember((f"registry-{n}", 1), client_module._Answer((), {}, None, 0.0, n_bytes=100))
    assert [host for host, _ in client._known] == ["registry-3", "registry-4", "registry-5"]


def test_a_keeper_that_dies_is_told_and_its_entry_taken_out(server, http, clients, monkeypatch, caplog):
    client, _ = clients(*server.address, heartbeat_interval_s=0.02)
    assert client.failed() is None
    client.announce(prefill())
    until(lambda: client.membership.registered, "registered")

    def broken(*_):
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(client, "_heard", broken)
    until(lambda: client.failed() is not None, "it says so")
    assert "ZeroDivisionError" in client.failed() and "of the test" in caplog.text
    assert http.get("/route?role=prefill").json() == {"instances": []}


def test_a_look_up_that_breaks_is_answered_all_the_same(server, clients, monkeypatch):
    client, sink = clients(*server.address)

    def broken(*_):
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(client, "_remember", broken)
    client.lookup(1, "h", None)
    assert "broke" in sink.wait(1)[0].error
    monkeypatch.undo()
    client.lookup(2, "h", None)
    assert sink.wait(2)[1].error is None and client.failed() is None
    until(lambda: client.counters["died"] == 1, "counted")


def test_a_thread_that_dies_is_told(server, clients, monkeypatch):
    client, _ = clients(*server.address)
    until(lambda: client._loop.is_running(), "running")
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    client._loop.call_soon_threadsafe(client._loop.stop)
    until(lambda: client.failed() is not None, "it says so")


def test_a_full_listing_is_shorter_than_the_limit(http):
    """4096 instances with fields as ours have them."""
    from pdjax.engine.bootstrap.registry import MAX_ENTRIES

    http.put("/route", json=prefill(fingerprint=FP))
    one = len(http.get("/route?role=prefill").content)
    assert one * MAX_ENTRIES < MAX_ANSWER_BYTES


def test_a_seat_that_gave_no_address_is_read():
    """null in a registration is as good as nothing there (registry._text); it must not cost the others."""
    body = msgspec.json.encode({"instances": [SEAT | {"serving_url": None, "zmq_addr": None}, SEAT]})
    entries, rejected = listing(body)
    assert [(one.serving_url, one.epoch) for one in entries] == [("", 7), ("", 7)] and not rejected


@pytest.mark.parametrize("epoch", ["-1", "x", 1.5, True, 1 << 64, "9" * 30])
def test_an_epoch_that_is_none_is_no_answer(epoch):
    with pytest.raises(NoAnswer, match="epoch"):
        listing(msgspec.json.encode({"instances": [SEAT | {"epoch": epoch}]}))


def test_blocking_calls_have_the_same_bounds(stranger):
    stranger.reply = stranger.trickle
    with asking.Blocking(asking.http_client()) as asker:
        began = time.monotonic()
        with pytest.raises(NoAnswer, match="within"):
            asker.ask("GET", stranger.url, limit_s=0.3)
        assert time.monotonic() - began < 20
        stranger.reply = answer(b"7")
        assert asker.ask("GET", stranger.url, limit_s=20.0) == (200, b"7")


def test_a_call_that_is_cancelled_stays_cancelled(stranger):
    stranger.reply = stranger.trickle

    async def go():
        async with asking.http_client() as client:
            task = asyncio.create_task(asking.ask(client, "GET", stranger.url, limit_s=60))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(go())
