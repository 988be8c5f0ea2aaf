"""A paused scheduler computes and says nothing, loses nothing, and goes on where it was (facts/router §9, PauseResume)."""

import random

import pytest
from sched_harness import Client, assert_initial, make_null, random_client, run_out
from sched_pair import LONG, assert_both_right

from pdjax.sched.request import SamplingParams


def let_pass(pair, turns=400):
    """Whatever can happen in a pause happens; settling would let time pass until rooms expire."""
    rng = random.Random(turns)
    for _ in range(turns):
        pair.p.step()
        pair.d.step()
        pair.nudge(rng)


def set_paused(scheduler, paused):
    """Asks for it; it holds when the scheduler has answered."""
    told = []
    scheduler.pause(paused, lambda: told.append(paused))
    scheduler.step()
    assert told == [paused]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("turns", range(12))
def test_nothing_is_said_in_a_pause_and_the_tokens_are_right_after_it(turns, overlap):
    scheduler = make_null(overlap=overlap)
    clients = [random_client(random.Random(i), i, most_new=9) for i in range(4)]
    for client in clients[:3]:
        scheduler.submit(client.req)
    for _ in range(turns):
        scheduler.step()
    set_paused(scheduler, True)
    assert scheduler.stats()["paused"] == 1
    said, calls = [len(client.outputs) for client in clients], len(scheduler.runner.calls)
    scheduler.submit(clients[3].req)
    run_out(scheduler, 50)
    assert scheduler.idle()
    assert [len(client.outputs) for client in clients] == said and len(scheduler.runner.calls) == calls
    set_paused(scheduler, False)
    run_out(scheduler)
    for client in clients:
        client.assert_right(scheduler.config)
    assert_initial(scheduler)


def test_an_abort_ends_a_request_in_a_pause_and_frees_its_pages():
    scheduler = make_null()
    running, waiting = (
        Client([9, 8, 7], SamplingParams(max_new_tokens=20, ignore_eos=True), rid=name) for name in "ab"
    )
    scheduler.submit(running.req)
    scheduler.step()
    set_paused(scheduler, True)
    scheduler.submit(waiting.req)
    scheduler.abort_all()
    run_out(scheduler, 50)
    assert (running.end, waiting.end) == ("abort", "abort")
    assert_initial(scheduler)


@pytest.mark.parametrize("turns", range(10))
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_paused_half_holds_up_its_requests_and_ends_none(make_any_pair, side, turns):
    pair = make_any_pair()
    legs = [pair.submit([9, 8, 7, i], SamplingParams(1 + 4 * i, ignore_eos=True)) for i in range(3)]
    let_pass(pair, turns)
    paused = getattr(pair, side)
    set_paused(paused, True)
    said = [len(leg["pd".index(side)].outputs) for leg in legs]
    let_pass(pair)
    assert [len(leg["pd".index(side)].outputs) for leg in legs] == said
    set_paused(paused, False)
    pair.settle()
    for p, d in legs:
        assert_both_right(pair, p, d)
    pair.assert_initial()


def test_what_lands_in_a_pause_and_is_aborted_there_says_no_token(make_any_pair):
    pair = make_any_pair()
    set_paused(pair.d, True)
    _, d = pair.submit([9, 8, 7], LONG)
    let_pass(pair)
    assert d.outputs == [] and pair.d.stats()["in_flight"] == 1
    pair.d.abort_all()
    let_pass(pair)
    set_paused(pair.d, False)
    pair.settle()
    assert (d.end, d.tokens) == ("abort", [])
    pair.assert_initial()
