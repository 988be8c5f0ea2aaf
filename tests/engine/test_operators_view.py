"""What an operator is shown of rooms: the table's own words, its timers, and counts that add up."""

import pytest
from manager_world import POOL, World, leg

from pdjax.core import transitions as t
from pdjax.core.outlook import view
from pdjax.core.pools import packed_bytes
from pdjax.core.room import Event
from pdjax.core.tally import Histogram
from pdjax.engine.ports import PullDone


def only(manager):
    ((one,), n) = manager.views(10)
    assert n == 1
    return one


def test_a_room_of_p_from_its_leg_to_the_pull():
    world = World()
    p, d = world.p, world.manager("decode", "d0")
    p.claim(leg(1))
    world.clock.now += 2
    one = only(p)
    assert (one.role, one.state, one.age_s, one.state_s, one.peer) == ("sender", "Bootstrapping", 2, 2, "")
    (wait,) = one.waits_for
    assert wait.event == "admit" and list(wait.needs) == ["budget_free"]
    assert wait.needs["budget_free"] == t.CONDITIONS["budget_free"]
    assert one.ends.timer == "request" and one.ends.reason == "request_timeout" and one.ends.in_s == 298

    sender = p.create_sender(1)
    assert sender.admit(64)
    assert [w.event for w in only(p).waits_for] == ["kv_ready"] and only(p).held_bytes == 64
    assert (only(p).age_s, only(p).state_s) == (2, 0), "since its leg, and since it is admitted"

    d.claim(leg(1))
    world.run(p, d, seconds=0.2)
    assert only(p).peer == "d0" and only(p).ends.timer == "lease"
    assert only(p).ends.why == "D is gone"
    world.offer_admitted(sender)
    one = only(p)
    assert one.state == "Transferring" and one.held_pages == 1
    assert [w.event for w in one.waits_for] == ["done"]
    assert one.ends.reason == "lease_expired" and one.ends.in_s <= world.settings.lease_s


def test_a_room_of_d_until_it_has_its_kv():
    world = World()
    d = world.manager("decode", "d0")
    d.claim(leg(1))
    for _ in range(3):  # the look-up, its answer, the hello
        d.turn()
    one = only(d)
    assert one.asking == ("p0",) and {w.event for w in one.waits_for} == {"pending", "ready"}
    silence = next(a for a in one.alarms if a.timer == "silence")
    assert (silence.to, silence.reason, silence.in_s) == (
        "Failed",
        "peer_lost",
        world.settings.peer_timeout_s,
    )
    assert one.ends == silence
    world.run(d, world.p, seconds=0.2)
    assert next(a for a in only(d).alarms if a.timer == "bootstrap").reason == "bootstrap_timeout"

    world.offer(1)
    world.run(world.p, d, seconds=2)
    one = only(d)
    assert one.state == "WaitingForInput" and one.peer == "p0" and one.held_pages == 1
    (wait,) = one.waits_for
    assert wait.event == "start" and list(wait.needs) == ["pages_taken"], "it has its uuid, P answers"
    (receiver, manifest) = d.create_receiver(1, ""), d.rooms[1].manifest
    assert receiver.receive([1])
    world.run(world.p, d, seconds=0.2)
    one = only(d)
    assert one.state == "Transferring" and one.held_bytes == manifest.nbytes
    assert [w.event for w in one.waits_for] == ["scattered"]
    assert [a.timer for a in one.alarms if a.to != one.state and a.timer != "silence"] == [
        "transfer",
        "request",
    ]

    d.ports.transport.sink(PullDone(1, [object()] * len(manifest.parts), (None,) * len(manifest.parts), 0.25))
    d.turn()
    assert receiver.commit()
    assert d.views(10) == ([], 0)
    (notice,) = d.remains(10)["notices"]
    assert notice["kind"] == "done" and notice["peer"] == "p0"
    assert d.remains(10)["tombstones"] == 1
    assert (d.tally.moved_bytes.total, d.tally.pull_s.total) == (manifest.nbytes, 0.25)
    assert world.p.tally.moved_bytes.total == manifest.nbytes


def test_a_gated_room_says_that_it_waits_for_a_hello():
    world = World(prefill_gate="gated")
    world.p.claim(leg(1))
    needs = only(world.p).waits_for[0].needs
    assert needs["bound"] == t.CONDITIONS["bound"]
    assert only(world.p).ends.why == "gated: D never came"


def test_early_entries_and_limbo_are_shown():
    world = World()
    p, d = world.p, world.manager("decode", "d0")
    d.claim(leg(1))
    world.run(d, p, seconds=0.2)
    (early,) = p.remains(10)["early"]
    assert (early["room"], early["kind"], early["peer"]) == ("1", "hello", "d0") and early["in_s"] > 0
    world.offer(1)
    world.run(d, p, seconds=2)
    p.event(1, Event("abort_local", reason="client_abort"))
    (limbo,) = p.remains(10)["limbo"]
    assert (limbo["room"], limbo["peer"], limbo["bytes"]) == ("1", "d0", packed_bytes([POOL], 1))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_list_is_bounded_and_says_how_many_there_are(role):
    world = World()
    m = world.manager(role, "x", "127.0.0.1:9" if role == "prefill" else None)
    for room in range(100):
        m.claim(leg(room))
    shown, n = m.views(40)
    assert (len(shown), n) == (40, 100)
    assert m.tally.live() == {"Bootstrapping": 100, "WaitingForInput": 0, "Transferring": 0}


def test_counts_of_moves_and_failures_add_up():
    world = World()
    p = world.p
    for room in range(3):
        p.claim(leg(room))
    p.event(0, Event("engine_error"))
    p.end_rooms()
    assert {(a, b): n for a, b, n in p.tally.moves()} == {
        ("Absent", "Bootstrapping"): 3,
        ("Bootstrapping", "Failed"): 3,
    }
    assert p.tally.failures() == {"engine_error": 1, "draining": 2}
    assert p.tally.live()["Bootstrapping"] == 0


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_every_live_state_has_a_way_on(role):
    """The view asks the table: a state that it cannot describe would be one without a row."""
    world = World()
    side = world.p if role == "sender" else world.manager("decode", "d0")
    side.claim(leg(1))
    record = side.rooms[1]
    for state in sorted(t.LIVE):
        record.state = state
        shown = view(record, world.clock())
        assert shown.waits_for and all(w.why for w in shown.waits_for)
        assert shown.ends is not None


def test_a_histogram_counts_a_bound_as_inside():
    h = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        h.add(value)
    assert h.cumulative() == [("1", 2), ("2", 3), ("+Inf", 4)] and (h.count, h.total) == (4, 12.0)


def test_a_row_that_stays_is_no_move():
    world = World()
    d = world.manager("decode", "d0")
    world.p.claim(leg(1))
    d.claim(leg(1))
    world.run(d, world.p, seconds=3)  # hellos that bind and renew
    assert world.p.rooms[1].peer == "d0"
    assert list(world.p.tally.moves()) == [("Absent", "Bootstrapping", 1)]
