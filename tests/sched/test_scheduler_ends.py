"""The ordinary scheduler: aborts at every age, calls and sinks that fail."""

from __future__ import annotations

import random

import pytest
from sched_harness import (
    Boom,
    Client,
    FlakyRunner,
    assert_initial,
    make_null,
    random_prompt,
    run_out,
)

from pdjax.sched.request import SamplingParams
from pdjax.sim.runner import SimLaunch


def test_abort_is_exact_and_ends_every_bearer_of_the_rid():
    """Incidents B39 and L13: "1" is no prefix of "10", and the empty rid is nobody's."""
    scheduler = make_null()
    one, ten, again = Client([1] * 9, rid="1"), Client([2] * 9, rid="10"), Client([3] * 9, rid="1")
    for client in (one, ten, again):
        scheduler.submit(client.req)
    scheduler.abort("")
    scheduler.abort("1")
    scheduler.abort("1000")
    run_out(scheduler)
    assert one.end == again.end == "abort"
    ten.assert_right(scheduler.config)
    assert scheduler.stats()["aborts_unknown"] == 2
    assert_initial(scheduler)


def test_abort_request_spares_the_other_bearer_of_the_rid():
    scheduler = make_null()
    one, other = Client([1] * 9, rid="same"), Client([2] * 9, rid="same")
    for client in (one, other):
        scheduler.submit(client.req)
    scheduler.step()
    scheduler.abort_request(one.req)
    run_out(scheduler)
    assert one.end == "abort"
    other.assert_right(scheduler.config)


@pytest.mark.parametrize("steps", range(12))
def test_abort_at_every_age(steps):
    """Inbox, waiting, prefilling, running, finished: pages are back at once, one final Output."""
    scheduler = make_null(FlakyRunner(num_pages=20, max_batch=2), chunked_prefill_size=3)
    clients = [Client([i + 1] * 10, SamplingParams(5, ignore_eos=True), f"r{i}") for i in range(5)]
    for client in clients:
        scheduler.submit(client.req)
    for _ in range(steps):
        scheduler.step()
    places = {seq.queue.name for seqs in scheduler._by_rid.values() for seq in seqs}
    assert len(places) >= 2 or steps == 0
    scheduler.abort_all()
    scheduler.step()
    assert_initial(scheduler)
    assert all(client.end in ("abort", "length") for client in clients)
    for client in clients:
        client.assert_prefix(scheduler.config)


def test_abort_frees_pages_for_the_next_in_the_same_step():
    scheduler = make_null(FlakyRunner(num_pages=8, max_batch=2))
    first, second = Client([1] * 8, SamplingParams(20), "a"), Client([2] * 8, SamplingParams(20), "b")
    for client in (first, second):
        scheduler.submit(client.req)
    scheduler.step()
    scheduler.abort("a")
    scheduler.step()
    assert first.end == "abort" and second.req.times.scheduled is not None


# ---------------------------------------------------------------- failures


def scenario(fail_at=(), after=False):
    runner = FlakyRunner(fail_at=set(fail_at), after=after, num_pages=30, max_batch=3)
    scheduler = make_null(runner)
    rng = random.Random(5)
    clients = [
        Client(
            random_prompt(rng, rng.randint(1, 20)),
            SamplingParams(rng.randint(1, 8), ignore_eos=True),
            f"r{i}",
        )
        for i in range(8)
    ]
    for client in clients:
        scheduler.submit(client.req)
    hit = set()
    for _ in range(500):
        owner = {client.req.pages[0]: i for i, client in enumerate(clients) if client.req.pages}
        waiting = [i for i, client in enumerate(clients) if not client.req.pages and not client.outputs]
        n_calls = len(runner.calls)
        worked = scheduler.step()
        for k in range(n_calls, len(runner.calls)):
            if (
                k in runner.fail_at
            ):  # a request that took its pages in this very step is the first that waited
                hit |= {owner.get(page, waiting[0] if waiting else None) for page in runner.calls[k][1]}
        if not worked:
            break
    return scheduler, clients, hit


N_CALLS = len(scenario()[0].runner.calls)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("k", range(N_CALLS))
def test_a_failing_call_costs_only_its_own_requests(k, after):
    scheduler, clients, hit = scenario({k}, after)
    failed = {i for i, client in enumerate(clients) if client.end == "engine_error"}
    assert failed and failed == hit
    for i, client in enumerate(clients):
        if i in failed:
            assert client.finals[0].failure.status == 503
            client.assert_prefix(scheduler.config)
        else:
            client.assert_right(scheduler.config)
    assert scheduler.stats()["engine_errors"] == len(failed)
    assert_initial(scheduler)


def test_every_call_failing_still_ends_everything():
    scheduler, clients, _ = scenario(range(1000))
    assert {client.end for client in clients} == {"engine_error"}
    assert_initial(scheduler)


@pytest.mark.parametrize("broken", ["none instead of a token", "token too early", "short batch"])
def test_a_runner_that_breaks_its_contract_costs_only_its_requests(broken):
    class Broken(FlakyRunner):
        def prefill(self, chunk):
            sampled = super().prefill(chunk)
            if broken == "short batch" or chunk.tokens[0] != 9:
                return sampled
            return None if broken == "none instead of a token" else (sampled or SimLaunch([]))

        def decode(self, rows):
            launched = super().decode(rows)
            return SimLaunch(launched.sampled[:-1]) if broken == "short batch" else launched

    scheduler = make_null(Broken(num_pages=40, max_batch=4))
    n = 20 if broken == "token too early" else 5
    bad, good = (
        Client([9] * n, SamplingParams(4, ignore_eos=True), "a"),
        Client([2] * 5, SamplingParams(1), "b"),
    )
    scheduler.submit(bad.req)
    scheduler.submit(good.req)
    run_out(scheduler)
    assert bad.end == "engine_error"
    good.assert_right(scheduler.config)
    assert_initial(scheduler)


def test_a_sink_that_raises_harms_nobody():
    scheduler = make_null()

    def sink(output):
        heard.append(output)
        raise Boom("client is gone")

    heard = []
    bad, good = Client([1] * 5, SamplingParams(4, ignore_eos=True), "a"), Client([2] * 5, rid="b")
    bad.req.sink = sink
    for client in (bad, good):
        scheduler.submit(client.req)
    run_out(scheduler)
    good.assert_right(scheduler.config)
    assert [bool(output.finish) for output in heard] == [False, False, False, True]
    assert scheduler.stats()["sink_errors"] == 4
    assert_initial(scheduler)


def test_a_sink_may_submit_and_abort():
    scheduler = make_null()
    second = Client([2] * 5, rid="b")
    first = Client([1] * 5, SamplingParams(30, ignore_eos=True), rid="a")

    def sink(output):
        first.outputs.append(output)
        if len(first.outputs) == 1:
            scheduler.submit(second.req)
            scheduler.abort("a")

    first.req.sink = sink
    scheduler.submit(first.req)
    run_out(scheduler)
    assert first.end == "abort"
    second.assert_right(scheduler.config)


@pytest.mark.parametrize(("reason", "end"), [("client_abort", "abort"), ("draining", "draining")])
def test_what_a_leaving_server_has_said_nothing_of_may_be_tried_elsewhere(reason, end):
    scheduler = make_null()
    told, silent = Client([1] * 3, SamplingParams(40, ignore_eos=True), "a"), Client([2] * 60, rid="b")
    scheduler.submit(told.req)
    while not told.tokens:
        scheduler.step()
    scheduler.submit(silent.req)
    scheduler.abort_all(reason)
    scheduler.host_work()
    assert (told.end, silent.end) == ("abort", end)
