"""The real managers and schedulers, joined by a simulated network under virtual time."""

import dataclasses
import random

import pytest
from quick_settings import QUICK

from pdjax.core import conform
from pdjax.core.errors import PDError
from pdjax.core.settings import PDSettings
from pdjax.sched.request import SamplingParams
from pdjax.sim.world import World

PROMPT = list(range(1, 14))


def ended(*clients):
    return lambda: all(c.end is not None for c in clients)


def assert_free(world, within_s=60.0):
    world.run(limit_s=within_s)
    assert world.held() == {}
    assert [str(f) for f in conform.check(world.lines, complete=True)] == []
    for node in world.nodes.values():
        assert "illegal" not in node.manager.counters.counts, node.manager.counters
        node.scheduler.cache.check() if hasattr(node.scheduler.cache, "check") else None


def is_right(world, client, prompt, n_out):
    return client.end.failure is None and client.tokens == world.right(prompt, n_out)


def test_quick_settings_are_sound():
    assert QUICK.check() == []
    assert PDSettings().check() == []


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 13, 40])
def test_a_hand_off_gives_the_right_tokens(n):
    world = World(settings=QUICK)
    prompt = [(i * 7) % 60 + 1 for i in range(n)]
    p, d = world.request(1, prompt, 6)
    assert world.run(ended(p, d), 5)
    assert is_right(world, d, prompt, 6)
    assert p.tokens == d.tokens[:1]
    assert_free(world)


def test_many_rooms_over_all_pairs():
    world = World(2, 2, settings=QUICK, num_pages=40)
    rng = random.Random(1)
    sent = []
    for room in range(60):
        prompt = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 30))]
        pair = (f"p{room % 2}", f"d{room // 2 % 2}")
        sent.append((prompt, *world.request(room, prompt, 5, p=pair[0], d=pair[1])))
    assert world.run(ended(*[c for _, p, d in sent for c in (p, d)]), 60)
    assert all(is_right(world, d, prompt, 5) for prompt, _, d in sent)
    assert_free(world)


def test_d_first_and_p_first():
    for first, second in (("p0", "d0"), ("d0", "p0")):
        world = World(settings=QUICK)
        sampling = SamplingParams(max_new_tokens=3)
        a = world.nodes[first].submit("a", 5, PROMPT, sampling)
        world.run(limit_s=0.5)
        b = world.nodes[second].submit("a", 5, PROMPT, sampling)
        assert world.run(ended(a, b), 5)
        d = a if first == "d0" else b
        assert is_right(world, d, PROMPT, 3)
        assert_free(world)


def test_a_duplicate_is_refused_and_the_first_goes_on():
    world = World(settings=QUICK)
    p, d = world.request(5, PROMPT, 3)
    for node in ("p0", "d0"):
        with pytest.raises(PDError) as caught:
            world.nodes[node].submit("b", 5, PROMPT, SamplingParams())
        assert (caught.value.status, caught.value.reason, caught.value.room) == (400, "duplicate_room", 5)
    assert world.run(ended(p, d), 5)
    assert is_right(world, d, PROMPT, 3)
    with pytest.raises(PDError):
        world.nodes["d0"].submit("c", 5, PROMPT, SamplingParams())
    assert_free(world)


@pytest.mark.parametrize("side", ["p0", "d0"])
@pytest.mark.parametrize("after_s", [0.0, 0.0006, 0.0011, 0.0013, 0.0016])
def test_an_abort_on_one_side_ends_both(side, after_s):
    world = World(settings=QUICK)
    world.net.on_part = lambda uuid, part: 0.0005
    p, d = world.request(5, PROMPT, 40)
    world.run(limit_s=after_s)
    world.nodes[side].scheduler.abort("r5")
    began = world.net.clock()
    if side == "p0" and p.end is not None:  # P's leg is over: its abort finds nobody
        assert world.run(ended(d), 10)
    else:
        assert world.run(ended(p, d), 10)
        assert world.net.clock() - began < 2 * QUICK.answer_bound_s + QUICK.hello_interval_s  # V7
    assert_free(world)


def test_crossed_requests_under_one_room_never_mix():
    world = World(1, 1, settings=QUICK)
    p = world.nodes["p0"].submit("a", 5, PROMPT, SamplingParams(max_new_tokens=3))
    d = world.nodes["d0"].submit("b", 5, [9, 9, 9], SamplingParams(max_new_tokens=3))
    assert world.run(ended(p, d), 10)
    assert d.end.failure is not None and d.tokens == []
    assert_free(world)


