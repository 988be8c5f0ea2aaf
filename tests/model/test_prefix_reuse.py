"""The real model over shared pages: with the prefix cache on and off the same tokens, and log-probabilities in f32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdjax.model.runner import JaxRunner
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Output, Request, SamplingParams
from pdjax.sched.scheduler import Scheduler, SchedulerConfig
from pdjax.sim.ports import VirtualClock

MakeRunner = Callable[..., JaxRunner]
RNG = np.random.default_rng(5)
STEM = [int(t) for t in RNG.integers(3, 500, 43)]
TAILS = [[int(t) for t in RNG.integers(3, 500, n)] for n in (1, 9, 30, 5)]
PROMPTS = [[*STEM, *tail] for tail in TAILS] + [STEM, [*STEM[:17], *TAILS[2]], STEM]


@dataclass
class Answer:
    """What one request's sink heard."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    def hear(self, output: Output) -> None:
        assert output.failure is None, output
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.ended |= output.finish is not None


def submit(scheduler: Scheduler, name: str, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
    answer = Answer(Request(name, list(prompt), sampling, lambda output: answer.hear(output)))
    scheduler.submit(answer.request)
    return answer


def run(
    runner: JaxRunner, chunk: int, sampling: SamplingParams, *, off: bool, together: bool
) -> list[Answer]:
    config = SchedulerConfig(context_length=128, chunked_prefill_size=chunk, disable_radix_cache=off)
    scheduler = make_scheduler("null", config, runner, VirtualClock())
    answers = []
    for i, prompt in enumerate(PROMPTS):
        answers.append(submit(scheduler, f"r{i}", prompt, sampling))
        while not together and scheduler.step():
            pass
    while scheduler.step():
        pass
    assert all(answer.ended for answer in answers)
    scheduler.cache.check()
    assert scheduler.cache.available_pages() == scheduler.cache.capacity()
    return answers


@pytest.mark.parametrize(
    ("chunk", "together", "temperature"), [(10, False, 0.0), (10, True, 0.0), (64, True, 0.8)]
)
def test_on_and_off_say_the_same(
    chunk: int, together: bool, temperature: float, make_runner: MakeRunner
) -> None:
    sampling = SamplingParams(max_new_tokens=6, temperature=temperature, seed=7, ignore_eos=True)
    # 22 pages of 8: two requests and not all of what is cached, so that some is evicted.
    on = run(make_runner(num_pages=22), chunk, sampling, off=False, together=together)
    off = run(make_runner(num_pages=22), chunk, sampling, off=True, together=together)
    assert [a.tokens for a in on] == [a.tokens for a in off]
    for a, b in zip(on, off, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    assert sum(a.request.cached_tokens for a in on) > 100
    assert not any(a.request.cached_tokens for a in off)
