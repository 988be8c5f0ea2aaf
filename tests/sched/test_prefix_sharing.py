"""Requests that begin alike: what is prefilled once, what is handed over, what flush and failures leave."""

from __future__ import annotations

import random

import pytest
from sched_harness import STEMS, Client, FlakyRunner, assert_initial, make_null, random_client, run_out
from sched_pair import assert_both_right

from pdjax.core.pools import pages_for
from pdjax.sched.chunk_cache import ChunkCache
from pdjax.sched.radix_cache import RadixCache
from pdjax.sched.request import SamplingParams

STEM = STEMS[0][:16]  # four pages
FEW = SamplingParams(max_new_tokens=4, ignore_eos=True)


def serve(scheduler, *prompts, sampling=FEW):
    clients = [Client(list(prompt), sampling) for prompt in prompts]
    for client in clients:
        scheduler.submit(client.req)
        run_out(scheduler)
        client.assert_right(scheduler.config)
    return [client.req.cached_tokens for client in clients]


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_a_shared_prefix_is_prefilled_once(chunk):
    scheduler = make_null(chunked_prefill_size=chunk)
    cached = serve(scheduler, [*STEM, 1, 2], [*STEM, 3], STEM, [*STEM[:6], 9, 9, 9])
    assert cached == [0, 16, 12, 4]
    assert scheduler.stats()["prefill_tokens"] == 18 + 1 + 4 + 5
    assert scheduler.stats()["cached_tokens"] == sum(cached)
    assert_initial(scheduler)


def test_the_next_turn_of_a_conversation_finds_the_answer_too():
    scheduler = make_null()
    first = Client([*STEM, 1, 2, 3], SamplingParams(max_new_tokens=10, ignore_eos=True))
    scheduler.submit(first.req)
    run_out(scheduler)
    # 19 + 10 tokens, the last of which was never written: 28 positions, 7 pages.
    assert serve(scheduler, [*first.prompt, *first.tokens, 4, 5]) == [28]


def test_a_prefix_is_shared_as_soon_as_it_is_computed():
    scheduler = make_null(chunked_prefill_size=8)
    first, second = Client([*STEM, 1], FEW), Client([*STEM, 2], FEW)
    for client in (first, second):
        scheduler.submit(client.req)
    while not first.outputs:
        assert second.req.times.scheduled is None
        scheduler.step()
    scheduler.step()
    assert not first.end and second.req.cached_tokens == 16
    assert first.req.pages[:4] == second.req.pages[:4]
    run_out(scheduler)
    first.assert_right(scheduler.config)
    second.assert_right(scheduler.config)
    assert_initial(scheduler)


def test_what_an_abort_leaves_is_used():
    scheduler = make_null(chunked_prefill_size=6)
    client = Client([*STEM, 1], FEW)
    scheduler.submit(client.req)
    scheduler.step()
    scheduler.step()
    scheduler.abort("r")  # 12 tokens are computed: three pages
    run_out(scheduler)
    assert client.end == "abort" and scheduler.stats()["cached_pages"] == 3
    assert serve(scheduler, [*STEM, 2]) == [12]


@pytest.mark.parametrize("after", [False, True])
def test_what_a_failure_leaves_is_not(after):
    scheduler = make_null(
        FlakyRunner(num_pages=40, max_batch=4, fail_at={1}, after=after), chunked_prefill_size=6
    )
    client = Client([*STEM, 1], FEW)
    scheduler.submit(client.req)
    run_out(scheduler)
    assert client.end == "engine_error" and scheduler.stats()["cached_pages"] == 0
    assert serve(scheduler, [*STEM, 2], [*STEM, 3]) == [0, 16]


@pytest.mark.parametrize("seed", range(4))
def test_a_small_pool_full_of_prefixes_serves_everybody(seed):
    rng = random.Random(seed)
    scheduler = make_null(FlakyRunner(num_pages=18, max_batch=4))
    clients = [random_client(rng, i) for i in range(40)]
    for client in clients:
        scheduler.submit(client.req)
    run_out(scheduler)
    for client in clients:
        client.assert_right(scheduler.config)
    assert scheduler.cache.evicted_pages > 0 and scheduler.stats()["cached_tokens"] > 0
    assert_initial(scheduler)


