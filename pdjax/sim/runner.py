"""A Runner without a model: every token position holds content that only the right history can produce.

The content of a position is a hash chain of the tokens up to it, written through the page table; the next token is
a hash of every position's content in every layer, read back through the page table. A page that is wrong, stale,
missing or in the wrong place becomes a wrong token, and ``expected_tokens`` says which token was right. Must never
import JAX, read a clock, or remember anything of a request outside the pools.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash
from msgspec import structs

from pdjax.core.budget import Slot
from pdjax.core.pools import PoolTransferSpec, page_bucket, plan_parts
from pdjax.engine.base import Packed
from pdjax.engine.ports import NO_SLOT, DecodeRow, PrefillChunk, Sampled, SampleSpec
from pdjax.sched.request import SamplingParams

MASK = (1 << 64) - 1
TAIL = 2  # words of one position in one layer: the chain, and (position, token) for a reader of dumps
_PAIR = struct.Struct("<QQ")
POISON = 0xDEAD_BEEF_DEAD_BEEF  # what a page holds before anything is written


@dataclass(frozen=True)
class SimModel:
    """What decides the simulated tokens. n_vocab is small so that a chosen EOS is met often."""

    n_vocab: int = 64
    n_layers: int = 2


def chain(previous: int, token: int) -> int:
    """The content word of a position from that of the position before it (0 before the first)."""
    return xxhash.xxh3_64_intdigest(_PAIR.pack(previous, token))


@cache
def _layer_key(layer: int) -> int:
    return (layer * 0x9E37_79B9_7F4A_7C15) & MASK  # layer 0 holds the chain itself


def contents(model: SimModel, tokens: Sequence[int], start: int, previous: int) -> np.ndarray:
    """KV of tokens at positions start…, after the chain word ``previous``: uint64 (n_layers, len(tokens), TAIL)."""
    words = []
    for token in tokens:
        previous = chain(previous, token)
        words.append(previous)
    out = np.empty((model.n_layers, len(tokens), TAIL), np.uint64)
    for layer in range(model.n_layers):
        key = _layer_key(layer)
        out[layer, :, 0] = [word ^ key for word in words]
    out[:, :, 1] = [(start + i) << 32 | token for i, token in enumerate(tokens)]
    return out


def next_token(model: SimModel, kv: np.ndarray, sample: SampleSpec) -> Sampled:
    """The token after the positions of kv, uint64 (n_layers, n, TAIL); the draw depends on (seed, position) only."""
    word = _word(np.ascontiguousarray(kv).tobytes(), sample.seed if sample.temperature > 0 else 0)
    best = word % model.n_vocab
    token = best if sample.plain else _steered(model, best, sample)
    top = [(best + i) % model.n_vocab for i in range(sample.n_top)]
    return Sampled(token, _logprob(model, word, token), tuple((t, _logprob(model, word, t)) for t in top))


def _word(kv: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(kv, seed=seed & MASK)


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
    seed = sampling.seed if sampling.temperature > 0 else 0
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    layers = [bytearray() for _ in range(model.n_layers)]  # as the pools hold them, without their pages
    previous = position = 0
    out: list[int] = []
    unread = list(prompt)
    while len(out) < n:
        for token in unread:
            previous = chain(previous, token)
            for layer, content in enumerate(layers):
                content += _PAIR.pack(previous ^ _layer_key(layer), position << 32 | token)
            position += 1
        out.append(_word(b"".join(layers), seed) % model.n_vocab)
        if out[-1] in stops:
            break
        unread = out[-1:]
    return out


def _staged(arrays: list[np.ndarray[Any, Any]], slot: Slot) -> list[np.ndarray[Any, Any]]:
    """The arrays in the slot's memory, which is written in place: a pull that still reads there gets the new bytes."""
    if sum(array.nbytes for array in arrays) != slot.n_bytes:
        raise ValueError(f"slot {slot.number} holds {slot.n_bytes} bytes, not these")
    if slot.arrays is None:
        slot.arrays = arrays
    for lies, comes in zip(slot.arrays, arrays, strict=True):
        lies[...] = comes
    return list(slot.arrays)


