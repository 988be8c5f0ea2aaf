"""Gather and scatter of KV pages as plain XLA programs, for any backend.

gather: a few programs read the pages of all layers into private packed arrays, so that the first are on their way to
the peer while the last are still copied. scatter: one program a part writes it into the donated layers of its pool,
in place. Both take bucketed ids from ``plan`` (which has checked them), so that one
compile serves every request of a bucket. Must never see an unchecked id, and never keep a pool: its owner does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.core.pools import Part
from pdjax.engine.kernels.layout import check_pool, packed_sharding, placed
from pdjax.engine.kernels.mover import CompileKey, PoolShape, form_of
from pdjax.engine.kernels.plan import Ids, Layout, by_pool, check_arrays, check_bucket, layout_of

Pools = list[list[jax.Array]]

# Bytes that one gather program packs. XLA for CPU runs smaller programs on the calling thread, so that the caller waits
# and nothing overlaps; larger ones delay the first part (docs/performance.md).
GATHER_BYTES = 12 << 20

# XLA for CPU scatters a narrow float's page in the time in which a merge walks over so many (docs/performance.md).
MERGE_PAGES = 64
BITS = {1: jnp.uint8, 2: jnp.uint16}


def groups_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Consecutive parts of one pool, each group but the last of a pool of at least GATHER_BYTES."""
    for _, pool in by_pool(parts):
        group: list[Part] = []
        for part in pool:
            group.append(part)
            if sum(one.nbytes for one in group) >= GATHER_BYTES:
                yield group
                group = []
        if group:
            yield group


class XlaMover:
    """Page mover in plain XLA; one serves any number of pools and owners. platform: "cpu", "tpu" …, of its programs."""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self.compiles: Counter[CompileKey] = Counter()
        self._gather: Any = jax.jit(self._trace_gather, static_argnums=2)
        self._scatter: Any = jax.jit(self._trace_scatter, donate_argnums=0)

    def gather(self, pools: Pools, ids: Ids, parts: Sequence[Part]) -> list[jax.Array]:
        """Packed arrays, one a part, each (layers, pages, page_size, *tail) of the pool's dtype. Does not block.

        pools: [pool][layer] → (num_pages, page_size, *tail). ids: int32 [bucket]. The pages may be overwritten as
        soon as this returns: the device keeps the order. Raises PlanError for ids of another bucket than the parts', and
        on a TPU ConfigError for a pool that would be copied.
        """
        self._check(pools, ids, parts)
        packed: list[jax.Array] = []
        for group in groups_of(parts):
            first, stop = group[0].layer, group[-1].layer_stop
            packed += self._gather(pools[group[0].pool][first:stop], ids, layout_of(group, first))
        return packed

    def scatter(self, pools: Pools, arrays: Sequence[Any], ids: Ids, parts: Sequence[Part]) -> Pools:
        """The pools with the packed arrays written into pages ``ids``. The pools given are consumed. Does not block.

        Raises as gather, and PlanError for an array that is not as its part says, before anything is written.
        A packed array in plain memory must not change until the result is computed: JAX may read it in place.
        """
        self._check(pools, ids, parts)
        check_arrays(parts, arrays)
        targets = [packed_sharding(layers[0].sharding) for layers in pools]
        packed = [placed(array, targets[part.pool]) for part, array in zip(parts, arrays, strict=True)]
        # A program a part: one program over all parts keeps a second copy of them alive, and took three times as
        # long for 47 MB on CPU (measured).
        written = [list(layers) for layers in pools]
        for part, array in zip(parts, packed, strict=True):
            place = slice(part.layer, part.layer_stop)
            layers, rows = written[part.pool][place], ids[part.page : part.page_stop]
            written[part.pool][place] = self._scatter(layers, array, rows)
        return written

    def _check(self, pools: Pools, ids: Ids, parts: Sequence[Part]) -> None:
        for pool, group in by_pool(parts):
            check_bucket(ids, group)
            if self._platform == "tpu":
                check_pool(pools[pool][0])  # one speaks for all, as for the kernels

    def _trace_gather(self, layers: list[jax.Array], ids: jax.Array, layout: Layout) -> list[jax.Array]:
        # Runs once a compile: this body is traced, not called.
        self.compiles["gather", ids.shape[0], _shapes([layers])] += 1
        packed = []
        for layer, layer_stop, page, page_stop in layout:
            rows = ids[page:page_stop]
            # clip: ids are checked on the host, and the default mode costs a comparison a row (facts/kernels).
            packed.append(jnp.stack([a.at[rows].get(mode="clip") for a in layers[layer:layer_stop]]))
        return packed

    def _trace_scatter(self, layers: list[jax.Array], array: jax.Array, rows: jax.Array) -> list[jax.Array]:
        self.compiles["scatter", rows.shape[0], _shapes([layers])] += 1
        write = _WRITES[form_of(self._platform, str(array.dtype))]
        # One after the other: one loop over ten layers took half as long again.
        return [write(layer, array[i], rows) for i, layer in enumerate(layers)]


def _set(layer: jax.Array, pages: jax.Array, rows: jax.Array) -> jax.Array:
    return layer.at[rows].set(pages, mode="promise_in_bounds")


def _write_pages(layer: jax.Array, pages: jax.Array, rows: jax.Array) -> jax.Array:
    def write_page(k: Any, out: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(out, lax.dynamic_slice_in_dim(pages, k, 1), rows[k], 0)

    written: jax.Array = lax.fori_loop(0, rows.shape[0], write_page, layer)
    return written


def _merge(layer: jax.Array, pages: jax.Array, rows: jax.Array) -> jax.Array:
    """One pass over the layer: each page stays, or comes from the row that is written to it. As bits: no conversion."""
    if layer.shape[0] > MERGE_PAGES * rows.shape[0]:
        return _set(layer, pages, rows)
    kept = -1
    numbers = jnp.arange(rows.shape[0], dtype=jnp.int32)
    source = jnp.full(layer.shape[0], kept, jnp.int32).at[rows].set(numbers, mode="promise_in_bounds")
    as_bits = partial(lax.bitcast_convert_type, new_dtype=BITS[layer.dtype.itemsize])
    stays = (source == kept).reshape(-1, *[1] * (layer.ndim - 1))
    merged = jnp.where(stays, as_bits(layer), as_bits(pages).at[source].get(mode="clip"))
    return lax.bitcast_convert_type(merged, layer.dtype)


_WRITES = {"set": _set, "pages": _write_pages, "merge": _merge}


def _shapes(pools: Pools) -> tuple[PoolShape, ...]:
    return tuple((len(layers), layers[0].shape, str(layers[0].dtype)) for layers in pools)
