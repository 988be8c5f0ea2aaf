"""Aborts, peers that end and calls that fail, on both halves at every stage."""

from __future__ import annotations

import random

import pytest
from sched_fake_manager import LIVE
from sched_harness import Client, random_client, random_prompt
from sched_pair import LONG, assert_both_right, bytes_of
from sched_real_pair import RealPair

from pdjax.core.errors import PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.engine.base import Leg
from pdjax.sched.request import SamplingParams

N_TICKS = 20


def staged(make_pair):
    """Five requests, of which different ones soon stand at different stages."""
    pair = make_pair(
        p={"num_pages": 4}, d={"num_pages": 17, "max_batch": 2}, p_config={"chunked_prefill_size": 5}
    )
    pair.link.budget_bytes = 3 * bytes_of(pair, 10)
    return pair, [pair.submit([i + 1] * 10, SamplingParams(12, ignore_eos=True)) for i in range(5)]


def tick(pair):
    """One small event at a time."""
    pair.p.step()
    for action in pair.link.actions()[:2]:
        pair.link.do(action)
    pair.d.step()


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("how", ["abort", "abort_all", "ended", "peer ended"])
@pytest.mark.parametrize("ticks", range(N_TICKS))
def test_an_end_at_every_stage(make_pair, side, how, ticks):
    """P: inbox, budget, pages, prefill, sent. D: inbox, ready, page queue, in flight, running, finished."""
    pair, legs = staged(make_pair)
    for _ in range(ticks):
        tick(pair)
    role, scheduler = ("prefill", pair.p) if side == "p" else ("decode", pair.d)
    live = [room for room in range(1, 6) if pair.link.half(role, room).state in LIVE]
    if how == "abort":
        for room in range(1, 6):
            scheduler.abort(f"r{room}")
    elif how == "abort_all":
        scheduler.abort_all()
    else:
        other = "decode" if role == "prefill" else "prefill"
        for room in range(1, 6):
            pair.link.end(role if how == "ended" else other, room)
    if how.startswith("abort"):
        scheduler.step()
        assert scheduler.stats()["used_pages"] == 0  # at once, whatever is in flight
        for room in live:
            assert pair.link.half(role, room).state == KVPoll.Failed
    pair.settle()
    for p, d in legs:
        p.assert_prefix(pair.p_config)
        d.assert_prefix(pair.d_config)
        assert p.end and d.end
        if how == "abort" and side == "d":
            assert d.end in ("abort", "length")
        if "ended" in how:  # a request that has begun to decode is no longer touched by its peer's end
            assert d.end == "length" if d.tokens else d.end in ("peer_lost", "peer_failed")
    pair.assert_initial()


def test_an_abort_at_p_is_not_of_a_retry_with_the_same_rid(make_pair):
    """The retry's room is claimed when the abort is read, and its request is not taken in yet (facts/router §0.6)."""
    pair = make_pair()
    _, first = pair.submit([1] * 10, LONG, rid="a")
    while pair.p.step():
        pass
    assert pair.half_state("prefill", 1) == KVPoll.Transferring  # and answered
    pair.p.abort("a")
    p, d = pair.submit([2] * 10, LONG, rid="a")
    pair.p.step()
    assert pair.half_state("prefill", 1) == KVPoll.Failed
    pair.settle()
    assert first.end == "peer_failed"
    assert_both_right(pair, p, d)
    assert pair.p.counts["aborts_unknown"] == 0
    pair.p.abort("a")
    pair.p.step()
    assert pair.p.counts["aborts_unknown"] == 1
    pair.assert_initial()


def test_every_stage_is_reached(make_pair):
    """The test above means something: its ticks meet requests in every queue of both sides."""
    pair, _ = staged(make_pair)
    seen = set()
    for _ in range(N_TICKS - 1):
        tick(pair)
        seen |= {queue.name for scheduler in (pair.p, pair.d) for queue in scheduler._queues() if queue}
    assert seen == {
        *("budget_queue", "waiting", "prefilling"),
        *("bootstrapping", "page_queue", "in_flight", "running"),
    }


def test_a_room_that_ended_between_claim_and_submit(make_pair):
    pair = make_pair()
    for side, scheduler, role in (("p", pair.p, "prefill"), ("d", pair.d, "decode")):
        client = Client([1] * 4, LONG, "r9", 9)
        scheduler.manager.claim(Leg(9, "r9", "digest", 4, "p.test", None))
        pair.link.end(role, 9, "client_abort")
        scheduler.step()  # its event meets nobody
        scheduler.submit(client.req)
        scheduler.step()
        assert client.end == "client_abort", side
    pair.assert_initial()


def test_a_room_the_manager_does_not_know(make_pair):
    pair = make_pair()
    for scheduler in (pair.p, pair.d):
        client = Client([1] * 4, LONG, "r9", 9)
        scheduler.submit(client.req)
        scheduler.step()
        assert client.end == "lost"
    pair.assert_initial()


def test_a_refused_request_ends_its_claimed_room(make_any_pair):
    pair = make_any_pair(p_config={"max_queue": 1}, d_config={"max_queue": 1})
    kept = pair.submit([1] * 4, LONG)
    assert pair.submit([2] * 4, LONG) == (None, None)
    pair.p.step()
    pair.d.step()
    for role in ("prefill", "decode"):
        assert pair.half_reason(role, 2) == "queue_full"
    pair.settle()
    assert_both_right(pair, *kept)
    pair.assert_initial()