def test_on_and_off_and_decode():
    assert isinstance(make_null().cache, RadixCache)
    off = make_null(disable_radix_cache=True)
    assert isinstance(off.cache, ChunkCache)
    assert serve(off, STEM, STEM) == [0, 0] and off.stats()["cached_pages"] == 0


def test_a_hand_off_sends_the_whole_prompt_and_says_what_was_cached(make_any_pair):
    pair = make_any_pair()
    assert isinstance(pair.p.cache, RadixCache) and isinstance(pair.d.cache, ChunkCache)
    gathered, gather = [], pair.p_runner.gather
    pair.p_runner.gather = lambda pages, slot=None: gathered.append(list(pages)) or gather(pages, slot)
    legs = []
    for prompt in ([*STEM, 1, 2], [*STEM, 3], STEM):
        legs.append(pair.submit(prompt, FEW))
        pair.settle()
    for p, d in legs:
        assert_both_right(pair, p, d)
    assert [p.req.cached_tokens for p, _ in legs] == [d.req.cached_tokens for _, d in legs] == [0, 16, 12]
    assert [len(pages) for pages in gathered] == [pages_for(n, 4) for n in (18, 17, 16)]
    assert gathered[0][:4] == gathered[1][:4] and gathered[2][:3] == gathered[0][:3]
    assert pair.p.stats()["prefill_tokens"] == 18 + 1 + 4
    pair.assert_initial()


def test_a_hand_off_that_fails_at_the_gather_leaves_what_others_read(make_pair):
    pair = make_pair()
    pair.submit([*STEM, 1], FEW)
    pair.settle()
    pair.p_runner.fail_at.add(len(pair.p_runner.calls) + 1)  # prefill, then gather
    p, _ = pair.submit([*STEM, 2], FEW)
    pair.settle()
    assert p.end == "engine_error"
    p, d = pair.submit([*STEM, 3], FEW)
    pair.settle()
    assert_both_right(pair, p, d)
    assert p.req.cached_tokens == 16
    pair.assert_initial()


# ---------------------------------------------------------------- flush


def test_flush_is_refused_while_a_request_is_here():
    scheduler, told = make_null(), []
    serve(scheduler, STEM)
    client = Client([*STEM, 1], FEW)
    scheduler.submit(client.req)
    scheduler.flush_cache(0.0, told.append)
    scheduler.step()
    assert told == [False] and client.req.cached_tokens == 16
    run_out(scheduler)
    assert scheduler.stats()["cached_pages"] > 0
    scheduler.flush_cache(0.0, told.append)
    run_out(scheduler)
    assert told == [False, True] and scheduler.stats()["cached_pages"] == 0
    assert serve(scheduler, [*STEM, 1]) == [0]


def test_flush_waits_for_the_last_request_or_for_its_time():
    scheduler, told = make_null(), []
    client = Client(STEM, FEW)
    scheduler.submit(client.req)
    scheduler.flush_cache(30.0, lambda done: told.append(("long", done)))
    scheduler.flush_cache(1.0, lambda done: told.append(("short", done)))
    scheduler.step()
    assert told == [] and scheduler.next_wake() == 1.0
    scheduler.clock.advance(1.0)
    scheduler.step()
    assert told == [("short", False)] and scheduler.next_wake() == 30.0
    run_out(scheduler)
    assert told == [("short", False), ("long", True)] and scheduler.next_wake() is None
    assert scheduler.stats()["cached_pages"] == 0


def test_a_flush_of_an_instance_that_waits_for_its_peer_ends_in_time(make_pair):
    pair, told = make_pair(), []
    pair.submit(STEM, FEW, sides="d")
    for scheduler, done in ((pair.p, True), (pair.d, False)):
        scheduler.flush_cache(2.0, told.append)
        scheduler.step()
        assert told == [True] and (scheduler.next_wake() is None) == done
    pair.clock.advance(2.0)
    pair.d.step()
    assert told == [True, False]
