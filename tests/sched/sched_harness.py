"""What the scheduler tests share: a client that records, a runner that fails on demand, a P-D pair to drive.

A Pair hides which manager joins its two sides, so that the same tests can run over another one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Output, Request, SamplingParams
from pdjax.sched.scheduler import Scheduler, SchedulerConfig
from pdjax.sim.ports import VirtualClock
from pdjax.sim.runner import SimModel, SimRunner, expected_tokens

EOS = 5
NORMAL = {"overlap": False}  # for what a test says of single turns
MODEL = SimModel()


@dataclass
class Client:
    """A request and everything its sink heard."""

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rid: str = "r"
    room: int | None = None
    outputs: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.req = Request(
            self.rid, self.prompt, self.sampling, self.outputs.append, room=self.room, bootstrap_host="p.test"
        )

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finals(self) -> list[Output]:
        return [output for output in self.outputs if output.finish or output.failure]

    @property
    def end(self) -> str:
        """ "" while open, else stop, length, abort or the reason of the failure. Checks: one final Output, the last."""
        if not self.finals:
            return ""
        assert len(self.finals) == 1 and self.outputs[-1] is self.finals[0], self.outputs
        final = self.finals[0]
        assert not (final.finish and final.failure)
        return final.finish.type if final.finish else final.failure.reason

    def right_tokens(self, config: SchedulerConfig) -> list[int]:
        n = min(self.sampling.max_new_tokens, config.context_length - len(self.prompt))
        return expected_tokens(self.prompt, self.sampling, n, model=MODEL, eos_ids=config.eos_ids)

    def assert_right(self, config: SchedulerConfig) -> None:
        """The whole answer came, token by token what a lone request would get, with the right reason."""
        right = self.right_tokens(config)
        assert self.tokens == right == self.req.output_ids
        stops = set(self.sampling.stop_token_ids) | (
            set() if self.sampling.ignore_eos else set(config.eos_ids)
        )
        assert self.end == ("stop" if right[-1] in stops else "length")
        if self.end == "stop":
            assert self.finals[0].finish.matched == right[-1]

    def assert_prefix(self, config: SchedulerConfig) -> None:
        """Whatever came before the end was right."""
        assert self.tokens == self.right_tokens(config)[: len(self.tokens)]


class Boom(RuntimeError):
    """The failure that FlakyRunner injects."""


class FlakyRunner(SimRunner):
    """Counts its calls; the calls whose numbers are in ``fail_at`` raise, before or after they did their work."""

    def __init__(self, *, fail_at: set[int] = frozenset(), after: bool = False, **kwargs) -> None:
        super().__init__(model=MODEL, **kwargs)
        self.fail_at = set(fail_at)
        self.fail_collects: set[int] = set()  # likewise of the collect calls
        self.collects = 0
        self.after = after
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # name, first page of each request in the call

    def _run(self, name, firsts, call):
        self.calls.append((name, tuple(firsts)))
        fails = len(self.calls) - 1 in self.fail_at
        if fails and not self.after:
            raise Boom(name)
        result = call()
        if fails:
            raise Boom(name)
        return result

    def prefill(self, chunk):
        return self._run("prefill", chunk.pages[:1], lambda: SimRunner.prefill(self, chunk))

    def decode(self, rows):
        return self._run("decode", [row.pages[0] for row in rows], lambda: SimRunner.decode(self, rows))

    def collect(self, launched):
        self.collects += 1
        if self.collects - 1 in self.fail_collects:
            raise Boom("collect")
        return SimRunner.collect(self, launched)

    def gather(self, pages, slot=None):
        return self._run("gather", pages[:1], lambda: SimRunner.gather(self, pages, slot))

    def scatter(self, pages, packed):
        return self._run("scatter", pages[:1], lambda: SimRunner.scatter(self, pages, packed))


def make_null(runner: SimRunner | None = None, **config) -> Scheduler:
    config = {"context_length": 64, "eos_ids": frozenset({EOS}), "chunked_prefill_size": 7, **config}
    return make_scheduler(
        "null", SchedulerConfig(**config), runner or FlakyRunner(num_pages=40, max_batch=4), VirtualClock()
    )


def run_out(scheduler: Scheduler, steps: int = 20_000) -> None:
    for _ in range(steps):
        if not scheduler.step():
            return
    raise AssertionError("the scheduler is still busy")


def assert_initial(scheduler: Scheduler) -> None:
    """Nothing of any request is left (S3: allocators return to the initial value)."""
    scheduler.cache.check()
    stats = scheduler.stats()
    assert stats["used_pages"] == 0 and stats["free_pages"] == scheduler.runner.num_pages - 1
    assert scheduler.cache.flush() == stats["cached_pages"] and scheduler.cache.allocator.used_pages == 0
    assert stats["queued"] == 0 and not scheduler._by_rid and scheduler.idle()
    assert all(len(queue) == 0 for queue in scheduler._queues())
    assert not getattr(scheduler, "_rooms", {})
    assert (
        sum(stats[name] for name in ("finished_stop", "finished_length", "finished_abort", "failed"))
        == stats["accepted"]
    )


def random_prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(MODEL.n_vocab) for _ in range(n)]


STEMS = [random_prompt(random.Random(i), 60) for i in range(2)]


def likely_prompt(rng: random.Random, n: int) -> list[int]:
    """Often begins as others do."""
    stem = rng.choice([[], *STEMS])[: rng.randint(0, n)]
    return stem + random_prompt(rng, n - len(stem))


def random_client(rng: random.Random, i: int, *, longest: int = 40, most_new: int = 30, room=None) -> Client:
    sampling = SamplingParams(
        max_new_tokens=rng.randint(1, most_new),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1 << 40),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=frozenset(rng.sample(range(MODEL.n_vocab), rng.choice([0, 0, 2]))),
    )
    return Client(likely_prompt(rng, rng.randint(1, longest)), sampling, rid=f"r{i}", room=room)


def prompt_starting_with(token: int, n: int, *, seed: int = 0) -> list[int]:
    """A prompt of n tokens whose first greedy output is token."""
    rng = random.Random(seed)
    while True:
        prompt = random_prompt(rng, n)
        if expected_tokens(prompt, SamplingParams(), 1, model=MODEL) == [token]:
            return prompt
