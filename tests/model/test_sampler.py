"""Masks, cut-offs, edits and listed log-probabilities, each against numpy; and no compile after the warm-up."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from pdjax.engine.ports import Edits, SampleSpec
from pdjax.model.config import parse_config
from pdjax.model.programs import Programs
from pdjax.model.sampler import MAX_EDITS, SCORE_ROWS, Sampler
from pdjax.model.tiny import TINY_CONFIG

VOCAB = 397  # more than MAX_EDITS, and no multiple of 32: the last word of a mask is used in part
RNG = np.random.default_rng(3)
LOGITS = (3 * RNG.standard_normal((6, VOCAB))).astype(np.float32)
CFG = parse_config({**TINY_CONFIG, "vocab_size": VOCAB})
PROGRAMS = Programs(CFG)
SAMPLER = Sampler(PROGRAMS, VOCAB)


def drawn(logits: np.ndarray, specs: list[SampleSpec], positions: list[int]) -> list[int]:
    return [s.token for s in SAMPLER.launch(np.asarray(logits), specs, positions).wait()]


def kept(logits: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """Sort-based reference of the cut-offs, float64: which tokens of one row may be drawn."""
    scaled = logits.astype(np.float64) / spec.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    keep = np.ones(len(p), bool)
    keep[order] &= before < spec.top_p if spec.top_p < 1 else True
    if spec.top_k:
        keep[order[spec.top_k :]] = False
    return keep & (p >= spec.min_p * p.max())


def words(tokens: set[int]) -> np.ndarray:
    out = np.zeros(-(-VOCAB // 32), np.uint32)
    for t in tokens:
        out[t // 32] |= np.uint32(1 << (t % 32))
    return out


CUTS = [
    SampleSpec(0.8, top_p=0.5),
    SampleSpec(1.0, top_p=0.9),
    SampleSpec(1.3, top_k=5),
    SampleSpec(1.0, top_k=1),
    SampleSpec(2.0, min_p=0.2),
    SampleSpec(1.0, min_p=1.0),
    SampleSpec(1.5, top_p=0.8, top_k=7, min_p=0.05),
    SampleSpec(1.0, top_k=VOCAB + 9),
    SampleSpec(1.0, top_p=1e-6),
]


@pytest.mark.parametrize("spec", CUTS, ids=str)
def test_only_what_the_reference_keeps_is_drawn_and_all_of_it(spec: SampleSpec) -> None:
    """1,500 draws of a row: frequencies within 5 standard deviations (and 2 rare draws) of the renormalised rest."""
    n, row = 1500, LOGITS[0]
    keep = kept(row, spec)
    p = np.where(keep, np.exp(row.astype(np.float64) / spec.temperature), 0)
    p /= p.sum()
    got = drawn(np.tile(row, (n, 1)), [replace(spec, seed=5)] * n, list(range(n)))
    counts = np.bincount(got, minlength=VOCAB) / n
    assert not counts[~keep].any()
    assert (np.abs(counts - p) <= 5 * np.sqrt(p * (1 - p) / n) + 2 / n).all()


def test_tokens_are_exactly_those_of_a_reference() -> None:
    """numpy edits, masks and cuts (sort-based) and takes the argmax; only the noise comes from JAX."""
    rng = np.random.default_rng(11)
    for i in range(60):
        row = LOGITS[i % 6]
        ids = rng.permutation(VOCAB)[:40].astype(np.int32)
        edits = Edits(
            ids, rng.uniform(0.6, 1.8, 40).astype(np.float32), rng.normal(0, 2, 40).astype(np.float32)
        )
        allowed = set(rng.permutation(VOCAB)[:200].tolist())
        seed, position = int(rng.integers(1 << 63)), int(rng.integers(1 << 20))
        cuts = {
            "top_p": float(rng.uniform(0.3, 1)),
            "top_k": int(rng.integers(0, 30)),
            "min_p": float(rng.uniform(0, 0.1)),
        }
        spec = SampleSpec(float(rng.uniform(0.3, 2)), seed, **cuts, edits=edits, allowed=words(allowed))
        edited = row.astype(np.float64)
        v = edited[ids]
        edited[ids] = np.where(v > 0, v / edits.scale, v * edits.scale) + edits.add
        edited[[t for t in range(VOCAB) if t not in allowed]] = -np.inf
        key = jax.random.wrap_key_data(
            np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), impl="threefry2x32"
        )
        noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, position), (VOCAB,), np.float32))
        best = np.where(kept(edited, spec), edited / spec.temperature + noise, -np.inf).argmax()
        assert drawn(row[None], [spec], [position]) == [best], i


def test_a_cut_keeps_the_token_that_an_uncut_draw_would_give_if_it_may() -> None:
    """The noise is the same: only a token that was cut off is replaced. So options do not change the stream."""
    for position in range(40):
        free = drawn(LOGITS[1:2], [SampleSpec(1.0, 7)], [position])[0]
        spec = SampleSpec(1.0, 7, top_k=6)
        cut = drawn(LOGITS[1:2], [spec], [position])[0]
        keep = kept(LOGITS[1], spec)
        assert keep[cut]
        assert cut == free or not keep[free]


def test_rows_and_neighbours_do_not_matter() -> None:
    """Each row alone (P) and all together (D), greedy and plain rows among them: the same tokens."""
    edits = Edits(np.array([3, 50], np.int32), np.array([1, 2], np.float32), np.array([9, -1], np.float32))
    specs = [
        SampleSpec(),
        SampleSpec(0.7, 1),
        SampleSpec(0.7, 2, top_p=0.6),
        SampleSpec(1.1, 3, top_k=4, edits=edits),
        SampleSpec(0.0, allowed=words({8, 77, 100})),
        SampleSpec(1.0, 4, min_p=0.3, allowed=words(set(range(0, VOCAB, 2)))),
    ]
    positions = [4, 9, 4, 1000, 7, 3]
    together = drawn(LOGITS, specs, positions)
    for i, spec in enumerate(specs):
        assert drawn(LOGITS[i : i + 1], [spec], [positions[i]]) == [together[i]]
    order = [5, 3, 0, 4, 1, 2]
    assert drawn(LOGITS[order], [specs[i] for i in order], [positions[i] for i in order]) == [
        together[i] for i in order
    ]


def test_edits_scale_towards_less_likely_and_add() -> None:
    """scale divides a positive logit and multiplies a negative one (repetition), then add comes on top."""
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, :4] = [4.0, 3.0, -1.0, -2.0]

    def best(ids: list[int], scale: list[float], add: list[float]) -> list[int]:
        edits = Edits(*(np.array(x, t) for x, t in ((ids, np.int32), (scale, np.float32), (add, np.float32))))
        return drawn(logits, [SampleSpec(edits=edits), SampleSpec()], [1, 1])

    assert best([0], [1.3], [0.0]) == [0, 0], "4 / 1.3 is more than 3"
    assert best([0], [1.4], [0.0]) == [1, 0], "and 4 / 1.4 is less; the other row is as it was"
    assert best([0], [1.0], [-1.5]) == [1, 0]
    assert best([0, 1], [1.0, 1.0], [-np.inf, 0.0]) == [1, 0], "-inf forbids"
    assert best([2], [0.01], [4.1]) == [2, 0], "-1 · 0.01 + 4.1"
    assert best([VOCAB - 1], [1.0], [100.0]) == [VOCAB - 1, 0]


def test_edits_of_many_logits_are_those_of_few() -> None:
    """Beyond MAX_EDITS another program makes them."""
    rng = np.random.default_rng(9)
    scale, add = rng.uniform(0.5, 2, VOCAB).astype(np.float32), rng.normal(0, 3, VOCAB).astype(np.float32)
    exact = np.where(LOGITS > 0, LOGITS / scale, LOGITS * scale) + add
    for n in (MAX_EDITS, MAX_EDITS + 1):
        ids = rng.permutation(VOCAB)[:n].astype(np.int32)
        edits = Edits(ids, scale[ids], add[ids])
        expected = LOGITS.copy()
        expected[:, ids] = exact[:, ids]
        assert drawn(LOGITS, [SampleSpec(edits=edits)] * 6, [0] * 6) == expected.argmax(-1).tolist()


def test_a_mask_forbids_whatever_the_logits_say() -> None:
    for token in (0, 31, 32, 64, VOCAB - 1):
        assert drawn(LOGITS[:1], [SampleSpec(allowed=words({token}))], [0]) == [token]
        assert drawn(LOGITS[:1], [SampleSpec(1.0, 3, allowed=words({token}))], [0]) == [token]


def test_every_log_probability_is_of_the_raw_logits() -> None:
    exact = LOGITS.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    edits = Edits(np.array([1], np.int32), np.array([1], np.float32), np.array([50], np.float32))
    specs = [SampleSpec(n_top=n, edits=edits if n % 2 else None) for n in (0, 1, 2, 3, 19, 20)]
    out = SAMPLER.launch(LOGITS, specs, [0] * 6).wait()
    for row, spec, sampled in zip(exact, specs, out, strict=True):
        assert sampled.token == (1 if spec.edits else int(row.argmax()))
        assert sampled.logprob == pytest.approx(row[sampled.token], abs=1e-5)
        best = np.argsort(-row)[: spec.n_top]
        assert [t for t, _ in sampled.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in sampled.top], row[best], atol=1e-5)


def test_greedy_rows_take_the_short_way() -> None:
    """They run one small program; only a row that asks for more costs more."""
    programs = Programs(CFG)
    sampler = Sampler(programs, VOCAB)
    sampler.launch(LOGITS, [SampleSpec(), SampleSpec(seed=4)] * 3, [0] * 6).wait()
    # A cut-off means nothing to a greedy row.
    sampler.launch(LOGITS, [SampleSpec(0.0, top_p=0.3)] * 6, [0] * 6).wait()
    assert {name for name, *_ in programs.draws} == {"greedy"}
    equal = np.array([[0, 3, 1, 3]], np.float32)
    assert Sampler(programs, 4).launch(equal, [SampleSpec()], [0]).wait()[0].token == 1
    sampler.launch(LOGITS, [SampleSpec()] * 5 + [SampleSpec(0.1)], [0] * 6).wait()
    assert {name for name, *_ in programs.draws} == {"greedy", "steer"}


def test_nothing_compiles_after_the_warm_up() -> None:
    programs = Programs(CFG)
    sampler = Sampler(programs, VOCAB)
    params = {"norm": np.ones(64, np.float32), "embed": np.zeros((VOCAB, 64), np.float32)}
    for n in (1, 2, 6):
        sampler.warm_up(n)
    sampler.score(params, np.zeros((1, 64), np.float32), [0], 1)
    compiled = dict(programs.draws)
    assert set(compiled.values()) == {1}
    for n in (1, 2, 6):
        for width in (1, MAX_EDITS, MAX_EDITS + 1, VOCAB):
            edits = Edits(np.arange(width, dtype=np.int32), *np.ones((2, width), np.float32))
            sampler.launch(LOGITS[:n], [SampleSpec(1.0, edits=edits, n_top=3)], [0]).wait()
        sampler.launch(LOGITS[:n], [SampleSpec()] * n, [0] * n).wait()
        sampler.launch(LOGITS[:n], [SampleSpec(0.5, top_p=0.5, allowed=words({1}))], [0]).wait()
    for n in (1, SCORE_ROWS, SCORE_ROWS + 1):
        assert len(sampler.score(params, np.zeros((n, 64), np.float32), [1] * n, 2)) == n
    assert dict(programs.draws) == compiled
