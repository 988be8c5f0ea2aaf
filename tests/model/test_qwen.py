"""Qwen2 and Qwen3 answer as PyTorch and transformers do: reference/qwen.json, made by reference/make_qwen.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_steps import run_decode, run_prefill
from model_variants import QWEN
from safetensors.numpy import load_file, save_file

from pdjax.core.errors import ConfigError
from pdjax.engine.ports import DecodeRow, PrefillChunk, SampleSpec
from pdjax.model.checkpoint import SINGLE, load_model
from pdjax.model.runner import JaxRunner
from pdjax.model.tiny import make_tiny_model

REFERENCE = json.loads((Path(__file__).parent / "reference" / "qwen.json").read_text(encoding="utf-8"))
PAGES = [9, 3, 21, 14, 7, 30, 2, 11, 40, 41, 42, 43, 44, 45]  # of 8 tokens each
GREEDY = SampleSpec()


@pytest.mark.parametrize("family", QWEN)
def test_logits_tokens_and_logprobs_equal_the_reference(
    family: str, tmp_path: Path, make_runner: Callable[..., JaxRunner]
) -> None:
    runner = make_runner(make_tiny_model(tmp_path, seed=7, **QWEN[family]))
    for name, case in REFERENCE["models"][family].items():
        ids = case["ids"]
        for start in range(0, len(ids), 64):
            chunk, last = ids[start : start + 64], start + 64 >= len(ids)
            first = run_prefill(runner, PrefillChunk(chunk, start, PAGES, GREEDY if last else None))
        assert first is not None
        np.testing.assert_allclose(np.asarray(runner.last_logits)[0], case["logits"], atol=1e-4, err_msg=name)
        drawn = [first]
        while len(drawn) < len(case["tokens"]):
            drawn += run_decode(
                runner, [DecodeRow(drawn[-1].token, len(ids) + len(drawn) - 1, PAGES, GREEDY)]
            )
        assert [d.token for d in drawn] == case["tokens"], name
        np.testing.assert_allclose([d.logprob for d in drawn], case["logprobs"], atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [("qwen2", "model.layers.1.self_attn.k_proj.bias"), ("qwen3", "model.layers.0.self_attn.q_norm.weight")],
)
def test_what_the_family_adds_must_be_there_and_counts(
    family: str, tensor: str, tmp_path: Path, make_runner: Callable[..., JaxRunner]
) -> None:
    """Without the check, and the use, of these tensors a model would answer fluently and wrongly."""
    directory = make_tiny_model(tmp_path, **QWEN[family])

    def logits() -> np.ndarray:
        runner = make_runner(directory)
        runner.prefill(PrefillChunk([1, 2, 3], 0, PAGES, None))
        return np.asarray(runner.last_logits)[0]

    whole, tensors = logits(), load_file(directory / SINGLE)
    value = tensors.pop(tensor)
    save_file({**tensors, tensor: 2 * value}, directory / SINGLE)
    assert np.abs(logits() - whole).max() > 1e-3
    save_file(tensors, directory / SINGLE)
    with pytest.raises(ConfigError, match=rf"is missing {tensor}$"):
        load_model(directory, np.dtype(np.float32))
