"""The simulated runner tells every kind of wrong page: otherwise the scheduler tests would prove nothing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import xxhash

from pdjax.core.pools import page_bucket, plan_parts
from pdjax.engine.ports import DecodeRow, Edits, PrefillChunk, SampleSpec
from pdjax.sched.request import SamplingParams
from pdjax.sim.ports import VirtualClock
from pdjax.sim.runner import POISON, SimModel, SimRunner, expected_tokens

GREEDY = SampleSpec()
MODEL = SimModel(n_vocab=1 << 30, n_layers=3)  # so many tokens that two histories never agree by chance
PROMPT = [7, 1, 7, 1, 7, 1, 7, 1, 3, 5]
PAGES = [9, 2, 11, 4]


def sampled_by(runner, launched):
    [sampled] = runner.collect(launched)
    return sampled.token


def answer(runner, pages, n, prompt=PROMPT, sample=GREEDY):
    tokens = [sampled_by(runner, runner.prefill(PrefillChunk(prompt, 0, pages, sample)))]
    while len(tokens) < n:
        row = DecodeRow(tokens[-1], len(prompt) + len(tokens) - 1, pages, sample)
        tokens.append(sampled_by(runner, runner.decode([row])))
    return tokens


@pytest.fixture
def runner():
    return SimRunner(model=MODEL, num_pages=20)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=1 << 40)])
def test_answers_are_the_expected_ones(runner, sampling):
    sample = SampleSpec(sampling.temperature, sampling.seed)
    assert answer(runner, PAGES, 6, sample=sample) == expected_tokens(PROMPT, sampling, 6, model=MODEL)


def test_what_decides_a_token():
    def tokens(**kwargs):
        return expected_tokens(PROMPT, SamplingParams(**kwargs), 3, model=MODEL)

    assert tokens(temperature=0.0, seed=1) == tokens(temperature=0.0, seed=2)
    assert tokens(temperature=1.0, seed=1) != tokens(temperature=1.0, seed=2)
    stop = tokens()[1]
    assert tokens(stop_token_ids=frozenset({stop})) == tokens()[:2]
    assert expected_tokens(PROMPT, SamplingParams(), 3, model=MODEL, eos_ids={stop}) == tokens()[:2]
    assert (
        expected_tokens(PROMPT, SamplingParams(ignore_eos=True), 3, model=MODEL, eos_ids={stop}) == tokens()
    )


@pytest.mark.parametrize("cuts", [[3], [4], [5], [4, 8], [1, 2, 9]])
def test_chunks_make_no_difference(runner, cuts):
    edges = [0, *cuts, len(PROMPT)]
    for start, stop in itertools.pairwise(edges):
        sample = GREEDY if stop == len(PROMPT) else None
        launched = runner.prefill(PrefillChunk(PROMPT[start:stop], start, PAGES, sample))
    assert [sampled_by(runner, launched)] == expected_tokens(PROMPT, SamplingParams(), 1, model=MODEL)


@pytest.mark.parametrize(
    "damage",
    [
        "one word",
        "the other layer",
        "swapped pages",
        "stale page",
        "foreign page",
        "never written",
        "reserved page",
    ],
)
def test_every_wrong_page_is_a_wrong_token(runner, damage):
    runner.prefill(PrefillChunk(PROMPT, 0, PAGES, None))
    runner.prefill(PrefillChunk(PROMPT[::-1], 0, [15, 16, 17], None))
    pages = list(PAGES)
    if damage == "one word":
        runner.kv[0, 2, 1, 1] ^= 1
    elif damage == "the other layer":
        runner.kv[2, 9, 3, 0] ^= 1 << 63
    elif damage == "swapped pages":
        pages[0], pages[1] = pages[1], pages[0]
    elif damage == "stale page":
        runner.kv[:, 11] = runner.kv[:, 9]
    elif damage == "foreign page":
        pages[1] = 16
    elif damage == "never written":
        pages[1] = 18
    else:
        runner.kv[:, 2] = runner.kv[:, 0]
    right = expected_tokens([*PROMPT, 3], SamplingParams(), 1, model=MODEL)
    assert [sampled_by(runner, runner.decode([DecodeRow(3, 10, PAGES, GREEDY)]))] == right or pages == PAGES
    assert [sampled_by(runner, runner.decode([DecodeRow(3, 10, pages, GREEDY)]))] != right


@pytest.mark.parametrize("n_pages", [1, 2, 3, 4, 5, 7])
def test_gather_and_scatter_move_the_content(runner, n_pages):
    prompt = [random.Random(n_pages).randrange(100) for _ in range(n_pages * 4 - 1)]
    source, target = list(range(1, 1 + n_pages)), list(range(19, 19 - n_pages, -1))
    answer(runner, source, 1, prompt)
    packed = runner.gather(source)
    assert [part.nbytes for part in packed.parts] == [array.nbytes for array in packed.arrays]
    assert [part.checksum for part in packed.parts] == [
        xxhash.xxh3_64_intdigest(a.tobytes()) for a in packed.arrays
    ]
    assert packed.arrays[0].shape[1] == page_bucket(n_pages)
    runner.kv[:, source] = POISON  # the arrays are private: what happens to the pages now is no matter
    other = SimRunner(model=MODEL, num_pages=20)
    other.scatter(target, packed)
    assert (
        other.kv[:, [p for p in range(1, 20) if p not in target]] == POISON
    ).all()  # padding goes to page 0
    right = expected_tokens([*prompt, 3], SamplingParams(), 1, model=MODEL)
    assert [sampled_by(other, other.decode([DecodeRow(3, len(prompt), target, GREEDY)]))] == right


def test_padding_repeats_the_last_page_of_the_request(runner):
    """No other request's bytes travel in it."""
    runner.kv[:, 1:6] = np.arange(5, dtype=np.uint64).reshape(5, 1, 1)
    (array,) = runner.gather([1, 2, 3, 4, 5]).arrays
    assert array.shape[1] == 6 and (array[:, 5] == array[:, 4]).all()


