"""The overlap loop: a step is launched before the one before it is read, and no client can tell (RFC-2 §5.4)."""

from __future__ import annotations

import random

import pytest
from sched_harness import (
    EOS,
    MODEL,
    Client,
    FlakyRunner,
    assert_initial,
    make_null,
    prompt_starting_with,
    random_client,
    random_prompt,
    run_out,
)
from sched_pair import Pair

from pdjax.engine.ports import PrefillChunk, SampleSpec
from pdjax.sched.request import SamplingParams
from pdjax.sim.runner import SimRunner, expected_tokens

PROMPT_TOKENS = ("prefill_tokens", "cached_tokens")
LONG = SamplingParams(max_new_tokens=20, ignore_eos=True)


class OrderRunner(FlakyRunner):
    """Keeps the order of launches and reads, as "name:launch number"."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.order: list[str] = []
        self.numbers: dict[int, int] = {}

    def _run(self, name, firsts, call):
        launched = super()._run(name, firsts, call)
        self.numbers[id(launched)] = len(self.calls)
        self.order.append(f"{name}:{len(self.calls)}")
        return launched

    def collect(self, launched):
        self.order.append(f"read:{self.numbers[id(launched)]}")
        return super().collect(launched)


def answers(scheduler, clients, seed):
    """Everything that the sinks of these requests heard, submitted at random moments."""
    rng = random.Random(seed)
    todo = list(clients)
    while todo or not scheduler.idle():
        for _ in range(rng.randrange(4)):
            if todo:
                scheduler.submit(todo.pop().req)
        scheduler.step()
    assert_initial(scheduler)
    return [(client.outputs, client.req.output_ids) for client in clients]


@pytest.mark.parametrize("seed", range(12))
def test_tokens_logprobs_and_ends_equal_those_of_the_normal_loop(seed):
    def run(overlap):
        rng = random.Random(seed)
        clients = [random_client(rng, i) for i in range(20)]
        runner = FlakyRunner(num_pages=rng.choice([18, 40, 90]), max_batch=rng.choice([1, 3, 8]))
        chunk = rng.choice([1, 3, 7, 64])
        scheduler = make_null(runner, chunked_prefill_size=chunk, overlap=overlap)
        return answers(scheduler, clients, seed), scheduler.stats()

    (overlapped, counts), (normal, plain) = run(True), run(False)
    assert overlapped == normal
    same = ("output_tokens", "finished_stop", "finished_length", "accepted")
    assert [counts[name] for name in same] == [plain[name] for name in same]
    # Which prompts meet another one's pages in the cache is a matter of turns.
    assert sum(counts[n] for n in PROMPT_TOKENS) == sum(plain[n] for n in PROMPT_TOKENS)
    assert plain["surplus_tokens"] == 0
    assert (counts["surplus_tokens"] > 0) == (counts["finished_stop"] > 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("p_overlap, d_overlap", [(True, True), (True, False), (False, True)])
def test_pd_equals_the_normal_loop_of_one_server(make_any_pair, seed, p_overlap, d_overlap):
    rng = random.Random(seed)
    pair = make_any_pair(
        p={"num_pages": 30}, d={"num_pages": 30}, p_config={"overlap": p_overlap}, d_config={"overlap": d_overlap}
    )  # fmt: skip
    null = make_null(overlap=False)
    both = []
    for i in range(15):
        client = random_client(rng, i)
        null.submit(client.req)
        run_out(null)
        both.append((client, *pair.submit(client.prompt, client.sampling)))
        for _ in range(rng.randrange(4)):
            pair.p.step(), pair.d.step(), pair.nudge(rng)
    pair.settle()
    for client, p, d in both:
        assert d.outputs == client.outputs
        assert p.tokens == client.tokens[:1]
    pair.assert_initial()


def test_a_step_is_launched_before_the_one_before_it_is_read():
    scheduler = make_null(OrderRunner(max_batch=2))
    client = Client([1] * 3, SamplingParams(max_new_tokens=4, ignore_eos=True))
    scheduler.submit(client.req)
    run_out(scheduler)
    assert scheduler.runner.order == [
        "prefill:1", "decode:2",
        "read:1", "decode:3", "read:2",
        "decode:4", "read:3",
        "read:4",
    ]  # fmt: skip
    client.assert_right(scheduler.config)


def test_no_row_is_launched_beyond_the_last_token():
    """The length is known beforehand: only a stop costs a surplus row."""
    scheduler = make_null(FlakyRunner(num_pages=4, max_batch=2))
    client = Client(
        [1] * 5, SamplingParams(max_new_tokens=7, ignore_eos=True)
    )  # all 12 positions of three pages
    scheduler.submit(client.req)
    run_out(scheduler)
    client.assert_right(scheduler.config)
    assert [name for name, _ in scheduler.runner.calls] == ["prefill"] + ["decode"] * 6
    assert scheduler.stats()["surplus_tokens"] == 0


def test_a_stop_is_seen_one_turn_late_and_its_pages_wait_for_the_step_under_way():
    scheduler = make_null(FlakyRunner(num_pages=40, max_batch=4))
    right = expected_tokens([2] * 5, LONG, 20, model=MODEL)
    stop = next(t for i, t in enumerate(right) if i >= 4 and t not in right[:i])
    n = right.index(stop) + 1
    client = Client([2] * 5, SamplingParams(20, ignore_eos=True, stop_token_ids=frozenset({stop})))
    scheduler.submit(client.req)
    while not client.end:
        scheduler.step()
    assert client.tokens == right[:n] and client.end == "stop"
    assert scheduler.stats()["used_pages"] > 0 and not scheduler.idle()
    assert not scheduler._queues()[-1] and scheduler.stats()["surplus_tokens"] == 0
    assert scheduler.step() and scheduler.idle()
    assert scheduler.stats()["surplus_tokens"] == 1
    assert_initial(scheduler)


def test_a_first_token_that_stops_costs_one_row_and_says_nothing_more():
    scheduler = make_null()
    client = Client(prompt_starting_with(EOS, 6))
    scheduler.submit(client.req)
    run_out(scheduler)
    assert client.tokens == [EOS] and client.end == "stop" and len(client.outputs) == 1
    assert scheduler.stats()["surplus_tokens"] == 1
    assert_initial(scheduler)


@pytest.mark.parametrize("steps", range(1, 7))
def test_an_abort_while_a_step_is_under_way(steps):
    """Nothing is heard after it, and nobody else writes the pages before that step is over."""
    scheduler = make_null(FlakyRunner(num_pages=13, max_batch=2), chunked_prefill_size=4)
    first = Client([1] * 8, SamplingParams(40, ignore_eos=True), "a")
    second = Client([2] * 8, SamplingParams(40, ignore_eos=True), "b")
    for client in (first, second):
        scheduler.submit(client.req)
    for _ in range(steps):
        scheduler.step()
    held = set(first.req.pages)
    under_way = scheduler.unread()
    scheduler.abort("a")
    scheduler.host_work()
    assert first.end == "abort"
    assert bool(held & set(second.req.pages)) == (not under_way)
    run_out(scheduler)
    assert len(first.finals) == 1
    first.assert_prefix(scheduler.config)
    second.assert_right(scheduler.config)
    assert_initial(scheduler)


def test_a_room_that_ends_during_its_prefill_offers_nothing():
    pair = Pair()
    p, _ = pair.submit([1] * 4, LONG, sides="p")
    pair.p.step()
    assert pair.p.unread() and pair.p.stats()["used_pages"] == 1
    pair.link.end("prefill", 1, "lease_expired")
    pair.p.step()
    assert p.end == "lease_expired" and not p.tokens
    assert [name for name, _ in pair.p_runner.calls] == ["prefill"]
    pair.settle()
    pair.assert_initial()


def test_p_takes_new_requests_in_while_it_computes_and_the_next_prompt_waits_for_the_gather():
    pair = Pair(p={"num_pages": 40})
    one, _ = pair.submit([1] * 4, LONG, sides="p")
    pair.p.step()
    two, _ = pair.submit([2] * 4, LONG, sides="p")
    pair.p.step()
    assert one.end == "length"
    assert [name for name, _ in pair.p_runner.calls] == ["prefill", "gather", "prefill"]
    assert pair.p.unread() and not two.tokens
    pair.settle()
    assert two.end == "length"


def test_what_lands_while_a_step_is_under_way_joins_the_next_launch():
    pair = Pair(d={"num_pages": 60, "max_batch": 4})
    one = pair.submit([1] * 4, LONG)[1]
    while not one.tokens:
        pair.steps(1)
    two = pair.submit([2] * 4, LONG)[1]
    while not two.tokens:
        assert pair.d.unread() or len(one.tokens) < 2
        pair.steps(1)
    name, firsts = pair.d_runner.calls[-1]
    assert name == "decode" and len(firsts) == 2
    pair.settle()
    for client in (one, two):
        client.assert_right(pair.d_config)


def test_a_request_that_follows_its_output_is_never_run_ahead():
    """Its rows have the token from the host, and its batch goes at the pace of the normal loop."""

    class Reading(OrderRunner):
        def decode(self, rows):
            assert all(row.token is not None for row in rows)
            return super().decode(rows)

    scheduler = make_null(Reading(num_pages=60, max_batch=4))
    follower, other = (
        Client([1] * 3, SamplingParams(6, ignore_eos=True, frequency_penalty=0.001), "a"),
        Client([2] * 3, LONG, "b"),
    )
    for client in (follower, other):
        scheduler.submit(client.req)
    scheduler.step()
    while not follower.end:
        before = scheduler.stats()["decode_steps"]
        scheduler.step()
        assert scheduler.stats()["decode_steps"] <= before + 1
    scheduler.runner.decode = lambda rows: OrderRunner.decode(
        scheduler.runner, rows
    )  # alone, the other runs ahead
    run_out(scheduler)
    assert len(follower.tokens) == 6 and follower.end == "length"
    other.assert_right(scheduler.config)
    assert_initial(scheduler)


def scenario(fail_at=(), fail_collects=()):
    runner = FlakyRunner(fail_at=set(fail_at), num_pages=30, max_batch=3)
    runner.fail_collects = set(fail_collects)
    scheduler = make_null(runner)
    rng = random.Random(5)
    clients = [
        Client(random_prompt(rng, rng.randint(1, 20)), SamplingParams(rng.randint(1, 8)), f"r{i}")
        for i in range(8)
    ]
    for client in clients:
        scheduler.submit(client.req)
    run_out(scheduler)
    assert_initial(scheduler)
    return scheduler, clients


@pytest.mark.parametrize("kind", ["fail_at", "fail_collects"])
def test_a_call_or_a_result_that_fails_costs_only_its_own_requests(kind):
    calm, _ = scenario()
    for k in range(len(calm.runner.calls) if kind == "fail_at" else calm.runner.collects):
        scheduler, clients = scenario(**{kind: {k}})
        ends = [client.end for client in clients]
        failed = [client for client in clients if client.end == "engine_error"]
        assert len(failed) <= 3 and set(ends) <= {"engine_error", "length", "stop"}
        assert scheduler.stats()["engine_errors"] == len(failed)
        for client in clients:
            client.assert_prefix(scheduler.config) if client in failed else client.assert_right(
                scheduler.config
            )


def test_what_was_sampled_before_a_launch_that_fails_is_heard():
    scheduler = make_null(FlakyRunner(fail_at={3}, max_batch=2))  # prefill, decode, decode, then this one
    client = Client([1] * 3, LONG)
    scheduler.submit(client.req)
    run_out(scheduler)
    assert client.end == "engine_error" and len(client.tokens) == 3
    client.assert_prefix(scheduler.config)
    assert_initial(scheduler)


def test_a_result_is_read_once():
    runner = SimRunner()
    step = runner.prefill(PrefillChunk([1], 0, [1], SampleSpec()))
    runner.collect(step)
    with pytest.raises(ValueError, match="collected already"):
        runner.collect(step)
