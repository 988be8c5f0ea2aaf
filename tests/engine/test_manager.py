"""The manager over ports of the test's own: what is bounded, refused, or given up, and what peers are told of it."""

import pytest
from manager_world import World, leg

from pdjax.core.errors import PDError
from pdjax.core.room import Event
from pdjax.engine.base import KVReady
from pdjax.engine.ports import FrameIn


def refused(manager, room, **how):
    with pytest.raises(PDError) as error:
        manager.refuse(leg(room), **how) if how else manager.claim(leg(room))
    return error.value.status, error.value.reason


# ---------------------------------------------------------------- legs


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_second_leg_of_a_live_room_is_a_duplicate_whatever_else_is_wrong_with_it(role):
    world = World(max_rooms=1)
    m = world.manager(role, "x", "127.0.0.1:9" if role == "prefill" else None)
    m.claim(leg(1))
    assert refused(m, 1) == (400, "duplicate_room")  # although it is full
    assert refused(m, 1, reason="bad_request") == (400, "duplicate_room")
    assert refused(m, 2) == (503, "queue_full")
    m.draining = True
    assert refused(m, 1) == (400, "duplicate_room")
    assert refused(m, 3) == (503, "draining")
    assert refused(m, 4, reason="bad_request") == (400, "bad_request")
    assert m.quiescent()["live_rooms"] == 1
    assert "illegal" not in m.counters.counts


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_refused_legs_do_not_grow_the_table_beyond_its_bound(role):
    world = World(max_tombstones=5)
    m = world.manager(role, "x", "127.0.0.1:9" if role == "prefill" else None)
    for room in range(5):
        refused(m, room, reason="bad_request")
    for room in range(5, 50):
        assert refused(m, room) == (503, "queue_full")
        refused(m, 100 + room, reason="bad_request")
    assert len(m.rooms) == 5
    assert m.counters.counts["legs_refused_queue_full"] == 90


def test_a_registry_that_lists_only_strangers_ends_the_room_at_once():
    world = World()
    d = world.manager("decode", "d0")
    d.ports.registry.entries, d.ports.registry.rejected = (), {"p9": "page_size: 8 there, 4 here"}
    d.claim(leg(1))
    world.run(d, seconds=0.1)
    assert d.rooms[1].reason == "no_compatible_peer" and "page_size" in d.rooms[1].detail


def test_a_registry_that_lists_only_strangers_now_does_not_end_a_room_that_has_a_candidate():
    """It was restarted, and the P that was asked has not registered again."""
    world = World()
    d = world.manager("decode", "d0")
    d.claim(leg(1))
    world.run(d, world.p, seconds=0.1)
    d.ports.registry.entries, d.ports.registry.rejected = (), {"p9": "page_size: 8 there, 4 here"}
    world.run(d, world.p, seconds=5)
    world.offer(1)
    world.run(d, world.p, seconds=2)
    assert any(isinstance(e, KVReady) for e in take(d, 1))


# ---------------------------------------------------------------- peers


def test_p_forgets_a_decode_instance_that_came_back_under_another_name():
    world = World()
    for n in range(3):
        d = world.manager("decode", f"d{n}")
        d.claim(leg(n))
        world.offer(n)
        world.run(d, world.p)
        assert any(isinstance(e, KVReady) for e in take(d, n)), f"d{n} got its ready"
    assert set(world.p.peers.links) == {"d0", "d1", "d2"}
    silence_s = world.settings.withdrawn_life_s
    world.run(world.p, d, seconds=silence_s - 30, step_s=1.0)  # d2 goes on
    assert set(world.p.peers.links) == {"d0", "d1", "d2"}
    world.run(world.p, d, seconds=60, step_s=1.0)
    assert set(world.p.peers.links) == {"d2"}
    assert [peer.split(":")[0] for peer in world.p.ports.transport.dropped] == ["d0", "d1"]
    assert world.p.counters.counts["peers_forgotten"] == 2


def take(d, room):
    d.create_receiver(room, "")
    return d.take_events()


def test_the_peer_that_makes_room_for_another_loses_its_transfer_server_too():
    world = World(max_peers=2)
    for n in range(4):
        d = world.manager("decode", f"d{n}")
        d.claim(leg(n))
        world.run(d, world.p, seconds=0.2)
    assert len(world.p.peers.links) == 2
    assert [peer.split(":")[0] for peer in world.p.ports.transport.dropped] == ["d0", "d1"]