def test_checksums_can_be_off():
    packed = SimRunner(checksums=False).gather([1, 2])
    assert packed.parts == plan_parts(SimRunner().pools, 2)


def test_wrong_calls_raise(runner):
    with pytest.raises(ValueError, match="outside a page table of 2 pages"):
        runner.prefill(PrefillChunk(PROMPT, 0, [1, 2], None))
    for page in (0, 20):
        with pytest.raises(ValueError, match=r"pages lie in 1…19"):
            runner.prefill(PrefillChunk([1], 0, [page], None))
    with pytest.raises(ValueError, match="between 1 and max_batch=8"):
        runner.decode([])
    with pytest.raises(ValueError, match="not those of 3 pages"):
        runner.scatter([1, 2, 3], runner.gather([4, 5]))


def test_virtual_clock():
    clock = VirtualClock(1.0)
    clock.advance(0.5)
    assert clock() == 1.5
    clock.advance_to(1.0)
    assert clock() == 1.5
    clock.advance_to(2.0)
    assert clock() == 2.0
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_edits_and_masks_change_a_token_as_they_do_on_a_device():
    model = SimModel(n_vocab=40)
    runner = SimRunner(model=model, num_pages=20)

    def token(**spec):
        return sampled_by(runner, runner.prefill(PrefillChunk(PROMPT, 0, PAGES, SampleSpec(**spec))))

    def edits(token, add):
        return Edits(np.array([token], np.int32), np.ones(1, np.float32), np.array([add], np.float32))

    best = token()
    after = (best + 1) % 40
    assert token(edits=edits(best, -0.5)) == best and token(edits=edits(best, -1.5)) == after
    assert token(edits=edits((best + 7) % 40, 7.5)) == (best + 7) % 40
    for only in (0, 31, 32, 39):
        words = np.zeros(2, np.uint32)
        words[only // 32] = 1 << (only % 32)
        assert token(allowed=words) == only


def test_a_score_is_what_sampling_would_have_said(runner):
    """Chunked or not: the log-probability of a prompt token is that of the draw at its position."""
    for cut in (0, 3, 6):
        if cut:
            runner.prefill(PrefillChunk(PROMPT[:cut], 0, PAGES, None))
        runner.prefill(PrefillChunk(PROMPT[cut:], cut, PAGES, None))
        likeliest = expected_tokens(PROMPT[:8], SamplingParams(), 1, model=MODEL)[0]
        scored = runner.score(7 - cut, [likeliest, PROMPT[9]], 2)
        [drawn] = runner.collect(runner.prefill(PrefillChunk(PROMPT[:8], 0, [15, 16], SampleSpec(n_top=2))))
        assert scored[0] == drawn
        assert scored[1].token == PROMPT[9] and scored[1].logprob < scored[1].top[0][1] <= 0
