"""A Runner without a model: every token position holds content that only the right history can produce.

The content of a position is a hash chain of the tokens up to it, written through the page table; the next token is
a hash of every position's content in every layer, read back through the page table. A page that is wrong, stale,
missing or in the wrong place becomes a wrong token, and ``expected_tokens`` says which token was right. Must never
import JAX, read a clock, or remember anything of a request outside the pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from msgspec import structs

from pdjax.core.pools import PoolTransferSpec, page_bucket, plan_parts
from pdjax.engine.base import Packed
from pdjax.engine.ports import DecodeRow, PrefillChunk, Sampled, SampleSpec
from pdjax.sched.request import SamplingParams

MASK = (1 << 64) - 1
TAIL = 2  # words of one position in one layer: the chain, and (position, token) for a reader of dumps
POISON = 0xDEAD_BEEF_DEAD_BEEF  # what a page holds before anything is written


@dataclass(frozen=True)
class SimModel:
    """What decides the simulated tokens. n_vocab is small so that a chosen EOS is met often."""

    n_vocab: int = 64
    n_layers: int = 2


def chain(previous: int, token: int) -> int:
    """The content word of a position from that of the position before it (0 before the first)."""
    return xxhash.xxh3_64_intdigest(previous.to_bytes(8, "little") + token.to_bytes(8, "little"))


def _layer_key(layer: int) -> int:
    return (layer * 0x9E37_79B9_7F4A_7C15) & MASK  # layer 0 holds the chain itself


def contents(model: SimModel, tokens: Sequence[int], start: int, previous: int) -> np.ndarray:
    """KV of tokens at positions start…, after the chain word ``previous``: uint64 (n_layers, len(tokens), TAIL)."""
    out = np.empty((model.n_layers, len(tokens), TAIL), np.uint64)
    for i, token in enumerate(tokens):
        previous = chain(previous, token)
        for layer in range(model.n_layers):
            out[layer, i] = previous ^ _layer_key(layer), (start + i) << 32 | token
    return out


def next_token(model: SimModel, kv: np.ndarray, sample: SampleSpec) -> Sampled:
    """The token after the positions of kv, uint64 (n_layers, n, TAIL); the draw depends on (seed, position) only."""
    seed = sample.seed if sample.temperature > 0 else 0
    word = xxhash.xxh3_64_intdigest(np.ascontiguousarray(kv).tobytes(), seed=seed & MASK)
    best = word % model.n_vocab
    token = best if sample.plain else _steered(model, best, sample)
    top = [(best + i) % model.n_vocab for i in range(sample.n_top)]
    return Sampled(token, _logprob(model, word, token), tuple((t, _logprob(model, word, t)) for t in top))


def _logprob(model: SimModel, word: int, token: int) -> float:
    """The simulated logits fall by one a token from the likeliest one upwards, around the end of the vocabulary."""
    return -((word >> 32) % 1000) / 1000 - (token - word % model.n_vocab) % model.n_vocab


def _steered(model: SimModel, best: int, sample: SampleSpec) -> int:
    """The likeliest token once the edits and the mask have had their say."""
    logits = -((np.arange(model.n_vocab) - best) % model.n_vocab).astype(np.float64)
    if (edits := sample.edits) is not None:
        v = logits[edits.ids]
        logits[edits.ids] = np.where(v > 0, v / edits.scale, v * edits.scale) + edits.add
    if sample.allowed is not None:
        bits = np.unpackbits(sample.allowed.view(np.uint8), bitorder="little")[: model.n_vocab]
        logits[bits == 0] = -np.inf
    return int(logits.argmax())


def expected_tokens(
    prompt: Sequence[int],
    sampling: SamplingParams,
    n: int,
    *,
    model: SimModel | None = None,
    eos_ids: Iterable[int] = (),
) -> list[int]:
    """The right answer without pools: at most n tokens, up to and with the first that stops the request."""
    model = model or SimModel()
    sample = SampleSpec(sampling.temperature, sampling.seed)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    out: list[int] = []
    kv = contents(model, prompt, 0, 0)
    while len(out) < n:
        out.append(next_token(model, kv, sample).token)
        if out[-1] in stops:
            break
        kv = np.concatenate([kv, contents(model, out[-1:], kv.shape[1], int(kv[0, -1, 0]))], axis=1)
    return out


class SimRunner:
    """The Runner port over numpy pools uint64 (n_layers, num_pages, page_size, TAIL); page 0 takes the padding.

    checksums: gather states xxh3_64 of every part, as the real runner does. pool_names: every pool beside the first
    holds the same content under a key of its own, and a difference between two pools becomes a wrong token.
    """

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_batch: int = 8,
        model: SimModel | None = None,
        checksums: bool = True,
        pool_names: Sequence[str] = ("kv",),
    ) -> None:
        self.model = model or SimModel()
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_batch = max_batch
        self.checksums = checksums
        self._prefilled: PrefillChunk | None = None  # the latest call, for ``score``
        self.kv = np.full((self.model.n_layers, num_pages, page_size, TAIL), POISON, np.uint64)
        self.arrays = [self.kv, *(self.kv.copy() for _ in pool_names[1:])]
        self.pools: Sequence[PoolTransferSpec] = [
            PoolTransferSpec(
                name=name,
                pool_type="sim",
                dtype="uint64",
                shape=(num_pages, page_size, TAIL),
                n_layers=self.model.n_layers,
                page_bytes=page_size * TAIL * 8,
            )
            for name in pool_names
        ]

    def prefill(self, chunk: PrefillChunk) -> Sampled | None:
        self._prefilled = chunk
        self._append(chunk.tokens, chunk.start, chunk.pages)
        if chunk.sample is None:
            return None
        return next_token(self.model, self._read(chunk.pages, chunk.start + len(chunk.tokens)), chunk.sample)

    def decode(self, rows: Sequence[DecodeRow]) -> list[Sampled]:
        if not 1 <= len(rows) <= self.max_batch:
            raise ValueError(f"decode of {len(rows)} rows: between 1 and max_batch={self.max_batch}")
        for row in rows:  # all rows write before any reads, as in one device step
            self._append([row.token], row.position, row.pages)
        return [next_token(self.model, self._read(row.pages, row.position + 1), row.sample) for row in rows]

    def score(self, first: int, tokens: Sequence[int], n_top: int) -> list[Sampled]:
        """Each token as if sampled after the latest prefill call's token first, first + 1, …"""
        assert self._prefilled is not None
        out = []
        for position, token in enumerate(tokens, self._prefilled.start + first):
            kv = self._read(self._prefilled.pages, position + 1)
            likeliest = next_token(self.model, kv, SampleSpec(n_top=max(n_top, 1)))
            best, logprob = likeliest.top[0]
            below = (token - best) % self.model.n_vocab
            out.append(Sampled(token, logprob - below, likeliest.top[:n_top]))
        return out

    def gather(self, pages: Sequence[int]) -> Packed:
        n_padded = page_bucket(len(pages))
        index = np.array([*pages, *[pages[-1]] * (n_padded - len(pages))])
        parts, arrays = [], []
        for part in plan_parts(self.pools, len(pages)):
            # Fancy indexing copies: the packed arrays are private (protocol §6).
            pool = self.arrays[part.pool]
            array = pool[part.layer : part.layer_stop][:, index[part.page : part.page_stop]]
            arrays.append(array)
            checksum = xxhash.xxh3_64_intdigest(array.tobytes()) if self.checksums else 0
            parts.append(structs.replace(part, checksum=checksum))
        return Packed(tuple(parts), arrays)

    def scatter(self, pages: Sequence[int], packed: Packed) -> None:
        plan = plan_parts(self.pools, len(pages))
        if tuple(structs.replace(part, checksum=0) for part in packed.parts) != plan:
            raise ValueError(f"scatter: the parts are not those of {len(pages)} pages of these pools")
        index = np.array([*pages, *[0] * (page_bucket(len(pages)) - len(pages))])
        for part, array in zip(packed.parts, packed.arrays, strict=True):
            self.arrays[part.pool][part.layer : part.layer_stop, index[part.page : part.page_stop]] = array

    def _slots(self, pages: Sequence[int], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if stop > len(pages) * self.page_size:
            raise ValueError(f"position {stop - 1} lies outside a page table of {len(pages)} pages")
        table = np.asarray(pages)
        if table.min() < 1 or table.max() >= self.num_pages:
            raise ValueError(f"page table {list(pages)}: pages lie in 1…{self.num_pages - 1}")
        positions = np.arange(start, stop)
        return table[positions // self.page_size], positions % self.page_size

    def _read(self, pages: Sequence[int], stop: int) -> np.ndarray[Any, Any]:
        page, slot = self._slots(pages, 0, stop)
        kv: np.ndarray[Any, Any] = self.kv[:, page, slot]
        for i, pool in enumerate(self.arrays[1:], 1):
            kv = kv ^ (pool[:, page, slot] ^ _layer_key(-i) ^ self.kv[:, page, slot])
        return kv

    def _append(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Write tokens at positions start…, continuing from what the pages hold at start-1."""
        previous = 0
        if start:
            page, slot = self._slots(pages, start - 1, start)
            previous = int(self.kv[0, page[0], slot[0], 0])
        page, slot = self._slots(pages, start, start + len(tokens))
        written = contents(self.model, tokens, start, previous)
        self.kv[:, page, slot] = written
        for i, pool in enumerate(self.arrays[1:], 1):
            pool[:, page, slot] = written ^ _layer_key(-i)
