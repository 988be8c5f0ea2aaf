"""The rows that no world reaches, each forced once past the layer that keeps its event away: everything ends and is free."""

from __future__ import annotations

import pytest
from last_resort import LAST_RESORT
from quick_settings import QUICK

from pdjax.core import conform, wire
from pdjax.core import transitions as t
from pdjax.core.room import Event
from pdjax.sched.request import SamplingParams
from pdjax.sim.mutate import label
from pdjax.sim.world import World

PROMPT = list(range(1, 14))
ROOM = 5


def waiting_for_budget():
    world = World(settings=QUICK, budget_bytes=1)
    world.request(4, PROMPT, 3)
    clients = world.request(ROOM, PROMPT, 3)
    world.run(limit_s=0.0008)
    return world, "p0", clients


def unbound():
    world = World(settings=QUICK)
    p = world.nodes["p0"].submit("a", ROOM, PROMPT, SamplingParams(max_new_tokens=3))
    world.run(limit_s=0.1)
    return world, "p0", (p,)


def pulling():
    world = World(settings=QUICK)
    world.net.on_part = lambda uuid, part: 0.5
    clients = world.request(ROOM, PROMPT, 3)
    world.run(limit_s=0.1)
    return world, "d0", clients


def decoding():
    world = World(settings=QUICK)
    clients = world.request(ROOM, PROMPT, 40)
    world.run(lambda: bool(clients[1].tokens), 5)
    return world, "d0", clients


def of_a_newer_life(record):
    return Event("pending", "p0", record.bound_epoch + 1, wire.Pending(room=ROOM, attempt=record.attempt))


FORCED = {
    "sender B engine_error": (waiting_for_budget, "B", lambda record: Event("engine_error"), "engine_error"),
    "sender T engine_error [!bound]": (unbound, "T", lambda record: Event("engine_error"), None),
    "receiver WT no_candidate": (pulling, "T", lambda record: Event("no_candidate"), None),
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]": (pulling, "T", of_a_newer_life, "peer_lost"),
    "receiver S abort_local,engine_error": (decoding, "S", lambda record: Event("abort_local"), None),
}  # fmt: skip


@pytest.mark.parametrize("row", LAST_RESORT)
def test_a_row_of_last_resort_ends_well(row):
    """reason: what the client of that side hears; None: its request goes on as if nothing had happened."""
    arrive, state, event, reason = FORCED[row]
    world, name, clients = arrive()
    manager = world.nodes[name].manager
    record = manager.rooms[ROOM]
    assert record.state == t.LETTERS[state]
    with manager._lock:
        manager._handle(ROOM, event(record))
    manager.ports.channel.wake()
    assert row in {label(i) for i in world.rows}
    assert world.run(lambda: all(c.end is not None for c in clients), 30)
    mine = clients[0 if name == "p0" else -1]
    assert (mine.end.failure.reason if mine.end.failure else None) == reason
    if reason is None and name == "d0":
        assert mine.tokens == world.right(PROMPT, len(mine.tokens)) and mine.tokens
    world.run(limit_s=60)
    assert world.held() == {}
    assert [str(f) for f in conform.check(world.lines, complete=True)] == []
