"""One P and one D joined by the fake manager, and both legs of every request."""

from __future__ import annotations

import itertools

from sched_fake_manager import FakeManager, Link
from sched_harness import EOS, Client, FlakyRunner, assert_initial

from pdjax.core.errors import PDError
from pdjax.core.pools import Fingerprint, KVArgs, packed_bytes, pages_for, request_digest
from pdjax.engine.base import Leg
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import SamplingParams
from pdjax.sched.scheduler import SchedulerConfig
from pdjax.sim.ports import VirtualClock

LONG = SamplingParams(max_new_tokens=20, ignore_eos=True)


class Pair:
    """One P and one D over one link, and both legs of every request."""

    def __init__(self, *, budget_bytes=1 << 40, p=None, d=None, p_config=None, d_config=None) -> None:
        self.clock = VirtualClock()
        self.p_runner = self.make_runner(**{"num_pages": 40, **(p or {})})
        self.d_runner = self.make_runner(**{"num_pages": 40, "max_batch": 4, **(d or {})})
        config = {"context_length": 64, "eos_ids": frozenset({EOS}), "chunked_prefill_size": 7}
        self.p_config = SchedulerConfig(**{**config, **(p_config or {})})
        self.d_config = SchedulerConfig(**{**config, **(d_config or {})})
        self.p_manager, self.d_manager = self.make_managers(budget_bytes)
        self.p = make_scheduler("prefill", self.p_config, self.p_runner, self.clock, self.p_manager)
        self.d = make_scheduler("decode", self.d_config, self.d_runner, self.clock, self.d_manager)
        self.rooms = itertools.count(1)

    def make_runner(self, **settings):
        return FlakyRunner(**settings)

    def make_managers(self, budget_bytes):
        self.link = Link(budget_bytes=budget_bytes)
        return (
            FakeManager("prefill", self.link, kv_args("p", self.p_runner)),
            FakeManager("decode", self.link, kv_args("d", self.d_runner)),
        )

    def nudge(self, rng) -> None:
        """One of the things that may happen next in the world, or nothing."""
        if actions := self.link.actions():
            self.link.do(rng.choice(actions))

    def half_state(self, role, room):
        return self.link.half(role, room).state

    def half_reason(self, role, room):
        return self.link.half(role, room).error.reason

    def submit(
        self, prompt, sampling, *, sides="pd", room=None, rid=None, prepare=lambda client: None
    ) -> tuple[Client | None, Client | None]:
        """Claim and submit the legs named in sides; None for a leg that was refused or left out.

        prepare gives each leg what is its own, such as a grammar.
        """
        room = next(self.rooms) if room is None else room
        rid = rid or f"r{room}"
        legs = []
        for side, scheduler in (("p", self.p), ("d", self.d)):
            client = Client(prompt, sampling, rid, room)
            prepare(client)
            legs.append(self._leg(scheduler, client) if side in sides else None)
        return tuple(legs)

    def _leg(self, scheduler, client: Client) -> Client | None:
        digest = request_digest(client.prompt, client.sampling.first_token_key())
        leg = Leg(client.room, client.rid, digest, len(client.prompt), "p.test", None)
        scheduler.manager.claim(leg)
        try:
            scheduler.submit(client.req)
        except PDError:
            return None
        return client

    def settle(self, turns: int = 20_000) -> None:
        """Run both sides and the world until nothing can happen any more."""
        for _ in range(turns):
            worked = self.p.step()
            worked |= self.d.step()
            worked |= self.link.pump()
            if not worked:
                wake = self.d.next_wake()
                if wake is None:
                    return
                self.clock.advance_to(wake)
        raise AssertionError("the pair is still busy")

    def steps(self, n: int) -> None:
        """n turns of P, D and everything between them."""
        for _ in range(n):
            self.p.step()
            self.d.step()
            self.link.pump()

    def assert_initial(self) -> None:
        assert_initial(self.p)
        assert_initial(self.d)
        assert self.link.charged == 0


def kv_args(name: str, runner: FlakyRunner) -> KVArgs:
    fields = dict.fromkeys(Fingerprint.__struct_fields__, "")
    return KVArgs(runner.pools, runner.page_size, Fingerprint(**fields), name)


def assert_both_right(pair, p: Client, d: Client) -> None:
    """P answered with the first token alone, D with all of them: those of a lone request."""
    d.assert_right(pair.d_config)
    assert p.tokens == d.tokens[:1]
    assert p.end == ("stop" if d.end == "stop" and len(d.tokens) == 1 else "length")


def bytes_of(pair, n_prompt):
    return packed_bytes(pair.p_runner.pools, pages_for(n_prompt, pair.p_runner.page_size))
