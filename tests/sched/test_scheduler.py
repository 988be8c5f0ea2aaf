from __future__ import annotations

import random
import threading

import pytest
from sched_harness import (
    EOS,
    MODEL,
    Boom,
    Client,
    FlakyRunner,
    assert_initial,
    make_null,
    prompt_starting_with,
    random_client,
    random_prompt,
    run_out,
)
from sched_opcodes import opcodes

from pdjax.core.errors import ConfigError, PDError
from pdjax.core.pools import pages_for
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import SamplingParams
from pdjax.sched.scheduler import SchedulerConfig
from pdjax.sim.ports import VirtualClock
from pdjax.sim.runner import expected_tokens


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 512])
def test_many_requests_get_the_tokens_of_a_lone_one(seed, chunk):
    rng = random.Random(seed)
    scheduler = make_null(
        FlakyRunner(num_pages=rng.choice([18, 40, 90]), max_batch=4), chunked_prefill_size=chunk
    )
    clients = [random_client(rng, i) for i in range(30)]
    todo = list(clients)
    while todo or not scheduler.idle():
        for _ in range(rng.randrange(4)):
            if todo:
                scheduler.submit(todo.pop().req)
        scheduler.step()
        scheduler.cache.allocator.check()
    for client in clients:
        client.assert_right(scheduler.config)
    assert_initial(scheduler)
    assert max(len(firsts) for name, firsts in scheduler.runner.calls if name == "decode") > 1


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("max_new", [1, 2, 4, 5])
@pytest.mark.parametrize("chunk", [4, 5, 8])
def test_page_and_chunk_edges(n_prompt, max_new, chunk):
    """k·page-1, k·page, k·page+1 (incident L03), and the same around a chunk."""
    scheduler = make_null(chunked_prefill_size=chunk)
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    client = Client(random_prompt(random.Random(n_prompt), n_prompt), sampling)
    scheduler.submit(client.req)
    scheduler.step()
    assert scheduler.stats()["used_pages"] == pages_for(n_prompt + max_new, 4) or client.end
    run_out(scheduler)
    client.assert_right(scheduler.config)
    assert len(client.tokens) == max_new
    prefills = [name for name, _ in scheduler.runner.calls if name == "prefill"]
    assert len(prefills) == -(-n_prompt // chunk)
    assert_initial(scheduler)


def test_eos_first_ends_without_a_decode():
    scheduler = make_null()
    client = Client(prompt_starting_with(EOS, 6))
    scheduler.submit(client.req)
    run_out(scheduler)
    assert client.tokens == [EOS] and client.end == "stop" and client.finals[0].finish.matched == EOS
    assert all(name == "prefill" for name, _ in scheduler.runner.calls)
    assert_initial(scheduler)


def test_ignore_eos_and_stop_tokens():
    scheduler = make_null()
    prompt = prompt_starting_with(EOS, 6)
    on = Client(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True))
    right = expected_tokens(prompt, on.sampling, 9, model=MODEL)
    stop = next(token for token in right[1:] if token != EOS)
    stopped = Client(
        prompt, SamplingParams(max_new_tokens=9, ignore_eos=True, stop_token_ids=frozenset({stop}))
    )
    for client in (on, stopped):
        scheduler.submit(client.req)
    run_out(scheduler)
    assert on.tokens == right and on.end == "length"
    assert stopped.tokens == right[: right.index(stop) + 1] and stopped.end == "stop"


def test_the_context_length_caps_the_output():
    scheduler = make_null(context_length=20)
    client = Client([1] * 17, SamplingParams(max_new_tokens=100, ignore_eos=True))
    scheduler.submit(client.req)
    scheduler.step()
    assert scheduler.stats()["used_pages"] == 5  # 20 positions of 4, not 117
    run_out(scheduler)
    assert len(client.tokens) == 3 and client.end == "length"


def test_times_and_logprobs():
    clock = VirtualClock(100.0)
    runner = FlakyRunner(max_batch=2)
    scheduler = make_scheduler("null", SchedulerConfig(64, chunked_prefill_size=4), runner, clock)
    client = Client([1] * 6, SamplingParams(max_new_tokens=2))
    scheduler.submit(client.req)
    for _ in range(3):
        clock.advance(1.0)
        scheduler.step()
    times = client.req.times
    assert (times.arrived, times.scheduled, times.prefilled) == (100.0, 101.0, 102.0)
    assert (times.first_token, times.finished) == (
        102.0,
        102.0,
    )  # the decode shares the step of the last chunk
    assert [len(output.logprobs) for output in client.outputs] == [1, 1]


# ---------------------------------------------------------------- order and bounds


def test_fifo_no_overtaking():
    """A large head waits for pages, and a small one behind it does not slip past."""
    scheduler = make_null(FlakyRunner(num_pages=11, max_batch=4))
    forever = SamplingParams(max_new_tokens=20, ignore_eos=True)
    first, large, small = (
        Client([1] * 8, forever, "a"),
        Client([2] * 16, forever, "b"),
        Client([3], SamplingParams(1), "c"),
    )
    for client in (first, large, small):
        scheduler.submit(client.req)
    while not first.end:
        assert not large.outputs and not small.outputs
        assert small.req.times.scheduled is None
        scheduler.step()
    while not large.outputs:
        assert small.req.times.scheduled is None  # one prompt is prefilled at a time
        scheduler.step()
    run_out(scheduler)
    for client in (first, large, small):
        client.assert_right(scheduler.config)