def test_half_a_request_needs_a_room(make_pair):
    pair = make_pair()
    for scheduler in (pair.p, pair.d):
        with pytest.raises(PDError, match="no bootstrap_room") as refusal:
            scheduler.submit(Client([1] * 4).req)
        assert refusal.value.status == 400


def test_a_room_in_use_goes_on(make_pair):
    """Both schedulers survive a duplicate that the manager let through (S8)."""
    pair = make_pair()
    p, d = pair.submit([1] * 8, LONG)
    for scheduler in (pair.p, pair.d):
        twin = Client([2] * 8, LONG, "twin", 1)
        scheduler.submit(twin.req)
        scheduler.step()
        assert twin.end == "duplicate_room" and twin.finals[0].failure.status == 400
    pair.settle()
    assert_both_right(pair, p, d)
    pair.assert_initial()


# ---------------------------------------------------------------- failures


def pd_scenario(make_pair, p_fail=(), d_fail=(), after=False):
    pair = make_pair(
        p={"num_pages": 12, "fail_at": set(p_fail), "after": after},
        d={"num_pages": 24, "max_batch": 3, "fail_at": set(d_fail), "after": after},
    )
    rng = random.Random(7)
    legs = [
        pair.submit(
            random_prompt(rng, rng.randint(1, 16)), SamplingParams(rng.randint(1, 6), ignore_eos=True)
        )
        for _ in range(6)
    ]
    pair.settle()
    return pair, legs


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_failing_call_costs_only_its_own_requests(make_any_pair, side, after):
    pair, _ = pd_scenario(make_any_pair)
    calls = pair.p_runner.calls if side == "p" else pair.d_runner.calls
    assert {name for name, _ in calls} == ({"prefill", "gather"} if side == "p" else {"scatter", "decode"})
    for k, (name, _) in enumerate(calls):
        pair, legs = pd_scenario(make_any_pair, **{f"{side}_fail": {k}}, after=after)
        failed = [(p, d) for p, d in legs if "engine_error" in (p.end, d.end)]
        assert len(failed) == 1 or (name == "decode" and failed), (k, name)
        for p, d in legs:
            if (p, d) not in failed:
                assert_both_right(pair, p, d)
            elif side == "p":
                assert (p.end, d.end) == ("engine_error", "peer_failed") and not d.tokens
            else:
                assert p.end in ("length", "stop") and bool(d.tokens) == (name == "decode")
        for room in (p.room for p, d in failed):
            role = {"p": "prefill", "d": "decode"}[side]
            if name == "decode":
                assert pair.half_state(role, room) == KVPoll.Success
            else:
                assert pair.half_reason(role, room) == "engine_error"
        pair.assert_initial()


@pytest.mark.parametrize("side, call", [
    ("p", "create_sender"), ("p", "admit"), ("p", "send"), ("d", "create_receiver"), ("d", "receive"), ("d", "commit"),
    ("p", "abort"), ("d", "abort"),
])  # fmt: skip
def test_a_manager_call_that_raises_costs_one_request(make_pair, monkeypatch, side, call):
    pair = make_pair()
    manager = pair.p_manager if side == "p" else pair.d_manager
    target = manager if call.startswith("create") else None
    if target is None:
        import sched_fake_manager as fakes

        target = fakes.FakeSender if side == "p" else fakes.FakeReceiver
    real = getattr(target, call)

    def raising(*args, **kwargs):
        room = args[0] if target is manager else args[0].room
        if room == 1:
            raise RuntimeError(call)
        return real(*args, **kwargs)

    monkeypatch.setattr(target, call, raising)
    (p, d), others = pair.submit([1] * 8, LONG), [pair.submit([i] * 8, LONG) for i in (2, 3)]
    if call == "abort":
        pair.steps(1)
        (pair.p if side == "p" else pair.d).abort("r1")
    pair.settle()
    assert (p if side == "p" else d).end == "engine_error"
    for legs in others:
        assert_both_right(pair, *legs)
    assert pair.p.stats()["used_pages"] == pair.d.stats()["used_pages"] == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_ends_on_both_sides(make_any_pair, seed):
    """Aborts, failing calls and missing legs at random: everything ends once, rightly, and everything is free."""
    rng = random.Random(seed)
    pair = make_any_pair(
        budget_bytes=rng.choice([1, 2000, 1 << 40]),
        p={"num_pages": rng.choice([12, 40]), "fail_at": set(rng.sample(range(40), 3))},
        d={"num_pages": rng.choice([18, 60]), "fail_at": set(rng.sample(range(60), 3))},
    )
    legs = []
    for i in range(25):
        client = random_client(rng, i)
        both = rng.random() < 0.9 or not isinstance(
            pair, RealPair
        )  # a lone leg ends by a timer of the manager
        legs.append(pair.submit(client.prompt, client.sampling, sides="pd" if both else rng.choice("pd")))
        for _ in range(rng.randrange(8)):
            (pair.p if rng.random() < 0.5 else pair.d).step()
            pair.nudge(rng)
        if rng.random() < 0.3:
            (pair.p if rng.random() < 0.5 else pair.d).abort(f"r{rng.randint(1, i + 1)}")
    pair.settle()
    ends = set()
    for p, d in legs:
        for client in filter(None, (p, d)):
            client.assert_prefix(pair.d_config)
            assert client.end
            ends.add(client.end)
        if d is not None and d.end in ("stop", "length"):
            assert_both_right(pair, p, d)
    assert {"abort", "engine_error", "length"} <= ends
    pair.assert_initial()