@pytest.mark.parametrize("leaves", ["p", "d"])
def test_a_process_that_leaves_tells_its_peers(leaves):
    world = World()
    d = world.manager("decode", "d0")
    d.claim(leg(1))
    world.offer(1)
    world.run(d, world.p, seconds=0.2)
    receiver = d.create_receiver(1, "")
    assert receiver.receive([1])
    world.run(d, world.p, seconds=0.1)
    going, other = (world.p, d) if leaves == "p" else (d, world.p)
    assert going.end_rooms() == 1 and going.end_rooms() == 0
    going.turn()
    other.turn()
    for m in (going, other):
        assert m.quiescent()["live_rooms"] == 0
    assert going.rooms[1].reason == "draining"
    assert other.rooms[1].reason == "peer_failed"
    assert "leaving" in other.rooms[1].detail


# ---------------------------------------------------------------- frames


def test_answers_that_are_too_long_for_one_frame_go_in_several():
    world = World(max_frame_bytes=4096)
    d = world.manager("decode", "d0")
    for room in range(60):
        world.offer(room)
        d.claim(leg(room))
    world.run(d, world.p, seconds=0.3)
    receivers = [d.create_receiver(room, "") for room in range(60)]
    assert len([e for e in d.take_events() if isinstance(e, KVReady)]) == len(receivers)
    assert "frame_too_long" not in world.p.counters.counts
    assert max(world.p.ports.channel.sent_bytes) <= 4096


def test_what_one_bad_event_leaves_unread_is_read_in_the_next_turn(monkeypatch):
    world = World()
    d = world.manager("decode", "d0")
    d.claim(leg(1))
    world.run(d, world.p, seconds=0.2)
    d.turn()
    waiting = list(world.p.ports.channel.inbox)
    if not waiting:
        world.clock.now += 1.5
        d.turn()
    assert world.p.ports.channel.inbox, "a hello is on its way"
    world.p.ports.channel.inbox.insert(0, FrameIn("bad", b""))
    real = world.p._frame
    monkeypatch.setattr(world.p, "_frame", lambda e: 1 / 0 if e.address == "bad" else real(e))
    heard = world.p.peers.links["d0"].last_heard
    with pytest.raises(ZeroDivisionError):
        world.p.turn()
    assert world.p.next_deadline() <= world.clock.now, "it does not sleep over what is left"
    world.p.turn()
    assert world.p.peers.links["d0"].last_heard > heard


def test_a_peer_that_renews_its_deadlines_again_and_again_does_not_grow_the_timers():
    world = World()
    d = world.manager("decode", "d0")
    for room in (1, 2):  # one with a leg on P, one early
        d.claim(leg(room))
    world.p.claim(leg(1))
    world.run(d, world.p, seconds=1)
    few = len(world.p._timers)
    for _ in range(500):
        for room in (1, 2):
            d.event(room, Event("hello_timer"))
        world.run(d, world.p, seconds=0.01, step_s=0.01)
    assert len(world.p._timers) <= few + 2 and len(d._timers) < 20
    silence_s = world.settings.lease_s + 0.5
    world.run(world.p, seconds=silence_s)
    assert world.p.rooms[1].reason == "lease_expired", "the renewed deadline still ends it"
    world.run(world.p, seconds=world.settings.bootstrap_timeout_s)
    assert world.p.sender.n_early == 0


# ---------------------------------------------------------------- graveyard


@pytest.mark.parametrize(("limit_bytes", "replaced"), [(1 << 20, 0), (200, 1)])
def test_a_graveyard_over_its_bound_in_bytes_costs_that_peers_server(limit_bytes, replaced):
    world = World(max_graveyard_bytes=limit_bytes)
    d = world.manager("decode", "d0")
    for room in range(2):  # 128 bytes each
        world.offer(room)
        d.claim(leg(room))
    world.run(d, world.p, seconds=0.3)
    receivers = [d.create_receiver(room, "") for room in range(2)]
    assert all(r.receive([1]) for r in receivers)
    d.turn()
    for r in receivers:
        r.abort()
        d.turn()
    assert d.counters.counts.get("servers_replaced", 0) == replaced
    assert len(d.ports.transport.dropped) == replaced
    d.turn()
    assert d.quiescent()["pulls"] == (0 if replaced else 2)
