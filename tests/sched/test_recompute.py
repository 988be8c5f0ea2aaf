"""D computes a request itself when its P is lost: right tokens, a bounded number, and decoding goes on."""

from __future__ import annotations

import dataclasses
import random

import pytest
from sched_harness import random_prompt
from sched_pair import LONG, assert_both_right

from pdjax.core.kvpoll import KVPoll
from pdjax.engine.base import KVLanded
from pdjax.sched.request import SamplingParams

LOST = ("peer_lost", "part_failed", "transfer_timeout")
SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)
RECOMPUTES = {"recompute": True}


@pytest.fixture
def pair(make_pair):
    return make_pair(d_config=RECOMPUTES, d={"num_pages": 40, "max_batch": 4})


def prompt(n, seed=0):
    return random_prompt(random.Random(seed), n)


def lose(pair, room, reason="peer_lost"):
    """D's half ends as when its P is gone; P hears nothing."""
    pair.link.end("decode", room, reason, tell=False)


def until_in(pair, queue, ticks=200):
    """Small steps until D has a request in that queue."""
    for _ in range(ticks):
        if len(getattr(pair.d, queue)):
            return
        pair.p.step()
        for action in pair.link.actions()[:1]:
            pair.link.do(action)
        if not len(getattr(pair.d, queue)):
            pair.d.step()
    raise AssertionError(f"nothing in {queue}")


@pytest.mark.parametrize("reason", LOST)
@pytest.mark.parametrize("queue", ["bootstrapping", "page_queue", "in_flight"])
def test_the_right_tokens_whatever_was_under_way(pair, queue, reason):
    if queue == "page_queue":
        pair.link.not_now = True
    sampling = SamplingParams(max_new_tokens=9, temperature=1.0, seed=5, ignore_eos=True)
    _, d = pair.submit(prompt(17), sampling)
    until_in(pair, queue)
    lose(pair, 1, reason)
    pair.settle()
    d.assert_right(pair.d_config)
    assert pair.d.counts["recomputed"] == 1 and pair.d.counts["failed"] == 0
    pair.link.end("prefill", 1)  # what P still has is not D's any more
    pair.settle()
    pair.assert_initial()


def test_without_the_setting_the_request_fails(make_pair):
    pair = make_pair()
    _, d = pair.submit(prompt(9), SHORT)
    until_in(pair, "in_flight")
    lose(pair, 1)
    pair.link.end("prefill", 1)
    pair.settle()
    assert d.end == "peer_lost" and d.tokens == []


@pytest.mark.parametrize("reason", ["peer_failed", "client_abort", "no_compatible_peer", "bootstrap_timeout"])
def test_what_was_ended_on_purpose_is_not_computed(pair, reason):
    _, d = pair.submit(prompt(9), SHORT)
    until_in(pair, "bootstrapping")
    pair.link.end("decode", 1, reason)
    pair.settle()
    assert d.end == reason and pair.d.counts["recomputed"] == 0
    pair.assert_initial()


def test_a_landing_of_the_lost_attempt_finds_no_pages(pair):
    _, d = pair.submit(prompt(20), SHORT)
    until_in(pair, "in_flight")
    half = pair.link.half("decode", 1)
    packed, token = pair.link.half("prefill", 1).packed, half.token
    lose(pair, 1)
    pair.d.host_work()
    pair.link.post("decode", KVLanded(1, token, packed))
    pair.settle()
    d.assert_right(pair.d_config)
    assert pair.d.counts["late_landings"] == 1


def test_what_the_client_asked_of_the_prompt_is_not_answered_twice(pair):
    """P's half has its log-probabilities already: routers join the two (facts/router §3.1)."""
    sampling = dataclasses.replace(SHORT, prompt_logprobs_from=0)
    _, d = pair.submit(prompt(9), sampling)
    until_in(pair, "bootstrapping")
    lose(pair, 1)
    pair.settle()
    assert not any(output.prompt for output in d.outputs) and len(d.tokens) == 6


