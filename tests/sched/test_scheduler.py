"""The ordinary scheduler: right answers, order, bounds, cost of a step, threads."""

from __future__ import annotations

import random
import threading

import pytest
from sched_harness import (
    EOS,
    MODEL,
    NORMAL,
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
        FlakyRunner(num_pages=rng.choice([18, 40, 90]), max_batch=4),
        chunked_prefill_size=chunk,
        overlap=seed % 2 == 0,
    )
    clients = [random_client(rng, i) for i in range(30)]
    todo = list(clients)
    while todo or not scheduler.idle():
        for _ in range(rng.randrange(4)):
            if todo:
                scheduler.submit(todo.pop().req)
        scheduler.step()
        scheduler.cache.check()
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
    scheduler = make_null(**NORMAL)
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
    scheduler = make_scheduler("null", SchedulerConfig(64, chunked_prefill_size=4, **NORMAL), runner, clock)
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
    scheduler = make_null(chunked_prefill_size=2, **NORMAL)
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
