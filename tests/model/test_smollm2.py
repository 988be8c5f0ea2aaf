"""The real model: tokens, text and log-probabilities equal another implementation's, whose answers are in reference/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_steps import run_decode, run_prefill

from pdjax.core.pools import pages_for
from pdjax.engine.ports import DecodeRow, PrefillChunk, Sampled, SampleSpec
from pdjax.model.checkpoint import LoadedModel, load_model
from pdjax.model.fetch import fetch_smollm2, resolve_model
from pdjax.model.runner import JaxRunner
from pdjax.model.settings import RunnerSettings
from pdjax.model.tokenizer import Tokenizer

# The first test fetches and converts the model; the rest compile for it.
pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

REFERENCE = json.loads((Path(__file__).parent / "reference" / "smollm2.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = REFERENCE["cases"]
SETTINGS = RunnerSettings(
    num_pages=400, page_size=16, max_batch=16, chunk_tokens=128, context_tokens=512, verify="all"
)
GREEDY = SampleSpec()


@pytest.fixture(scope="module")
def directory() -> Path:
    return fetch_smollm2()


@pytest.fixture(scope="module")
def model(directory: Path) -> LoadedModel:
    return load_model(directory, np.dtype(np.float32))


@pytest.fixture(scope="module")
def runner(model: LoadedModel) -> JaxRunner:
    return JaxRunner(model, SETTINGS)


def prefill(runner: JaxRunner, ids: list[int], pages: list[int]) -> Sampled:
    for start in range(0, len(ids), SETTINGS.chunk_tokens):
        chunk = ids[start : start + SETTINGS.chunk_tokens]
        last = start + len(chunk) == len(ids)
        sampled = run_prefill(runner, PrefillChunk(chunk, start, pages, GREEDY if last else None))
    assert sampled is not None
    return sampled


def tables(cases: list[dict[str, Any]]) -> list[list[int]]:
    """Disjoint, shuffled pages for each case."""
    free = [int(p) for p in 1 + np.random.default_rng(0).permutation(SETTINGS.num_pages - 1)]
    return [[free.pop() for _ in range(pages_for(len(c["ids"]) + 32, 16))] for c in cases]


def test_a_second_fetch_returns_at_once(directory: Path) -> None:
    def unexpected(message: str) -> None:
        raise AssertionError(f"fetched again: {message}")

    assert fetch_smollm2(progress=unexpected) == resolve_model("smollm2") == directory


def test_prompts_have_the_reference_tokens(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    for case in CASES:
        if "text" in case:
            assert tokenizer.encode(case["text"]) == case["ids"], case["name"]
            assert tokenizer.decode(case["ids"]) == case["text"]
        else:
            assert tokenizer.render_chat(case["messages"]) == case["prompt"], case["name"]
            assert tokenizer.encode_chat(case["messages"]) == case["ids"], case["name"]


def test_greedy_tokens_and_logprobs_equal_the_reference(runner: JaxRunner) -> None:
    """Ten prompts, prefilled in chunks and decoded together, 32 tokens each, token by token.

    No step may be skipped: the narrowest lead of a first choice (0.003) is twenty times the difference between two
    float32 implementations (1.4e-4).
    """
    assert len(CASES) >= 8 and all(len(case["tokens"]) == 32 for case in CASES)
    assert min(min(case["margins"]) for case in CASES) > 1e-3
    pages = tables(CASES)
    outputs = [[prefill(runner, case["ids"], table)] for case, table in zip(CASES, pages, strict=True)]
    for step in range(31):
        rows = [
            DecodeRow(got[-1].token, len(case["ids"]) + step, table, GREEDY)
            for case, table, got in zip(CASES, pages, outputs, strict=True)
        ]
        for got, sampled in zip(outputs, run_decode(runner, rows), strict=True):
            got.append(sampled)
    for case, got in zip(CASES, outputs, strict=True):
        assert [s.token for s in got] == case["tokens"], case["name"]
        np.testing.assert_allclose(
            [s.logprob for s in got], case["logprobs"], atol=5e-4, err_msg=case["name"]
        )


def test_a_hand_off_of_the_real_model_changes_no_bit(model: LoadedModel, runner: JaxRunner) -> None:
    other = JaxRunner(model, SETTINGS)
    case = next(c for c in CASES if c["name"] == "long_story")
    [mine] = tables([case])
    theirs = [page + 1 if page < 200 else page - 199 for page in range(150, 150 + len(mine))]
    token = prefill(runner, case["ids"], mine).token
    n = pages_for(len(case["ids"]), 16)
    other.scatter(theirs[:n], runner.gather(mine[:n]))
    for step in range(3):
        position = len(case["ids"]) + step
        [here] = run_decode(runner, [DecodeRow(token, position, mine, GREEDY)])
        [there] = run_decode(other, [DecodeRow(token, position, theirs, GREEDY)])
        assert np.array_equal(np.asarray(runner.last_logits), np.asarray(other.last_logits))
        assert here == there and here.token == case["tokens"][step + 1]
        token = here.token


def test_the_answer_is_text(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    case = next(c for c in CASES if c["name"] == "chat_capital")
    stop = next(i for i, token in enumerate(case["tokens"]) if token in tokenizer.eos_ids)
    stream = tokenizer.detokenizer()
    push: Callable[[list[int]], str] = stream.push
    text = "".join(push([token]) for token in case["tokens"][:stop]) + stream.finish()
    assert text == "The capital of France is Paris."