def test_an_abort_ends_it_in_the_queue_and_under_way(make_pair):
    pair = make_pair(d_config=RECOMPUTES, d={"num_pages": 12, "max_batch": 4})
    legs = [pair.submit(prompt(20, seed), SHORT) for seed in range(3)]
    for room in (1, 2, 3):
        lose(pair, room)
    pair.d.step()
    assert (len(pair.d.prefilling), len(pair.d.recompute)) == (1, 2)
    for room in (1, 3):
        pair.d.abort(f"r{room}")
    pair.settle()
    assert [d.end for _, d in legs] == ["abort", "length", "abort"]
    legs[1][1].assert_right(pair.d_config)


def test_decoding_goes_on_beside_a_long_prompt(make_pair):
    """A chunk in one of four steps, and never two prompts at once."""
    every = 4
    pair = make_pair(d_config={**RECOMPUTES, "recompute_every": every, "overlap": False})
    _, steady = pair.submit(prompt(5), LONG)
    while not steady.tokens:
        pair.steps(1)
    lost = [pair.submit(prompt(40, seed), SHORT, sides="d")[1] for seed in (1, 2)]
    for room in (2, 3):
        lose(pair, room)
    chunks = steps = 0
    while not steady.end:
        before = pair.d.counts["prefill_tokens"], pair.d.counts["decode_steps"]
        pair.d.step()
        chunks += pair.d.counts["prefill_tokens"] > before[0]
        steps += pair.d.counts["decode_steps"] - before[1]
        assert len(pair.d.prefilling) <= 1
    assert steps >= 15 and 0 < chunks <= steps / every + 1
    pair.settle()
    for one in lost:
        one.assert_right(pair.d_config)
    steady.assert_right(pair.d_config)


def test_only_so_many_wait_and_none_for_longer_than_a_request_may_take(make_pair):
    pair = make_pair(
        d_config={**RECOMPUTES, "max_recompute": 2, "request_timeout_s": 50.0}, d={"num_pages": 12}
    )
    filler = pair.submit(prompt(20), LONG)[1]  # holds the pages that the others need
    while not filler.tokens:
        pair.steps(1)
    legs = [pair.submit(prompt(20, seed), SHORT, sides="d")[1] for seed in range(4)]
    for room in (2, 3, 4, 5):
        lose(pair, room)
    pair.d.host_work()
    assert [one.end for one in legs] == ["", "", "peer_lost", "peer_lost"]
    assert pair.d.counts["recompute_refused"] == 2
    assert pair.d.next_wake() == 50.0
    pair.clock.advance_to(50.0)
    pair.d.host_work()
    assert [one.end for one in legs[:2]] == ["request_timeout"] * 2
    pair.settle()
    filler.assert_right(pair.d_config)


def test_pulls_wait_for_a_lost_request_whose_turn_it_is(make_pair):
    """It has waited longer than they: no stream of small ready ones takes its pages away for ever."""
    pair = make_pair(d_config=RECOMPUTES, d={"num_pages": 12, "max_batch": 4})
    filler = pair.submit(prompt(20), SHORT)[1]
    while not filler.tokens:
        pair.steps(1)
    big = pair.submit(prompt(30), SHORT, sides="d")[1]
    lose(pair, 2)
    pair.d.host_work()
    _, small = pair.submit(prompt(3), SHORT)
    for _ in range(6):
        pair.p.step()
        pair.link.pump()
        pair.d.host_work()
    assert len(pair.d.recompute) == 1 and len(pair.d.page_queue) == 1
    pair.settle()
    for one in (filler, big, small):
        one.assert_right(pair.d_config)
    assert pair.link.half("decode", 3).state == KVPoll.Success


def test_a_whole_pair_still_hands_off_with_the_setting_on(pair):
    legs = [pair.submit(prompt(11, seed), SHORT) for seed in range(5)]
    pair.settle()
    for p, d in legs:
        assert_both_right(pair, p, d)
    assert pair.d.counts["recomputed"] == 0
    pair.assert_initial()