@dataclass
class SimLaunch:
    """A launched call: the device does its work in program order, so it is done here; the host may not look yet."""

    sampled: list[Sampled]
    collected: bool = False


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
        self.slots: dict[int, int] = {}  # newest token of each request, as the device has it
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

    def prefill(self, chunk: PrefillChunk) -> SimLaunch | None:
        self._prefilled = chunk
        self._append(chunk.tokens, chunk.start, chunk.pages)
        if chunk.sample is None:
            return None
        kv = self._read(chunk.pages, chunk.start + len(chunk.tokens))
        sampled = next_token(self.model, kv, chunk.sample)
        self._keep(chunk.slot, sampled.token)
        return SimLaunch([sampled])

    def decode(self, rows: Sequence[DecodeRow]) -> SimLaunch:
        if not 1 <= len(rows) <= self.max_batch:
            raise ValueError(f"decode of {len(rows)} rows: between 1 and max_batch={self.max_batch}")
        for row in rows:  # all rows write before any reads, as in one device step
            token = self.slots[row.slot] if row.token is None else row.token
            self._append([token], row.position, row.pages)
        sampled = [
            next_token(self.model, self._read(row.pages, row.position + 1), row.sample) for row in rows
        ]
        for row, one in zip(rows, sampled, strict=True):
            self._keep(row.slot, one.token)
        return SimLaunch(sampled)

    def collect(self, launched: SimLaunch) -> list[Sampled]:
        if launched.collected:
            raise ValueError("this launch has been collected already")
        launched.collected = True
        return launched.sampled

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

    def gather(self, pages: Sequence[int], slot: Slot | None = None) -> Packed:
        n_padded = page_bucket(len(pages))
        index = np.array([*pages, *[pages[-1]] * (n_padded - len(pages))])
        planned = plan_parts(self.pools, len(pages))
        # Fancy indexing copies: the packed arrays are private (protocol §6).
        arrays = [
            self.arrays[part.pool][part.layer : part.layer_stop][:, index[part.page : part.page_stop]]
            for part in planned
        ]
        if slot is not None:
            arrays = _staged(arrays, slot)
        parts = []
        for part, array in zip(planned, arrays, strict=True):
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

    def _keep(self, slot: int, token: int) -> None:
        if slot != NO_SLOT:
            self.slots[slot] = token

    def _check(self, pages: Sequence[int], stop: int) -> None:
        """Positions up to stop lie in this page table, and its pages in the pool."""
        if stop > len(pages) * self.page_size:
            raise ValueError(f"position {stop - 1} lies outside a page table of {len(pages)} pages")
        if min(pages) < 1 or max(pages) >= self.num_pages:
            raise ValueError(f"page table {list(pages)}: pages lie in 1…{self.num_pages - 1}")

    def _read(self, pages: Sequence[int], stop: int) -> np.ndarray[Any, Any]:
        self._check(pages, stop)
        table = np.array(pages[: -(-stop // self.page_size)])

        def held(pool: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return pool[:, table].reshape(self.model.n_layers, -1, TAIL)[:, :stop]

        kv = held(self.kv)
        for i, pool in enumerate(self.arrays[1:], 1):
            kv = kv ^ (held(pool) ^ _layer_key(-i) ^ held(self.kv))
        return kv

    def _append(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Write tokens at positions start…, continuing from what the pages hold at start-1."""
        self._check(pages, start + len(tokens))
        previous, size = 0, self.page_size
        if start:
            previous = int(self.kv[0, pages[(start - 1) // size], (start - 1) % size, 0])
        positions = np.arange(start, start + len(tokens))
        page, slot = np.array(pages)[positions // size], positions % size
        written = contents(self.model, tokens, start, previous)
        self.kv[:, page, slot] = written
        for i, pool in enumerate(self.arrays[1:], 1):
            pool[:, page, slot] = written ^ _layer_key(-i)
