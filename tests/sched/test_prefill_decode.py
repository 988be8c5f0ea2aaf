"""The prefill and the decode half together: right answers, times, cost of a step, wiring."""

from __future__ import annotations

import random

import pytest
from sched_harness import EOS, NORMAL, make_null, prompt_starting_with, random_client, random_prompt, run_out
from sched_opcodes import opcodes
from sched_pair import LONG, assert_both_right

from pdjax.core.errors import ConfigError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import pages_for
from pdjax.engine.base import KVEnded
from pdjax.sched.decode import DecodeScheduler, bootstrap_addr
from pdjax.sched.factory import make_scheduler
from pdjax.sched.prefill import PrefillScheduler
from pdjax.sched.request import Request, SamplingParams


@pytest.mark.parametrize("seed", range(8))
def test_many_requests_get_the_tokens_of_a_lone_one(make_any_pair, seed):
    rng = random.Random(seed)
    pair = make_any_pair(
        budget_bytes=rng.choice([1, 2000, 1 << 40]),
        p={"num_pages": rng.choice([12, 40])},
        d={"num_pages": rng.choice([18, 60])},
        p_config={"chunked_prefill_size": rng.choice([1, 5, 8, 512]), "overlap": rng.random() < 0.5},
        d_config={"overlap": rng.random() < 0.5},
    )
    todo, legs = [random_client(rng, i) for i in range(30)], []
    while todo:
        for _ in range(rng.randrange(3)):
            if todo:
                client = todo.pop()
                legs.append(pair.submit(client.prompt, client.sampling))
        for _ in range(rng.randrange(4)):
            (pair.p if rng.random() < 0.5 else pair.d).step()
            pair.nudge(rng)
    pair.settle()
    for p, d in legs:
        assert_both_right(pair, p, d)
    assert pair.d.stats()["late_landings"] == pair.d.stats()["failed"] == pair.p.stats()["failed"] == 0
    assert all(name in ("scatter", "decode") for name, _ in pair.d_runner.calls)  # D prefills nothing
    assert all(name in ("prefill", "gather") for name, _ in pair.p_runner.calls)
    pair.assert_initial()


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("max_new", [1, 2, 5])
def test_page_edges(make_any_pair, n_prompt, max_new):
    pair = make_any_pair()
    p, d = pair.submit(
        random_prompt(random.Random(n_prompt), n_prompt), SamplingParams(max_new, ignore_eos=True)
    )
    pair.p.step()
    assert pair.p.stats()["used_pages"] in (0, pages_for(n_prompt, 4))  # P owns no page for outputs
    pair.settle()
    assert_both_right(pair, p, d)
    decodes = [name for name, _ in pair.d_runner.calls if name == "decode"]
    assert len(decodes) == max_new - 1  # the first token is P's: D never computes it again
    pair.assert_initial()


def test_eos_first_stops_both_and_decodes_nothing(make_any_pair):
    pair = make_any_pair()
    p, d = pair.submit(prompt_starting_with(EOS, 6), SamplingParams())
    pair.settle()
    assert p.tokens == d.tokens == [EOS] and p.end == d.end == "stop"
    assert [name for name, _ in pair.d_runner.calls] == ["scatter"]
    assert pair.half_state("decode", 1) == KVPoll.Success  # pulled and scattered all the same (protocol §5)
    pair.assert_initial()


def test_pd_equals_null(make_any_pair):
    rng = random.Random(3)
    pair, null = make_any_pair(), make_null()
    for i in range(12):
        client = random_client(rng, i)
        _, d = pair.submit(client.prompt, client.sampling)
        null.submit(client.req)
        run_out(null)
        pair.settle()
        assert d.tokens == client.tokens and d.end == client.end
        assert [o.logprobs for o in d.outputs] == [o.logprobs for o in client.outputs]


def test_times_of_both_sides(make_pair):
    pair = make_pair(p_config={"chunked_prefill_size": 4, **NORMAL}, d_config=NORMAL)
    pair.clock.advance(10)
    p, d = pair.submit([1] * 6, SamplingParams(2, ignore_eos=True))
    for _ in range(8):
        pair.clock.advance(1)
        pair.steps(1)
    t = p.req.times
    assert (t.arrived, t.scheduled, t.prefilled, t.first_token, t.finished) == (10, 11, 12, 12, 12)
    t = d.req.times
    assert (t.arrived, t.ready, t.scheduled, t.landed, t.scattered, t.first_token) == (10, 13, 13, 14, 14, 14)
    assert t.finished == 14 and t.prefilled is None
    assert (t.peer_queue_s, t.peer_prefill_s) == (1.0, 1.0)
    assert d.end == "length"


# ---------------------------------------------------------------- cost and wiring


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_step_costs_the_same_however_many_wait(make_pair, side):
    def cost(n):
        pair = make_pair(budget_bytes=1, p_config={"max_queue": 20_000}, d_config={"max_queue": 20_000})
        for i in range(n):
            pair.submit([1 + i % 9] * 4, LONG, sides=side)
        scheduler = pair.p if side == "p" else pair.d
        for _ in range(5):
            scheduler.step()
        assert scheduler.stats()["queued"] >= n - 1
        steady = opcodes(scheduler.step)
        role = {"p": "prefill", "d": "decode"}[side]
        pair.link.post(role, KVEnded(n // 2, 503, "peer_lost", "x"))
        ended = opcodes(scheduler.step)
        assert not scheduler.step() and scheduler.idle()
        return steady, ended

    assert cost(10) == cost(10_000)


def test_the_page_queue_is_not_scanned(make_pair):
    def cost(n):
        pair = make_pair(
            d={"num_pages": 7, "max_batch": 4}, d_config={"max_queue": 20_000}, p_config={"max_queue": 20_000}
        )
        for _ in range(n):
            pair.submit([1] * 4, LONG)
        while pair.p.step():
            pass
        pair.d.step()
        for room in range(1, n + 1):
            half = pair.link.half("prefill", room)
            pair.link.half("decode", room).state = KVPoll.WaitingForInput
            pair.link._ready(room)
            assert half.n_pages == 1
        pair.d.step()
        assert pair.d.stats()["page_queue"] == n - 1
        return opcodes(pair.d.step)

    assert cost(10) == cost(2_000)


def test_wiring(make_pair):
    pair = make_pair()
    assert type(pair.p) is PrefillScheduler and type(pair.d) is DecodeScheduler
    assert pair.p_manager.runner is pair.p_runner and pair.d_manager.runner is pair.d_runner
    with pytest.raises(ConfigError, match="takes no KV manager"):
        make_scheduler("null", pair.p_config, pair.p_runner, pair.clock, pair.p_manager)
    with pytest.raises(ConfigError, match="needs a KV manager"):
        DecodeScheduler(pair.d_config, pair.d_runner, pair.clock, pair.d.cache)
    request = Request("r", [1], LONG, print, bootstrap_host="10.0.0.1", bootstrap_port=8998)
    assert bootstrap_addr(request) == "10.0.0.1:8998"
    request.bootstrap_port = None
    assert bootstrap_addr(request) == "10.0.0.1"