def test_decode_goes_on_during_a_long_prefill():
    scheduler = make_null(chunked_prefill_size=2)
    running = Client([1] * 2, SamplingParams(max_new_tokens=30, ignore_eos=True), "a")
    long = Client([2] * 40, SamplingParams(1), "b")
    scheduler.submit(running.req)
    scheduler.step()
    scheduler.submit(long.req)
    for _ in range(10):
        before = len(running.tokens)
        scheduler.step()
        assert len(running.tokens) == before + 1
    assert not long.outputs


def test_max_running_bounds_the_batch():
    scheduler = make_null(FlakyRunner(num_pages=200, max_batch=8), max_running=3)
    clients = [Client([i + 1], SamplingParams(6, ignore_eos=True), f"r{i}") for i in range(9)]
    for client in clients:
        scheduler.submit(client.req)
    run_out(scheduler)
    assert max(len(firsts) for name, firsts in scheduler.runner.calls if name == "decode") == 3
    for client in clients:
        client.assert_right(scheduler.config)


def test_queue_bound():
    scheduler = make_null(max_queue=3)
    clients = [Client([1] * 8, rid=f"r{i}") for i in range(5)]
    for client in clients[:3]:
        scheduler.submit(client.req)
    with pytest.raises(PDError) as refusal:
        scheduler.submit(clients[3].req)
    assert refusal.value.status == 503 and refusal.value.reason == "queue_full"
    scheduler.step()  # one has started, so one more may wait
    scheduler.submit(clients[4].req)
    assert scheduler.stats()["queued"] == 3
    run_out(scheduler)
    assert not clients[3].outputs and scheduler.stats()["refused"] == 1
    assert_initial(scheduler)


@pytest.mark.parametrize(
    "prompt, sampling, says",
    [
        ([], SamplingParams(), "no tokens"),
        ([1], SamplingParams(max_new_tokens=0), "max_new_tokens=0"),
        ([1] * 64, SamplingParams(), "the context holds 64"),
        ([1] * 60, SamplingParams(), "needs 16 pages, the pool has 9"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt, sampling, says):
    scheduler = make_null(FlakyRunner(num_pages=10, max_batch=4))
    with pytest.raises(PDError, match=says) as refusal:
        scheduler.submit(Client(prompt, sampling).req)
    assert refusal.value.status == 400 and refusal.value.reason == "bad_request"
    run_out(scheduler)
    assert_initial(scheduler)


def test_wrong_settings_are_one_line():
    for wrong in ({"context_length": 1}, {"max_queue": 0}, {"chunked_prefill_size": 0}, {"max_running": -1}):
        with pytest.raises(ConfigError, match="set it to at least"):
            make_null(**wrong)
    with pytest.raises(ConfigError, match="set it to at most 4"):
        make_null(max_running=5)
    config = SchedulerConfig(64)
    with pytest.raises(ConfigError, match="choose null, prefill or decode"):
        make_scheduler("both", config, FlakyRunner(), VirtualClock())
    with pytest.raises(ConfigError, match="needs a KV manager"):
        make_scheduler("decode", config, FlakyRunner(), VirtualClock())


# ---------------------------------------------------------------- aborts


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
            return None if broken == "none instead of a token" else (sampled or SAMPLED)

        def decode(self, rows):
            return super().decode(rows)[: -1 if broken == "short batch" else None]

    from pdjax.engine.ports import Sampled

    SAMPLED = Sampled(1, 0.0)
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


# ---------------------------------------------------------------- the loop owner's side


def test_idle_means_that_a_step_does_nothing():
    scheduler = make_null()
    woken = []
    scheduler.wake = lambda: woken.append(scheduler.idle())
    assert scheduler.idle() and not scheduler.step() and scheduler.next_wake() is None
    client = Client([1] * 5)
    scheduler.submit(client.req)
    assert woken == [False]  # woken after the request is visible, or the loop may sleep on it
    while not scheduler.idle():
        assert scheduler.step()
    assert not scheduler.step()
    scheduler.abort("nobody")
    assert woken == [False, False]
    client.assert_right(scheduler.config)


def test_submits_and_aborts_from_many_threads():
    scheduler = make_null(FlakyRunner(num_pages=200, max_batch=8), max_queue=10_000)
    rng = random.Random(1)
    clients = [random_client(rng, i, longest=10, most_new=6) for i in range(200)]

    def work(mine):
        for client in mine:
            scheduler.submit(client.req)
            if int(client.rid[1:]) % 5 == 0:
                scheduler.abort(client.rid)
            scheduler.stats()

    threads = [threading.Thread(target=work, args=(clients[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not scheduler.idle():
        scheduler.step()
    for client in clients:
        if client.end == "abort":
            assert int(client.rid[1:]) % 5 == 0
            client.assert_prefix(scheduler.config)
        else:
            client.assert_right(scheduler.config)
    assert_initial(scheduler)


def test_a_step_costs_the_same_however_many_wait():
    """Counted in bytecodes, so that no machine is too slow for it."""

    def cost(n_waiting):
        scheduler = make_null(FlakyRunner(num_pages=8, max_batch=2), max_queue=20_000)
        blocker = Client([1] * 8, SamplingParams(20, ignore_eos=True), "blocker")
        scheduler.submit(blocker.req)
        for i in range(n_waiting):
            scheduler.submit(Client([2] * 8, SamplingParams(20), f"r{i}").req)
        for _ in range(4):
            scheduler.step()
        steady = opcodes(scheduler.step)
        scheduler.abort(f"r{n_waiting // 2}")
        abort = opcodes(scheduler.step)
        assert blocker.tokens and not blocker.end
        return steady, abort

    assert cost(10) == cost(10_000)
