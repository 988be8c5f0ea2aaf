"""Host slots under the manager: reserved with the budget, back exactly once, used again only when D said that it is quiet."""

import pytest
from manager_world import POOL, World, leg

from pdjax.core.pools import packed_bytes
from pdjax.core.room import Event
from pdjax.engine.base import FirstToken, KVReleased

SIZE = packed_bytes([POOL], 1)


def staged(n_slots=4, **settings):
    return World(budget_bytes=n_slots * SIZE, host_staging=True, **settings)


def slot_lines(world):
    names = ("slot_taken", "slot_freed")
    return [
        (x["event"], x["room"], x["slot"], x.get("quiet")) for x in world.log_lines if x["event"] in names
    ]


def pulling(world, room=1, decode=None):
    """(D, its receiver) with a pull under way."""
    d = decode or world.manager("decode", "d0")
    d.claim(leg(room))
    world.offer(room)
    world.run(d, world.p, seconds=0.2)
    receiver = d.create_receiver(room, "")
    assert receiver.receive([1])
    world.run(d, world.p, seconds=0.1)
    return d, receiver


def end_pull(d, room=1):
    """Every part of the room's pull is here."""
    from pdjax.engine.ports import PullDone

    pull_id = d._pull_ids[room, d.rooms[room].attempt]
    _, parts = d.ports.transport.pulls[pull_id]
    d.ports.transport.sink(PullDone(pull_id, [object()] * len(parts), (None,) * len(parts), 0.1))


def test_a_slot_is_reserved_before_the_prefill_and_filled_by_the_gather():
    world = staged()
    world.p.claim(leg(1))
    sender = world.p.create_sender(1)
    assert sender.admit(SIZE)
    assert world.p.quiescent()["host_slots"] == 1 and world.p.host_slots.held_bytes == SIZE
    world.offer_admitted(sender)
    [slot] = world.p._runner.slots
    assert slot is world.p.host_slots.held[1] and slot.n_bytes == SIZE


def test_without_the_setting_nothing_is_staged():
    world = World()
    world.offer(1)
    assert world.p._runner.slots == (None,) and world.p.host_slots is None
    assert world.p.quiescent()["host_slots"] == 0 and slot_lines(world) == []


def test_only_p_has_host_slots():
    world = staged()
    assert world.manager("decode", "d0").host_slots is None


def test_done_brings_the_slot_back_for_the_next_hand_off():
    world = staged(1)
    d, receiver = pulling(world)
    end_pull(d)
    world.run(d, seconds=0.1)
    assert receiver.commit()
    world.run(d, world.p, seconds=0.2)
    assert world.p.quiescent()["host_slots"] == 0
    first = world.p._runner.slots[0]
    world.offer(2)
    assert world.p._runner.slots == (first, first)
    assert slot_lines(world) == [
        ("slot_taken", 1, 1, None),
        ("slot_freed", 1, 1, True),
        ("slot_taken", 2, 1, None),
    ]


def test_a_slot_comes_back_after_what_it_held_is_withdrawn():
    """Bytes are given back by the table at once; the slot only once the transport has let go of its registration."""
    world = staged(1)
    d, receiver = pulling(world)
    end_pull(d)
    world.run(d, seconds=0.1)
    assert receiver.commit()
    seen = []
    transport, withdraw = world.p.ports.transport, world.p.ports.transport.withdraw
    transport.withdraw = lambda *args: (
        seen.append(
            (
                len(world.p.host_slots.held),
                world.p.sender.budget.charged_bytes,
                world.p.sender.budget.can(SIZE),
            )
        ),
        withdraw(*args),
    )
    d.turn()
    world.p.turn()
    assert seen == [(1, 0, False)], "the bytes are back, the slot is not yet"
    assert world.p.sender.budget.can(SIZE)


def test_who_waits_for_a_slot_is_told_after_it_is_back():
    world = staged(1)
    d, receiver = pulling(world)
    end_pull(d)
    world.run(d, seconds=0.1)
    assert receiver.commit()
    told = []
    world.p._on_event = lambda: told.append(world.p.sender.budget.can(SIZE))
    d.turn()
    world.p.turn()
    assert told == [False, True], (
        "the event of the bytes alone would be answered by a no, and no other would follow"
    )
    assert [type(e) for e in world.p.take_events()] == [KVReleased, KVReleased]


def test_a_pull_that_never_ends_keeps_its_slot_until_the_limbo_timer_and_for_ever_from_others():
    """The bound gives the bytes back whatever a stopped D does: but what it may still read is not written again."""
    world = staged(1)
    pulling(world)
    world.p.event(1, Event("abort_local", reason="client_abort"))
    world.run(world.p, seconds=1)
    assert world.p.quiescent()["host_slots"] == 1, "limbo holds it"
    world.run(world.p, seconds=world.settings.limbo_timeout_s + 1, step_s=1.0)
    assert world.p.quiescent()["host_slots"] == 0
    assert slot_lines(world)[-1] == ("slot_freed", 1, 1, False)
    assert world.p.counters.counts["slots_replaced"] == 1
    world.offer(2)
    first, second = world.p._runner.slots
    assert second is not first and world.p.host_slots.made == 2


def test_a_quiet_abort_brings_the_slot_back():
    world = staged(1)
    d, receiver = pulling(world)
    receiver.abort("client_abort")
    world.run(d, world.p, seconds=0.5)
    assert world.p.quiescent()["host_slots"] == 1, "the pull is still under way"
    [pull_id] = d._pulls
    from pdjax.engine.ports import PullSettled

    d.ports.transport.sink(PullSettled(pull_id))
    world.run(d, world.p, seconds=0.5)
    assert slot_lines(world)[-1] == ("slot_freed", 1, 1, True)


def test_a_new_life_of_d_does_not_free_the_slot_for_others():
    """The old life is dead; whether the transport has noticed nobody says, so the slot is replaced."""
    world = staged(1)
    pulling(world)
    again = world.manager("decode", "d0")
    again.claim(leg(2))
    world.run(again, world.p, seconds=0.5)
    assert slot_lines(world)[-1] == ("slot_freed", 1, 1, False)


def test_nor_does_it_free_the_slot_of_a_room_in_limbo():
    world = staged(1)
    pulling(world)
    world.p.event(1, Event("abort_local", reason="client_abort"))
    world.p.turn()
    again = world.manager("decode", "d0")
    again.claim(leg(2))
    world.run(again, world.p, seconds=0.5)
    assert slot_lines(world)[-1] == ("slot_freed", 1, 1, False)


@pytest.mark.parametrize("when", ["admitted", "offered"])
def test_what_was_never_registered_comes_back_at_once(when):
    world = staged(1)
    world.p.claim(leg(1))
    sender = world.p.create_sender(1)
    assert sender.admit(SIZE)
    if when == "offered":
        world.offer_admitted(sender)
    sender.abort("client_abort")
    world.p.turn()
    assert slot_lines(world)[-1] == ("slot_freed", 1, 1, True)


def test_a_room_that_ended_meanwhile_stages_nothing():
    world = staged(1)
    world.p.claim(leg(1))
    sender = world.p.create_sender(1)
    assert sender.admit(SIZE)
    sender.abort("client_abort")
    assert not sender.send([1], FirstToken(7)) and world.p._runner.slots == ()
