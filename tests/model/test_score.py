"""Log-probabilities of a prompt's own tokens, against numpy, however the prompt is cut into chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy_llama import NumpyLlama

from pdjax.engine.ports import PrefillChunk
from pdjax.model.runner import JaxRunner
from pdjax.model.sampler import SCORE_ROWS
from pdjax.model.tiny import TINY_CONFIG

MakeRunner = Callable[..., JaxRunner]
IDS = [int(t) for t in np.random.default_rng(5).integers(0, 512, SCORE_ROWS + 9)]
PAGES = [9, 3, 21, 14, 7, 30]


@pytest.mark.parametrize("cut", [len(IDS), 17])
def test_a_score_is_the_models_own_probability(cut: int, tiny_dir: Path, make_runner: MakeRunner) -> None:
    exact = NumpyLlama(tiny_dir, TINY_CONFIG).logits(IDS)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    runner = make_runner()
    scored = []
    for start in range(0, len(IDS), cut):
        chunk = IDS[start : start + cut]
        runner.prefill(PrefillChunk(chunk, start, PAGES, None))
        scored += runner.score(0, IDS[start + 1 : start + 1 + len(chunk)], 3)
    assert [s.token for s in scored] == IDS[1:]
    for row, s in zip(exact, scored, strict=False):
        assert s.logprob == pytest.approx(row[s.token], abs=1e-4)
        best = np.argsort(-row)[:3]
        assert [t for t, _ in s.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in s.top], row[best], atol=1e-4)
    runner.prefill(PrefillChunk(IDS, 0, PAGES, None))
    assert runner.score(20, IDS[21:23], 0)[1].logprob == pytest.approx(scored[21].logprob, abs=1e-5)


def test_a_score_needs_a_prefill(make_runner: MakeRunner) -> None:
    with pytest.raises(ValueError, match="no prefill call"):
        make_runner().score(0, [1], 0)
