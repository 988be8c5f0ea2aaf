"""A sampled token depends on its logits, its seed and its position, and on nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.engine.ports import SampleSpec
from pdjax.model.sampling import columns, steer


@jax.jit
def draw(logits, c):
    return steer(
        logits, logits, jnp.full((logits.shape[0], -(-logits.shape[1] // 32)), -1).view(jnp.uint32), c
    )


RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((8, 64)).astype(np.float32)


def tokens(
    logits: np.ndarray, specs: list[SampleSpec], positions: list[int], n_rows: int | None = None
) -> list[int]:
    n_rows = n_rows or len(specs)
    padded = np.zeros((n_rows, logits.shape[1]), np.float32)
    padded[: len(specs)] = logits
    chosen, _ = draw(padded, columns(specs, positions, n_rows))
    return [int(t) for t in chosen[: len(specs)]]


def test_row_batch_and_padding_do_not_matter() -> None:
    """The same draw alone (P, at the end of prefill), in a batch (D), in any row, beside greedy rows."""
    specs = [SampleSpec(0.9, seed) for seed in range(8)]
    positions = [5, 9, 5, 100, 7, 7, 8191, 0]
    together = tokens(LOGITS, specs, positions)
    assert together == tokens(LOGITS, specs, positions, n_rows=16)
    for i in range(8):
        assert tokens(LOGITS[i : i + 1], [specs[i]], [positions[i]]) == [together[i]]
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    shuffled = tokens(LOGITS[order], [specs[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]
    mixed = tokens(LOGITS[:2], [SampleSpec(), specs[1]], positions[:2])
    assert mixed == [int(LOGITS[0].argmax()), together[1]]


def test_seed_and_position_both_matter() -> None:
    same = np.zeros((1, 64), np.float32)

    def drawn(seed: int, position: int) -> int:
        return tokens(same, [SampleSpec(1.0, seed)], [position])[0]

    assert len({drawn(seed, 3) for seed in range(40)}) > 15
    assert len({drawn(3, position) for position in range(40)}) > 15
    assert [drawn(s, 0) for s in range(9)] != [drawn(0, p) for p in range(9)], "not their sum"
    wide = {drawn(seed, 3) for seed in (1, 1 + (1 << 32), 1 + (1 << 33), 1 - (1 << 62), 7 << 40)}
    assert len(wide) > 2, "the upper half of a seed counts"
    assert drawn(1, 3) == drawn(1 + (1 << 64), 3)


def test_greedy_takes_the_first_of_equals_and_ignores_the_seed() -> None:
    logits = np.array([[0, 3, 1, 3]], np.float32)
    assert tokens(logits, [SampleSpec(0.0, 1)], [0]) == tokens(logits, [SampleSpec(0.0, 2)], [9]) == [1]


def test_the_draw_follows_the_distribution() -> None:
    """20,000 draws at two temperatures: frequencies within five standard deviations of softmax(logits / T)."""
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    n = 10_000
    for temperature in (0.5, 1.5):
        specs = [SampleSpec(temperature, 11)] * n
        got = np.bincount(tokens(np.tile(logits, (n, 1)), specs, list(range(n))), minlength=4) / n
        p = np.exp(logits / temperature)
        p /= p.sum()
        assert (np.abs(got - p) < 5 * np.sqrt(p * (1 - p) / n)).all()


def test_a_tiny_temperature_is_greedy() -> None:
    specs = [SampleSpec(1e-9, seed) for seed in range(8)]
    assert tokens(LOGITS, specs, [0] * 8) == LOGITS.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_logprob_is_of_the_raw_logits(temperature: float) -> None:
    specs = [SampleSpec(temperature, seed) for seed in range(8)]
    chosen, logprobs = draw(LOGITS, columns(specs, [4] * 8, 8))
    exact = LOGITS.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact[np.arange(8), np.asarray(chosen)], atol=1e-5)
