"""Steps that are launched before anything is read: the device feeds itself, and the answers are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from model_steps import run_decode, run_prefill

from pdjax.engine.ports import DecodeRow, PrefillChunk, SampleSpec
from pdjax.model.runner import JaxRunner
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Output, Request, SamplingParams
from pdjax.sched.scheduler import SchedulerConfig

MakeRunner = Callable[..., JaxRunner]
IDS = list(range(3, 40))
PAGES = [9, 3, 21, 14, 7, 30]


@pytest.mark.parametrize("sample", [SampleSpec(), SampleSpec(0.9, 77), SampleSpec(0.9, 77, top_k=20)])
def test_a_token_goes_from_step_to_step_on_the_device(sample: SampleSpec, make_runner: MakeRunner) -> None:
    """Every draw puts its token into the slot, the steered ones too; rows of other requests have slots of their own."""
    runner = make_runner()
    first = run_prefill(runner, PrefillChunk(IDS, 0, PAGES, sample))
    assert first is not None
    read = [first]
    for i in range(4):
        row = DecodeRow(read[-1].token, len(IDS) + i, PAGES, sample)
        other = DecodeRow(100 + i, i, [40], SampleSpec())
        read.append(run_decode(runner, [other, row])[1])
    fed = make_runner()
    launched = [fed.prefill(PrefillChunk(IDS, 0, PAGES, sample, slot=2))]
    for i in range(4):
        row = DecodeRow(None, len(IDS) + i, PAGES, sample, slot=2)
        launched.append(fed.decode([DecodeRow(100 + i, i, [40], SampleSpec(), slot=0), row]))
    answers = [fed.collect(step)[-1] for step in launched]
    assert [(a.token, a.logprob) for a in answers] == [(r.token, r.logprob) for r in read]
    assert len({a.token for a in answers}) > 1


def test_a_slot_that_does_not_exist_is_refused(make_runner: MakeRunner) -> None:
    runner = make_runner()
    for slot in (-2, runner.max_batch):
        with pytest.raises(ValueError, match=r"a slot lies in 0…3"):
            runner.decode([DecodeRow(1, 0, [1], SampleSpec(), slot=slot)])


def answers(runner: JaxRunner, overlap: bool) -> list[list[Output]]:
    """What twelve requests hear, of one server whose loop is overlapped or not."""
    rng = random.Random(4)
    config = SchedulerConfig(256, frozenset({2}), chunked_prefill_size=64, overlap=overlap)
    scheduler = make_scheduler("null", config, runner, time.monotonic)
    heard: list[list[Output]] = []
    for i in range(12):
        heard.append([])
        sampling = SamplingParams(
            max_new_tokens=rng.randint(1, 20),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1 << 40),
            stop_token_ids=frozenset(rng.sample(range(512), 60)),
            frequency_penalty=1.5 if i > 8 else 0.0,
            top_logprobs=rng.choice([0, 2]),
        )
        prompt = [rng.randrange(512) for _ in range(rng.randint(1, 90))]
        scheduler.submit(Request(f"r{i}", prompt, sampling, heard[-1].append))
        scheduler.step()
    while scheduler.step():
        pass
    assert scheduler.idle() and not any(output[-1].failure for output in heard)
    if overlap:
        assert scheduler.stats()["surplus_tokens"] > 0
    return heard


def test_the_overlap_loop_gives_what_the_normal_loop_gives(make_runner: MakeRunner) -> None:
    """Tokens and ends exactly; log-probabilities to the rounding of another batch's shape."""
    normal, overlapped = answers(make_runner(num_pages=200), False), answers(make_runner(num_pages=200), True)
    for one, other in zip(normal, overlapped, strict=True):
        assert [o.token_ids for o in one] == [o.token_ids for o in other]
        assert one[-1].finish == other[-1].finish
        mine, theirs = ([p for o in side for p in o.logprobs] for side in (one, other))
        assert theirs == pytest.approx(mine, abs=1e-5)
