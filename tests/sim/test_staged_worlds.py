"""P stages its KV in host slots: every scenario as before, every slot back, and none used again while somebody reads it."""

import pytest
import watched_worlds
from watched_worlds import SOUND, STAGED, finish, hangs_beyond_the_limbo, staged_side_by_side, watched

from pdjax.sched.request import SamplingParams
from pdjax.sim.runner import expected_tokens


@pytest.mark.parametrize("scenario", SOUND, ids=lambda s: s.__name__)
def test_the_program_as_it_is_violates_nothing_with_staging(scenario, monkeypatch):
    monkeypatch.setattr(watched_worlds, "QUICK", STAGED)
    assert [str(v) for v in scenario().violations] == []


def test_every_hand_off_goes_through_a_slot_and_the_tokens_are_the_same():
    prompts = [list(range(1, n + 2)) for n in (1, 3, 4, 5, 9, 17, 40)]
    world = watched(settings=STAGED, budget_bytes=6000)
    clients = [world.request(room, prompt, 5)[1] for room, prompt in enumerate(prompts)]
    monitor = finish(world)
    assert [str(v) for v in monitor.violations] == []
    sampling = SamplingParams(max_new_tokens=5)
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.tokens == expected_tokens(prompt, sampling, 5)
    slots = world.nodes["p0"].manager.host_slots
    assert slots.made >= 2 and slots.held_bytes == 0 and slots.free_bytes <= 6000


def test_two_rooms_of_one_size_lie_side_by_side():
    monitor = staged_side_by_side()
    assert [str(v) for v in monitor.violations] == []
    assert monitor.ctx.world.nodes["p0"].manager.host_slots.made == 2


def test_a_slot_whose_pull_hangs_beyond_the_limbo_timer_is_replaced():
    assert [str(v) for v in hangs_beyond_the_limbo().violations] == []
