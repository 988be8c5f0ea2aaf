"""Budget and host slots: what is reserved before a prefill, who may use a slot again, and when it is let go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.budget import Budget, HostSlots, Slot


def test_a_quiet_slot_is_used_again_and_keeps_its_memory():
    slots = HostSlots(100)
    slot = slots.take(60)
    slot.arrays = memory = [object()]
    slots.give_back(slot, quiet=True)
    assert slots.take(60) is slot and slot.arrays is memory


def test_a_slot_that_may_still_be_read_is_never_handed_out_again():
    slots = HostSlots(100)
    slot = slots.take(60)
    slots.give_back(slot, quiet=False)
    assert slots.free_bytes == slots.held_bytes == 0
    assert slots.take(60) is not slot


def test_a_slot_serves_hand_offs_of_its_own_size_only():
    slots = HostSlots(100)
    slots.give_back(slots.take(60), quiet=True)
    assert slots.take(40).n_bytes == 40


def test_free_slots_of_other_sizes_make_way_the_longest_unused_first():
    slots = HostSlots(100)
    small, middle = slots.take(20), slots.take(30)
    slots.give_back(middle, quiet=True)
    slots.give_back(small, quiet=True)
    large = slots.take(70)  # 20 + 70 fit beside each other, 30 + 70 do as well: the older one goes
    assert slots.free_bytes == 20 and slots.take(20) is small
    slots.give_back(large, quiet=True)


def test_a_hand_off_larger_than_everything_goes_alone_and_is_not_kept():
    slots = HostSlots(100)
    huge = slots.take(500)
    assert not slots.can(1)
    with pytest.raises(ValueError, match="1 bytes on 500 of 100"):
        slots.take(1)
    slots.give_back(huge, quiet=True)
    assert slots.free_bytes == 0 and slots.can(500)
    small = slots.take(1)
    assert not slots.can(500)
    slots.give_back(small, quiet=True)


def test_a_slot_comes_back_once():
    slots = HostSlots(100)
    slot = slots.take(60)
    with pytest.raises(ValueError, match="slot 1 comes back, but nobody holds it"):
        slots.give_back(Slot(slot.number, 60), quiet=True)  # of somebody else: the holder keeps its own
    slots.give_back(slot, quiet=True)
    with pytest.raises(ValueError, match="slot 1 comes back, but nobody holds it"):
        slots.give_back(slot, quiet=True)
    assert (slots.held_bytes, slots.free_bytes) == (0, 60)


def test_the_start_fills_the_pool_with_every_size():
    slots = HostSlots(100)
    fresh = slots.fill([40, 10, 20])
    assert sorted(slot.n_bytes for slot in fresh) == [10, 10, 20, 20, 40]
    assert slots.free_bytes == 100 and slots.made == 5
    assert slots.take(40) in fresh
    assert HostSlots(5).fill([10]) == []


def test_the_budget_takes_a_slot_for_what_it_charges():
    budget = Budget(100, host=HostSlots(100))
    slot = budget.charge(60)
    assert slot is not None and slot.n_bytes == budget.charged_bytes == 60
    budget.give_back(60)
    assert not budget.can(60), "the slot is still with whoever reads it"
    budget.host.give_back(slot, quiet=True)
    assert budget.can(60) and budget.charge(60) is slot
    assert Budget(100).charge(60) is None


SIZES = (1, 3, 10, 40, 90)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.booleans(), st.integers(0, 9)), max_size=60))
def test_slots_are_never_shared_and_never_more_than_the_limit(moves):
    """moves: a size to take, or (where it does not fit) which held slot comes back and whether it is quiet."""
    limit = 50
    slots, held, dead = HostSlots(limit), [], set()
    for n_bytes, quiet, which in moves:
        if slots.can(n_bytes):
            slot = slots.take(n_bytes)
            assert slot.n_bytes == n_bytes and slot not in held and slot not in dead
            held.append(slot)
        elif held:
            slot = held.pop(which % len(held))
            slots.give_back(slot, quiet=quiet)
            if not quiet:
                dead.add(slot)
        assert slots.held_bytes == sum(slot.n_bytes for slot in held)
        assert list(slots.held.values()) == held or set(slots.held.values()) == set(held)
        alone = len(held) == 1 and held[0].n_bytes > limit
        assert alone or slots.held_bytes + slots.free_bytes <= limit
    for slot in held:
        slots.give_back(slot, quiet=True)
    assert slots.held_bytes == 0 and slots.free_bytes <= limit
