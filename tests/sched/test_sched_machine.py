"""Any order of submits, aborts, steps, messages, faults: allocators stay sound and every request ends once, rightly."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sched_fake_manager import LIVE
from sched_harness import FlakyRunner, assert_initial, make_null, random_client, run_out
from sched_pair import Pair

from pdjax.core.errors import PDError
from pdjax.engine.base import KVLanded
from pdjax.sched.radix_cache import CACHE_TOKEN

SETTINGS = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def assert_sound(scheduler) -> None:
    """Each page has one writer or is a cached one, and each live request that says it has pages holds them (S1)."""
    cache = scheduler.cache
    allocator = cache.allocator
    cache.check()
    live = [seq for seqs in scheduler._by_rid.values() for seq in seqs]
    unread = Counter(seq for step in scheduler._unread for seq in step.seqs)
    ended = [seq for seq in unread if seq.closed]  # a step under way still writes their pages
    held = Counter(page for seq in live + ended for page in seq.req.pages)
    cached = allocator.held(CACHE_TOKEN)
    assert {page for page, n in held.items() if n > 1} <= set(cached)
    assert len({*held, *cached}) == allocator.used_pages and len(cached) == cache.cached_pages
    for seq in live + ended:
        assert seq.unread == unread[seq]
        assert seq.has_pages == bool(seq.req.pages)
        unwritten = seq.req.pages[seq.computed // scheduler.runner.page_size :]
        assert not unwritten or allocator.owns(seq.token, unwritten)
        assert set(seq.req.pages) <= set(allocator.held(seq.token))
    assert sum(len(queue) for queue in scheduler._queues()) == len(live)
    assert len(scheduler.running) <= scheduler.max_running and len(scheduler.prefilling) <= 1
    assert 0 <= scheduler.stats()["queued"] <= scheduler.config.max_queue


class NullMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(5, 30),
        chunk=st.sampled_from([1, 4, 7, 64]),
        queue=st.integers(1, 6),
        off=st.booleans(),
        overlap=st.booleans(),
    )
    def begin(self, pages, chunk, queue, off, overlap):
        self.scheduler = make_null(
            FlakyRunner(num_pages=pages, max_batch=3),
            context_length=16,
            chunked_prefill_size=chunk,
            max_queue=queue,
            disable_radix_cache=off,
            overlap=overlap,
        )
        self.clients, self.aborted = [], set()

    @rule(seed=st.integers(0, 1 << 16))
    def submit(self, seed):
        client = random_client(random.Random(seed), len(self.clients), longest=12, most_new=12)
        try:
            self.scheduler.submit(client.req)
        except PDError as error:
            assert error.reason in ("queue_full", "bad_request")
        else:
            self.clients.append(client)

    @rule(n=st.integers(1, 6))
    def step(self, n):
        for _ in range(n):
            idle = self.scheduler.idle()
            assert self.scheduler.step() != idle

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def abort(self, data):
        client = data.draw(st.sampled_from(self.clients))
        self.aborted.add(client.rid)
        self.scheduler.abort(client.rid)

    @rule()
    def abort_all(self):
        self.aborted |= {client.rid for client in self.clients}
        self.scheduler.abort_all()

    @rule(ahead=st.integers(0, 2))
    def fail_a_call(self, ahead):
        self.scheduler.runner.fail_at.add(len(self.scheduler.runner.calls) + ahead)

    @rule(ahead=st.integers(0, 2))
    def fail_a_result(self, ahead):
        self.scheduler.runner.fail_collects.add(self.scheduler.runner.collects + ahead)

    @invariant()
    def sound(self):
        assert_sound(self.scheduler)

    def teardown(self):
        if not hasattr(self, "clients"):
            return
        self.scheduler.runner.fail_at.clear()
        self.scheduler.runner.fail_collects.clear()
        run_out(self.scheduler)
        assert_initial(self.scheduler)
        for client in self.clients:
            if client.end in ("stop", "length"):
                client.assert_right(self.scheduler.config)
            else:
                assert client.end == "engine_error" or (client.end == "abort" and client.rid in self.aborted)
                client.assert_prefix(self.scheduler.config)


class PairMachine(RuleBasedStateMachine):
    """Both roles, every message and landing a choice of its own."""

    @initialize(
        p_pages=st.integers(6, 20),
        d_pages=st.integers(6, 30),
        budget=st.sampled_from([1, 700, 1 << 40]),
        chunk=st.sampled_from([1, 4, 7, 64]),
        queue=st.integers(1, 6),
        off=st.booleans(),
        overlap=st.tuples(st.booleans(), st.booleans()),
    )
    def begin(self, p_pages, d_pages, budget, chunk, queue, off, overlap):
        limits = {"context_length": 16, "max_queue": queue}
        self.pair = Pair(
            budget_bytes=budget,
            p={"num_pages": p_pages},
            d={"num_pages": d_pages, "max_batch": 3},
            p_config={
                **limits,
                "chunked_prefill_size": chunk,
                "disable_radix_cache": off,
                "overlap": overlap[0],
            },
            d_config={**limits, "overlap": overlap[1]},
        )
        self.legs, self.landed = [], []

    @rule(seed=st.integers(0, 1 << 16), order=st.sampled_from(["pd", "dp", "p", "d"]))
    def submit(self, seed, order):
        client = random_client(random.Random(seed), 0, longest=12, most_new=12)
        self.legs.append(self.pair.submit(client.prompt, client.sampling, sides=order))

    @rule(n=st.integers(1, 4))
    def step_p(self, n):
        for _ in range(n):
            self.check_idle(self.pair.p, "prefill")

    @rule(n=st.integers(1, 4))
    def step_d(self, n):
        for _ in range(n):
            self.check_idle(self.pair.d, "decode")

    def check_idle(self, scheduler, role):
        quiet = scheduler.idle() and not self.pair.link.events[role]
        worked = scheduler.step()
        assert not (quiet and worked)

    @precondition(lambda self: self.pair.link.actions())
    @rule(data=st.data(), n=st.integers(1, 3))
    def world(self, data, n):
        for _ in range(n):
            if actions := self.pair.link.actions():
                index = data.draw(st.integers(0, len(actions) - 1))
                self.pair.link.do(actions[index])
                self.landed += [e for e in self.pair.link.events["decode"] if isinstance(e, KVLanded)]

    @precondition(lambda self: self.legs)
    @rule(data=st.data(), side=st.sampled_from("pd"))
    def abort(self, data, side):
        room = data.draw(st.integers(1, len(self.legs)))
        (self.pair.p if side == "p" else self.pair.d).abort(f"r{room}")

    @precondition(lambda self: self.legs)
    @rule(data=st.data(), role=st.sampled_from(["prefill", "decode"]), tell=st.booleans())
    def room_ends(self, data, role, tell):
        self.pair.link.end(role, data.draw(st.integers(1, len(self.legs))), "peer_lost", tell=tell)

    @precondition(lambda self: self.landed)
    @rule(data=st.data())
    def lands_again(self, data):
        self.pair.link.post("decode", data.draw(st.sampled_from(self.landed)))

    @rule()
    def peer_silence(self):
        self.pair.link.not_now = not self.pair.link.not_now

    @rule(side=st.sampled_from("pd"))
    def abort_all(self, side):
        (self.pair.p if side == "p" else self.pair.d).abort_all()

    @rule(ahead=st.integers(0, 2), side=st.sampled_from("pd"), after=st.booleans())
    def fail_a_call(self, ahead, side, after):
        runner = self.pair.p_runner if side == "p" else self.pair.d_runner
        runner.after = after
        runner.fail_at.add(len(runner.calls) + ahead)

    @rule(ahead=st.integers(0, 2), side=st.sampled_from("pd"))
    def fail_a_result(self, ahead, side):
        runner = self.pair.p_runner if side == "p" else self.pair.d_runner
        runner.fail_collects.add(runner.collects + ahead)

    @rule(seconds=st.sampled_from([0.001, 0.02, 1.0]))
    def time(self, seconds):
        self.pair.clock.advance(seconds)

    @invariant()
    def sound(self):
        assert_sound(self.pair.p)
        assert_sound(self.pair.d)

    def teardown(self):
        """Heal everything: what can end ends; what waits for a leg that never came is timed out as a manager would."""
        if not hasattr(self, "legs"):
            return
        pair = self.pair
        for runner in (pair.p_runner, pair.d_runner):
            runner.fail_at.clear()
            runner.fail_collects.clear()
        pair.link.not_now = False
        pair.settle()
        for (role, room), half in list(pair.link.halves.items()):
            if half.state in LIVE:
                pair.link.end(role, room, "bootstrap_timeout" if role == "decode" else "lease_expired")
        pair.settle()
        pair.assert_initial()
        for p, d in self.legs:
            if p is not None:
                assert p.end
                p.assert_prefix(pair.p_config)
                assert (p.end in ("stop", "length")) == (len(p.tokens) == 1)
            if d is not None:
                assert d.end
                if d.end in ("stop", "length"):
                    d.assert_right(pair.d_config)
                    assert p is not None and p.end in ("stop", "length")  # never without a P that said well
                else:
                    d.assert_prefix(pair.d_config)
                    assert d.end in ("abort", "engine_error") or not d.tokens


NullMachine.TestCase.settings = SETTINGS
PairMachine.TestCase.settings = SETTINGS
TestNullMachine = NullMachine.TestCase
TestPairMachine = PairMachine.TestCase