def test_other_weights_are_refused_with_the_difference():
    world = World(settings=QUICK, weights={"d0": "other"})
    _, d = world.request(5, PROMPT, 3)
    assert world.run(ended(d), 10)
    assert d.end.failure.reason == "no_compatible_peer" and "weights" in d.end.failure.message
    assert world.net.clock() < 1.0
    assert_free(world)


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("after_s", [0.0003, 0.0007, 0.0011, 0.0013, 0.0016])
def test_a_killed_process_ends_its_rooms_and_a_new_life_serves(victim, after_s):
    world = World(settings=QUICK)
    world.net.on_part = lambda uuid, part: 0.0005
    p, d = world.request(5, PROMPT, 40)
    world.run(limit_s=after_s)
    world.nodes[victim].crash()
    other, left = ("d0", d) if victim == "p0" else ("p0", p)
    assert world.run(ended(left), QUICK.request_timeout_s)
    world.restart(victim)
    p2, d2 = world.request(6, PROMPT, 3)
    assert world.run(ended(p2, d2), 10)
    assert is_right(world, d2, PROMPT, 3)
    assert_free(world)
    assert world.nodes[other].alive


@pytest.mark.parametrize("message", ["hello", "pending", "ready", "done", "done_ack"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_message_is_healed(message, times):
    from pdjax.core import wire

    world = World(settings=QUICK)
    lost = []

    def on_frame(src, dst, frame):
        names = [wire.EVENT_OF[type(m)] for m in wire.decode(frame).messages]
        if message in names and len(lost) < times:
            lost.append(names)
            return ()
        return (0.0,)

    world.net.on_frame = on_frame
    p, d = world.request(5, PROMPT, 3)
    assert world.run(ended(p, d), 10)
    assert is_right(world, d, PROMPT, 3)
    assert_free(world)
    if message != "pending":  # P was ready before D asked
        assert len(lost) == times


@pytest.mark.parametrize("fate", ["Connection closed", None])
def test_a_part_that_fails_or_hangs_is_never_decoded(fate):
    world = World(settings=QUICK)
    world.net.on_part = lambda uuid, part: fate if part.chunk == 0 else 0.0001
    p, d = world.request(5, PROMPT, 3)
    assert world.run(ended(p, d), 10)
    assert d.end.failure.reason == ("part_failed" if fate else "transfer_timeout")
    assert d.tokens == []
    assert_free(world)


def test_corrupt_bytes_are_found_by_the_checksum():
    world = World(settings=QUICK)
    gather = world.nodes["p0"].runner.gather

    def corrupt(pages, slot):
        packed = gather(pages, slot)
        packed.arrays[0].flat[0] ^= 1
        return packed

    world.nodes["p0"].runner.gather = corrupt
    p, d = world.request(5, PROMPT, 3)
    assert world.run(ended(p, d), 10)
    assert d.end.failure.reason == "part_failed" and "checksum" in d.end.failure.message
    assert_free(world)


def test_the_budget_admits_in_order_and_a_room_larger_than_all_of_it_goes_alone():
    world = World(settings=QUICK, budget_bytes=1)
    sent = [world.request(r, PROMPT, 2) for r in range(5)]
    assert world.run(ended(*[c for pair in sent for c in pair]), 20)
    assert all(is_right(world, d, PROMPT, 2) for _, d in sent)
    assert_free(world)


def test_first_token_that_ends_the_request_decodes_nothing():
    first = World().right(PROMPT, 1)[0]
    world = World(settings=QUICK, eos_ids=frozenset({first}))
    p, d = world.request(5, PROMPT, 6)
    assert world.run(ended(p, d), 5)
    assert d.tokens == [first] and d.end.finish.type == "stop"
    assert world.nodes["d0"].scheduler.counts.get("decode_steps", 0) == 0
    assert_free(world)


def test_an_abort_that_is_not_quiet_is_not_answered_back_and_forth():
    """docs/decisions/0002: failed(echo 0) answered by abort, and abort by failed(echo 0), filled the wire."""
    world = World(settings=QUICK)
    world.net.on_part = lambda uuid, part: None  # the pull hangs: D cannot be quiet
    world.request(5, PROMPT, 3)
    world.run(limit_s=0.1)
    world.nodes["d0"].scheduler.abort("r5")
    before = len(world.lines)
    world.run(limit_s=1.0)
    assert len(world.lines) - before < 150
    assert_free(world)


def test_gated_prefills_only_after_a_hello():
    world = World(settings=dataclasses.replace(QUICK, prefill_gate="gated"))
    p = world.nodes["p0"].submit("r5", 5, PROMPT, SamplingParams(max_new_tokens=3))
    world.run(limit_s=0.5)
    assert world.nodes["p0"].scheduler.counts["prefill_tokens"] == 0
    d = world.nodes["d0"].submit("r5", 5, PROMPT, SamplingParams(max_new_tokens=3))
    assert world.run(ended(p, d), 5)
    assert is_right(world, d, PROMPT, 3)
    alone = world.nodes["p0"].submit("r6", 6, PROMPT, SamplingParams(max_new_tokens=3))
    assert world.run(ended(alone), QUICK.bootstrap_timeout_s + 1)
    assert alone.end.failure.reason == "bootstrap_timeout"
    assert_free(world)


def test_a_gated_room_whose_d_is_missing_holds_up_nobody():
    """It waited at the head of the queue for budget, and all behind it waited until its bootstrap timer."""
    world = World(settings=dataclasses.replace(QUICK, prefill_gate="gated"))
    alone = world.nodes["p0"].submit("r5", 5, PROMPT, SamplingParams(max_new_tokens=3))
    world.run(limit_s=0.1)
    p, d = world.request(6, PROMPT, 3)
    assert world.run(ended(p, d), 0.5)
    assert is_right(world, d, PROMPT, 3) and alone.end is None
    world.nodes["p0"].scheduler.abort("r5")
    assert world.run(ended(alone), 0.5)
    assert_free(world)


def test_a_full_disk_ends_the_event_log_and_not_the_service():
    world = World(settings=QUICK)

    def full(data):
        raise OSError(28, "No space left on device")

    world.nodes["d0"].manager.log._write = full
    p, d = world.request(5, PROMPT, 3)
    assert world.run(ended(p, d), 5)
    assert is_right(world, d, PROMPT, 3)
    assert "No space" in world.nodes["d0"].manager.log.error


SWARM = 150


@pytest.mark.parametrize("chunk", range(5))
def test_a_swarm_of_faults_ends_and_frees_everything(chunk):
    for seed in range(chunk * SWARM // 5, (chunk + 1) * SWARM // 5):
        swarm(seed)


def hurt(world, rng):
    """Loss, duplicates, delays and part failures, each as often as this seed has drawn."""
    loss, dup, late = (rng.choice([0.0, 0.1, 0.4]) for _ in range(3))
    bad_part = rng.choice([0.0, 0.05, 0.3])

    def on_frame(src, dst, frame):
        if rng.random() < loss:
            return ()
        delays = [rng.random() * 3 if rng.random() < late * 0.3 else 0.0]
        return [*delays, rng.random() * 0.1] if rng.random() < dup else delays

    def on_part(uuid, part):
        r = rng.random()
        return None if r < bad_part / 2 else "Connection closed" if r < bad_part else rng.random() * 0.01

    world.net.on_frame, world.net.on_part = on_frame, on_part


def swarm(seed: int) -> None:
    """Random legs, aborts, crashes, losses, duplicates, delays and part failures; then the world heals."""
    rng = random.Random(seed)
    world = World(
        rng.choice([1, 2]),
        rng.choice([1, 2]),
        settings=QUICK,
        num_pages=rng.choice([12, 40]),
        budget_bytes=rng.choice([1, 4000, 1 << 20]),
    )
    hurt(world, rng)
    names = list(world.nodes)
    ps, ds = [n for n in names if n[0] == "p"], [n for n in names if n[0] == "d"]
    clients, done = [], []
    for room in range(rng.randrange(3, 12)):
        prompt = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 20))]
        n_out = rng.randrange(1, 8)
        pair = (rng.choice(ps), rng.choice(ds))
        for name in pair:
            if rng.random() < 0.93 and world.nodes[name].alive:
                client = world.nodes[name].submit(
                    f"r{room}", room, prompt, SamplingParams(max_new_tokens=n_out), pair[0]
                )
                clients.append((name, world.nodes[name], client))
                if name[0] == "d":
                    done.append((client, prompt, n_out))
        what = rng.random()
        world.run(limit_s=rng.choice([0, 0.0005, 0.002, 0.3]))
        if what < 0.15:
            rng.choice([n for n in world.nodes.values() if n.alive]).scheduler.abort(f"r{room}")
        elif what < 0.25:
            world.restart(rng.choice(names))
    world.run(limit_s=rng.random() * 3)
    world.net.on_frame = lambda src, dst, frame: (0.0,)
    world.net.on_part = lambda uuid, part: 0.0001
    alive = [c for name, node, c in clients if world.nodes[name] is node]
    assert world.run(ended(*alive), QUICK.request_timeout_s + 1), f"seed {seed}: a request never ended"
    for client, prompt, n_out in done:
        if client.end is not None and client.end.finish is not None and client.end.finish.type != "abort":
            assert client.tokens == world.right(prompt, n_out), f"seed {seed}: wrong tokens"
    world.run(limit_s=60)
    assert world.held() == {}, f"seed {seed}"
    assert [str(f) for f in conform.check(world.lines, complete=True)] == [], f"seed {seed}"
    for node in world.nodes.values():
        assert "illegal" not in node.manager.counters.counts, (
            f"seed {seed}: {node.name} {node.manager.counters}"
        )
        assert not [c for c in node.manager.counters.counts if c.startswith("effect_failed")], f"seed {seed}"
