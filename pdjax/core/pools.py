"""What is moved: pools, the parts that a hand-off is made of, the manifest that states them, the fingerprint.

Everything here is a pure function of sizes, so that P states the set of parts once and D compares for
equality (S7, S10: incidents B07, B42, B92). Must never look at an array's content or import JAX.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

MIB = 1 << 20
TARGET_PART_BYTES = (
    MIB  # facts/peer-servers §7: arrays near 1 MB; fewer cost throughput, more cost 0.1 ms each
)
MAX_PART_BYTES = 16 * MIB  # larger allocations are page-faulted in anew each time (facts/throughput)


@dataclass(frozen=True)
class PoolTransferSpec:
    """One pool that a request's hand-off covers (RFC-2 §5.6).

    shape: (num_pages, page_size, *tail) of one layer's array; page 0 is reserved. n_layers arrays make the pool.
    """

    name: str
    pool_type: str
    dtype: str
    shape: tuple[int, ...]
    n_layers: int
    page_bytes: int  # bytes of one page in one layer
    sharding: str = "single"
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KVArgs:
    """What a manager must know of the engine it serves."""

    pools: list[PoolTransferSpec]
    page_size: int
    fingerprint: Fingerprint
    instance_id: str
    serving_url: str = ""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One array of a hand-off: layers [layer, layer_stop) of pages [page, page_stop) of a pool, packed.

    shape is (layers, pages, page_size, *tail). pages count the padding of the bucket: see page_bucket.
    checksum: xxh3_64 of the bytes, 0 when verification is off.
    """

    pool: int
    rank: int
    chunk: int
    layer: int
    layer_stop: int
    page: int
    page_stop: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    sharding: str = "single"
    checksum: int = 0


def misstated(part: Part, itemsize_bytes: int) -> str | None:
    """Why a part whose dtype has so many bytes cannot be pulled, or None. Arrays of no bytes hang for ever (facts/transfer row 10)."""
    if any(n < 1 for n in part.shape):
        return f"shape {part.shape} has no bytes"
    if part.nbytes != math.prod(part.shape) * itemsize_bytes:
        return f"nbytes {part.nbytes} is not that of {part.dtype}{list(part.shape)}"
    return None if part.sharding == "single" else f"sharding {part.sharding!r} is not supported"


class Manifest(msgspec.Struct, frozen=True):
    """P's statement of one hand-off. D compares, never recomputes (S7)."""

    uuid: int
    transfer_address: str
    n_tokens: int
    n_pages: int
    page_size: int
    fingerprint: str
    digest: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)


def page_bucket(n_pages: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that holds n_pages, so that a few compiled shapes serve all.

    Between two steps at most a third is padding. Padding repeats the request's own last page on P and is
    written to the reserved page on D, so it never carries another request's bytes.
    """
    if n_pages < 1:
        raise ValueError(f"page_bucket: n_pages={n_pages} must be at least 1")
    if n_pages <= 3:
        return n_pages
    power = 1 << (n_pages - 1).bit_length()
    return power * 3 // 4 if n_pages <= power * 3 // 4 else power


def plan_parts(pools: Sequence[PoolTransferSpec], n_pages: int) -> tuple[Part, ...]:
    """The parts (checksum 0) that carry n_pages pages of each pool (facts/peer-servers §7, protocol §9).

    Per pool: layers packed into clamp(ceil(total / 1 MiB), 1, layers) arrays, none over 16 MiB: a larger one is
    cut along its pages.
    """
    return _plan(
        tuple((s.n_layers, s.page_bytes, s.shape[1:], s.dtype, s.sharding) for s in pools),
        page_bucket(n_pages),
    )


@lru_cache(
    maxsize=4096
)  # requests have few lengths, and each is planned by scheduler, gather and both tables
def _plan(pools: tuple[tuple[int, int, tuple[int, ...], str, str], ...], padded: int) -> tuple[Part, ...]:
    parts: list[Part] = []
    for p, (n_layers, page_bytes, tail, dtype, sharding) in enumerate(pools):
        total = padded * page_bytes * n_layers
        n_arrays = min(max(math.ceil(total / TARGET_PART_BYTES), 1), n_layers)
        per = math.ceil(n_layers / n_arrays)
        chunk = 0
        for layer in range(0, n_layers, per):
            stop = min(layer + per, n_layers)
            rows = max(1, min(padded, MAX_PART_BYTES // (page_bytes * (stop - layer))))
            for page in range(0, padded, rows):
                page_stop = min(page + rows, padded)
                count = (stop - layer) * (page_stop - page)
                parts.append(
                    Part(
                        pool=p,
                        rank=0,
                        chunk=chunk,
                        layer=layer,
                        layer_stop=stop,
                        page=page,
                        page_stop=page_stop,
                        shape=(stop - layer, page_stop - page, *tail),
                        dtype=dtype,
                        nbytes=count * page_bytes,
                        sharding=sharding,
                    )
                )
                chunk += 1
    return tuple(parts)


def carries(parts: Sequence[Part], pools: Sequence[PoolTransferSpec], n_pages: int) -> bool:
    """Whether these are, checksums aside, exactly the parts that carry n_pages (set equality, S7)."""
    stated = {msgspec.structs.replace(part, checksum=0) for part in parts}
    return len(stated) == len(parts) and stated == set(plan_parts(pools, n_pages))


def packed_bytes(pools: Sequence[PoolTransferSpec], n_pages: int) -> int:
    """Bytes that a hand-off of n_pages keeps registered: what P's budget is charged."""
    return sum(p.nbytes for p in plan_parts(pools, n_pages))


def pages_for(n_tokens: int, page_size: int) -> int:
    return -(-n_tokens // page_size)


class Fingerprint(msgspec.Struct, frozen=True):
    """What must be equal on P and D before a single page is taken (S10). ``hash`` compares, fields explain."""

    protocol: int
    model: str  # hash of the model's configuration
    weights: str  # digest of weights and tokenizer
    kv_dtype: str
    page_size: int
    n_layers: int
    kv_heads: int
    head_dim: int
    layout: str
    mesh: str
    transfer_size: int
    transport_addresses: int
    jaxlib: str

    @property
    def hash(self) -> str:
        return _hash_of(self)

    def differences(self, other: Fingerprint) -> list[str]:
        """One line a differing field, for the message that an operator reads."""
        return [
            f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


@lru_cache(maxsize=64)
def _hash_of(fingerprint: Fingerprint) -> str:
    return hashlib.blake2b(msgspec.json.encode(fingerprint), digest_size=16).hexdigest()


def request_digest(prompt_ids: Sequence[int], sampling: dict[str, object]) -> str:
    """Hash of the prompt and of the settings that decide the first token: crossed duplicates never meet (S8)."""
    blob = msgspec.json.encode([list(prompt_ids), sorted(sampling.items())])
    return hashlib.blake2b(blob, digest_size=16).hexdigest()
