"""Instances that leave: a draining one is no peer any more, who needs its address still finds it, and then it is gone."""

import socket

import pytest
from test_bootstrap_http import FP, OTHER, WAIT_S, args, clients, http, prefill, server, until
from test_bootstrap_registry import payload

from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.bootstrap.registry import Key, Registry

__all__ = ["clients", "http", "server"]
P0 = Key("prefill", "p0")


def known(registry, now=1.0):
    """(counted as a peer, listed, found by a look-up)."""
    return registry.peers("prefill", now, None)[0], len(registry.list("prefill", now)), len(registry.route("prefill", now))  # fmt: skip


def test_a_draining_seat_is_no_peer_and_is_still_found():
    registry = Registry(ttl_s=15)
    registry.register(payload(), 0.0)
    assert known(registry) == (1, 1, 1)
    for _ in range(2):  # each beat says it
        assert registry.heartbeat(P0, 7, 1.0, draining=True)
        assert known(registry) == (0, 0, 1)
    assert registry.route("prefill", 1.0)[0].to_json()["draining"] is True
    assert registry.heartbeat(P0, 7, 2.0), "a beat that was under way is no way back"
    assert known(registry, 2.0) == (0, 0, 1)
    assert registry.remove(P0, 7)
    assert known(registry, 2.0) == (0, 0, 0)


@pytest.mark.parametrize("epoch", [7, 8])
def test_a_registration_says_whether_it_drains(epoch):
    """The same life after an eviction; and the next life, which takes requests again."""
    registry = Registry(ttl_s=15)
    registry.register(payload(), 0.0)
    registry.heartbeat(P0, 7, 1.0, draining=True)
    registry.register(payload(epoch=epoch, draining=epoch == 7), 2.0)
    assert known(registry, 2.0) == ((0, 0, 1) if epoch == 7 else (1, 1, 1))
    registry.sweep(60.0)
    registry.register(payload(epoch=9), 61.0)
    assert known(registry, 61.0) == (1, 1, 1), "nothing is counted twice or left behind"


def test_drain_is_said_at_once_and_leave_takes_the_entry_out(server, http, clients):
    client, lookups = clients(*server.address, heartbeat_interval_s=600)
    http.put("/route", json=registration(args("d0"), "decode", 3))
    client.announce(prefill())
    until(lambda: client.membership.compatible == 1, "registered beside a peer: the next beat is far away")
    client.drain()
    until(lambda: not http.get("/list", params={"role": "prefill"}).json()["instances"], "draining")
    (seat,) = http.get("/route", params={"role": "prefill"}).json()["instances"]
    assert seat["draining"] is True
    for _ in range(2):
        client.leave()
    until(lambda: not http.get("/route", params={"role": "prefill"}).json()["instances"], "left")
    http.put("/route", json=prefill("p1"))
    client.lookup(1, "127.0.0.1", None)
    (answer,) = lookups.wait(1)
    assert [entry.instance_id for entry in answer.entries] == ["p1"], "it can still look others up"


@pytest.fixture
def listener():
    """A side channel, as far as reaching it goes."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        yield listening


def test_a_d_reaches_a_p_that_is_listed_or_it_does_not(server, http, clients, listener):
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    client, _ = clients(*server.address, heartbeat_interval_s=0.02)
    client.announce(registration(args("d0"), "decode", 3))
    until(lambda: client.membership.compatible == 0, "registered alone")
    assert client.membership.reachable is None
    http.put("/route", json=prefill("p-behind-a-filter") | {"zmq_addr": "127.0.0.1:1"})
    http.put("/route", json=prefill("p-wrong") | {"zmq_addr": "nobody"})
    until(lambda: client.membership.reachable is False, "listed, and nobody listens there")
    assert client.membership.compatible == 2
    http.put("/route", json=prefill("p-there") | {"zmq_addr": address})
    until(lambda: client.membership.reachable is True, "one of them listens")
    listener.close()
    until(lambda: client.membership.reachable is False, "it listens no more")


def test_peers_are_those_that_fit_and_take_requests(server, http, clients):
    client, _ = clients(*server.address, fingerprint=FP)
    http.put("/route", json=prefill("p-fits"))
    http.put("/route", json=prefill("p-leaves") | {"draining": True})
    http.put("/route", json=prefill("p-other", fingerprint=OTHER))
    http.put("/route", json=registration(args("d0", url="http://127.0.0.1:7"), "decode", 3))
    found = client.peers("prefill").result(WAIT_S)
    assert [one.instance_id for one in found.entries] == ["p-fits"] and list(found.rejected) == ["p-other"]
    assert [one.serving_url for one in client.peers("decode").result(WAIT_S).entries] == [
        "http://127.0.0.1:7"
    ]


def test_without_a_configured_registry_the_last_one_that_a_request_named_is_asked(server, http, clients):
    client, lookups = clients(None, 1)
    assert "no registry" in client.peers("prefill").result(WAIT_S).error
    http.put("/route", json=prefill())
    client.lookup(1, *server.address)
    lookups.wait(1)
    assert [one.instance_id for one in client.peers("prefill").result(WAIT_S).entries] == ["p0"]
