"""The paged forward pass against a plain numpy one: chunks, buckets, padding and foreign pages must not show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import run_decode, run_prefill
from model_variants import QWEN
from numpy_llama import NumpyLlama

from pdjax.engine.ports import DecodeRow, PrefillChunk, SampleSpec
from pdjax.model.buckets import Buckets
from pdjax.model.runner import JaxRunner
from pdjax.model.tiny import TINY_CONFIG, make_tiny_model

MakeRunner = Callable[..., JaxRunner]
GREEDY = SampleSpec()
PAGES = [9, 3, 21, 14, 7, 30, 2, 11]  # of 8 tokens each
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "bias": {"attention_bias": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "wide_heads": {"head_dim": 32, "num_key_value_heads": 1},
    **QWEN,
}


def prompt(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 512, n)]


def prefill(
    runner: JaxRunner, ids: list[int], pages: list[int], chunks: list[int] | None = None
) -> np.ndarray:
    """Last logits of a prompt given in chunks of these lengths."""
    start = 0
    for n in chunks or [len(ids)]:
        last = start + n == len(ids)
        got = run_prefill(
            runner, PrefillChunk(ids[start : start + n], start, pages, GREEDY if last else None)
        )
        assert (got is not None) == last
        start += n
    assert start == len(ids)
    return np.asarray(runner.last_logits)[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_equal_numpy(name: str, tmp_path: Path, make_runner: MakeRunner) -> None:
    overrides = VARIANTS[name]
    model = NumpyLlama(make_tiny_model(tmp_path, **overrides), {**TINY_CONFIG, **overrides})
    runner = make_runner(tmp_path)
    ids = prompt(45)
    np.testing.assert_allclose(prefill(runner, ids, PAGES), model.logits(ids)[-1], atol=5e-5)
    tokens = [int(np.asarray(runner.last_logits)[0].argmax())]
    for i in range(12):
        row = DecodeRow(tokens[-1], len(ids) + i, PAGES, GREEDY)
        [sampled] = run_decode(runner, [row])
        exact = model.logits(ids + tokens)[-1]
        np.testing.assert_allclose(np.asarray(runner.last_logits)[0], exact, atol=5e-5)
        assert sampled.logprob == pytest.approx(exact[sampled.token] - np.log(np.exp(exact).sum()), abs=5e-5)
        tokens.append(sampled.token)
    assert tokens == model.greedy(ids, 13)


@pytest.mark.parametrize("chunks", [[16, 16, 8], [5, 30, 5], [1, 38, 1], [39, 1]])
def test_chunks_give_the_logits_of_one_shot(chunks: list[int], make_runner: MakeRunner) -> None:
    runner = make_runner()
    ids = prompt(40)
    whole = prefill(runner, ids, PAGES)
    np.testing.assert_allclose(prefill(runner, ids, [5, 6, 8, 10, 12], chunks), whole, atol=2e-5)


def test_decode_gives_the_logits_of_prefill(make_runner: MakeRunner) -> None:
    runner = make_runner()
    ids = prompt(30)
    prefill(runner, ids[:20], PAGES)
    for position in range(20, 30):
        run_decode(runner, [DecodeRow(ids[position], position, PAGES, GREEDY)])
    decoded = np.asarray(runner.last_logits)[0]
    np.testing.assert_allclose(decoded, prefill(runner, ids, [40, 41, 42, 43]), atol=2e-5)


def test_a_batch_gives_each_row_the_logits_it_has_alone(make_runner: MakeRunner) -> None:
    """Rows of other lengths, and padding rows beside them, must not show; nor may they disturb each other's pages."""
    runner = make_runner()
    prompts = [prompt(n, seed=n) for n in (3, 17, 40)]
    tables = [[1, 2], [4, 5, 6], [10, 11, 12, 13, 14, 15]]
    alone = []
    for ids, table in zip(prompts, tables, strict=True):
        prefill(runner, ids, table)
        run_decode(runner, [DecodeRow(7, len(ids), table, GREEDY)])
        alone.append(np.asarray(runner.last_logits)[0])
    rows = [DecodeRow(7, len(ids), table, GREEDY) for ids, table in zip(prompts, tables, strict=True)]
    for order in ([0, 1, 2], [2, 0, 1]):
        run_decode(runner, [rows[i] for i in order])
        got = np.asarray(runner.last_logits)
        assert got.shape == (3, 512)
        np.testing.assert_allclose(got, [alone[i] for i in order], atol=2e-5)


def test_what_other_requests_left_in_the_pool_does_not_show(make_runner: MakeRunner) -> None:
    """S11: even NaN in a foreign page, in the reserved page or behind the last token changes no bit."""
    clean, dirty = make_runner(), make_runner()
    dirty._kv = [jnp.full_like(pool, jnp.nan) for pool in dirty._kv]
    ids = prompt(21)
    for runner in (clean, dirty):
        prefill(runner, ids, PAGES, [10, 11])
    for step in range(4):
        rows = [DecodeRow(step, len(ids) + step, PAGES, GREEDY)]
        for runner in (clean, dirty):
            run_decode(runner, rows)
        assert np.array_equal(np.asarray(clean.last_logits), np.asarray(dirty.last_logits))
    assert np.isfinite(np.asarray(dirty.last_logits)).all()


def test_only_a_requests_own_positions_are_written(make_runner: MakeRunner) -> None:
    runner = make_runner()
    runner._kv = [jnp.full_like(pool, 7.0) for pool in runner._kv]
    prefill(runner, prompt(19), [3, 9, 21], [6, 13])  # 6 and 13 are padded to 16
    run_decode(runner, [DecodeRow(1, 19, [3, 9, 21], GREEDY)])
    for pool in runner._kv:
        changed = np.argwhere((np.asarray(pool) != 7.0).any(-1))
        mine = {(page, slot) for page in (3, 9, 21) for slot in range(8)} - {(21, s) for s in range(4, 8)}
        assert {(int(p), int(s)) for p, s in changed if p != 0} == mine


def test_bfloat16_stays_near_float32(make_runner: MakeRunner) -> None:
    ids = prompt(30)
    exact = prefill(make_runner(), ids, PAGES)
    runner = make_runner(dtype="bfloat16")
    assert runner.pools[0].dtype == "bfloat16"
    near = prefill(runner, ids, PAGES)
    assert near.dtype == np.float32
    assert 0 < np.abs(near - exact).max() < 0.15


def test_padding_and_page_buckets_do_not_show(make_runner: MakeRunner) -> None:
    """The same prompt in larger token and page buckets."""
    ids = prompt(14)
    small, large = make_runner(), make_runner(num_pages=65)
    large.buckets = Buckets(tokens=(64,), pages=(32,), batch=(4,))
    np.testing.assert_allclose(prefill(small, ids, PAGES), prefill(large, ids, PAGES), atol=2e-5)
    for runner in (small, large):
        run_decode(runner, [DecodeRow(1, 14, PAGES, GREEDY)])
    np.testing.assert_allclose(np.asarray(small.last_logits), np.asarray(large.last_logits), atol=2e-5)
    assert large.compiles == {("prefill", 64, 32): 1, ("decode", 4, 32): 1}
