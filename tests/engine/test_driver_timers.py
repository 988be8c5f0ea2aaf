"""The driver's own timers: a handler that raises costs nothing but itself, and what native code takes waits for no claim."""

import threading

import pytest
from manager_world import World, leg

from pdjax.core.room import Event
from pdjax.engine.ports import Entry

FAILED = "effect_failed_request_timer"


def raises_once(real, error):
    """real, but for its first call. The calls are counted in ``n``."""

    def call(*args, **kwargs):
        call.n += 1
        if call.n == 1:
            raise error
        return real(*args, **kwargs)

    call.n = 0
    return call


def lines_of(world, event):
    return [line for line in world.log_lines if line["event"] == event]


def test_a_tick_that_raises_is_counted_and_the_next_ones_come(monkeypatch):
    world = World()
    p = world.p
    tick = raises_once(p.ports.transport.tick, RuntimeError("native"))
    monkeypatch.setattr(p.ports.transport, "tick", tick)
    world.run(p, seconds=5, step_s=0.25)
    assert tick.n > 15
    assert p.counters.counts["effect_failed_TickTransport"] == 1
    (line,) = lines_of(world, "effect_failed")
    assert (line["effect"], line["detail"]) == ("TickTransport", "RuntimeError: native")


def test_silent_peers_are_forgotten_although_the_transport_cannot_tick(monkeypatch):
    world = World()
    d = world.manager("decode", "d0")
    d.claim(leg(1))
    world.run(d, world.p)
    assert set(world.p.peers.links) == {"d0"}
    monkeypatch.setattr(world.p.ports.transport, "tick", lambda: 1 / 0)
    world.run(world.p, seconds=2 * world.settings.withdrawn_life_s, step_s=5.0)
    assert not world.p.peers.links and world.p.counters.counts["effect_failed_TickTransport"] > 100


def test_a_timer_whose_handler_raises_fires_again_and_the_others_fire(monkeypatch):
    """One room's fault must not keep another room, nor the first for ever (S11)."""
    world = World(request_timeout_s=20)
    d = world.manager("decode", "d0")
    d.ports.registry.entries = ()
    for room in (1, 2):
        d.claim(leg(room))
    real, failing = d.receiver.handle, raises_once(None, KeyError("a fault"))

    def handle(room, ev, *args):
        if room == 1 and ev.name.startswith("expire") and not failing.n:
            failing()
        return real(room, ev, *args)

    monkeypatch.setattr(d.receiver, "handle", handle)
    while d.rooms[2].live:
        world.clock.now += 1.0
        d.turn()
    assert d.rooms[1].live and failing.n == 1
    world.clock.now += 1.0
    d.turn()
    assert not d.rooms[1].live and d.quiescent()["live_rooms"] == 0
    assert [name for name in d.counters.counts if name.startswith("effect_failed")] == [FAILED]
    (line,) = lines_of(world, "effect_failed")
    assert (line["effect"], line["room"]) == ("request_timer", 1) and "a fault" in line["detail"]
    world.run(d, seconds=2 * world.settings.tombstone_life_s, step_s=5.0)
    assert not d.rooms


@pytest.mark.parametrize("port", ["tick", "forget", "forget of a lookup"])
def test_no_port_is_called_under_the_lock_of_a_claim(monkeypatch, port):
    world = World()
    d = world.manager("decode", "d0")
    d.claim(leg(1))
    world.run(d, world.p)
    came_through = []

    def waits(*args):
        """Native code that takes its time: a claim of another thread must not wait for it."""
        other = threading.Thread(target=d.live_rooms, args=(None,), daemon=True)
        other.start()
        other.join(10.0)
        came_through.append(not other.is_alive())

    if port == "tick":
        monkeypatch.setattr(d.ports.transport, "tick", waits)
        world.run(d, seconds=0.6)
    elif port == "forget":
        d.event(1, Event("abort_local", reason="client_abort"))
        world.run(d, world.p)
        monkeypatch.setattr(d.ports.channel, "forget", waits)
        world.run(d, seconds=2 * world.settings.withdrawn_life_s, step_s=5.0)
    else:
        monkeypatch.setattr(d.ports.channel, "forget", waits)
        d.ports.registry.entries = [Entry("p0", world.p.epoch, "127.0.0.1:8", "")]
        d.claim(leg(2))
        world.run(d, seconds=0.3)
    assert came_through and all(came_through)
