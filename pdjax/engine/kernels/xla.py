"""Gather and scatter of KV pages as plain XLA programs, for any backend.

gather: a few programs read the pages of all layers into private packed arrays, so that the first are on their way to
the peer while the last are still copied. scatter: one program a part writes it into the donated layers of its pool,
in place. Both take bucketed ids from ``plan`` (which has checked them), so that one
compile serves every request of a bucket. Must never see an unchecked id, and never keep a pool: its owner does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.core.pools import Part
from pdjax.engine.kernels.mover import CompileKey, PoolShape
from pdjax.engine.kernels.plan import Ids, PlanError

# (layer, layer_stop, page, page_stop) of each part of a program, layers counted from its first one: what it is specialised
# for, beside the shapes.
Layout = tuple[tuple[int, int, int, int], ...]
Pools = list[list[jax.Array]]

# Bytes that one gather program packs. XLA for CPU runs smaller programs on the calling thread, so that the caller waits
# and nothing overlaps; larger ones delay the first part (docs/performance.md).
GATHER_BYTES = 12 << 20


def groups_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Consecutive parts of one pool, each group but the last of a pool of at least GATHER_BYTES."""
    for _, pool in itertools.groupby(parts, key=lambda part: part.pool):
        group: list[Part] = []
        for part in pool:
            group.append(part)
            if sum(one.nbytes for one in group) >= GATHER_BYTES:
                yield group
                group = []
        if group:
            yield group


class XlaMover:
    """Page mover in plain XLA; one serves any number of pools and owners."""

    def __init__(self) -> None:
        self.compiles: Counter[CompileKey] = Counter()
        self._gather: Any = jax.jit(self._trace_gather, static_argnums=2)
        self._scatter: Any = jax.jit(self._trace_scatter, donate_argnums=0)

    def gather(self, pools: Pools, ids: Ids, parts: Sequence[Part]) -> list[jax.Array]:
        """Packed arrays, one a part, each (layers, pages, page_size, *tail) of the pool's dtype. Does not block.

        pools: [pool][layer] → (num_pages, page_size, *tail). ids: int32 [bucket]. The pages may be overwritten as
        soon as this returns: the device keeps the order.
        """
        packed: list[jax.Array] = []
        for group in groups_of(parts):
            first, stop = group[0].layer, group[-1].layer_stop
            layout = tuple((p.layer - first, p.layer_stop - first, p.page, p.page_stop) for p in group)
            packed += self._gather(pools[group[0].pool][first:stop], ids, layout)
        return packed

    def scatter(self, pools: Pools, arrays: Sequence[Any], ids: Ids, parts: Sequence[Part]) -> Pools:
        """The pools with the packed arrays written into pages ``ids``. The pools given are consumed. Does not block.

        A packed array in plain memory must not change until the result is computed: JAX may read it in place.
        """
        placed = []
        for part, array in zip(parts, arrays, strict=True):
            if tuple(array.shape) != tuple(part.shape) or str(array.dtype) != part.dtype:
                raise PlanError(
                    f"part {part.chunk} of pool {part.pool} is stated as {part.dtype}{list(part.shape)} "
                    f"but its array is {array.dtype}{list(array.shape)}"
                )
            placed.append(_placed(array, pools[part.pool][0].sharding))
        # A program a part: one program over all parts keeps a second copy of them alive, and took three times as
        # long for 47 MB on CPU (measured).
        written = [list(layers) for layers in pools]
        for part, array in zip(parts, placed, strict=True):
            place = slice(part.layer, part.layer_stop)
            layers, rows = written[part.pool][place], ids[part.page : part.page_stop]
            written[part.pool][place] = self._scatter(layers, array, rows)
        return written

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
        if not _copies_rows(array.dtype):
            return [a.at[rows].set(array[i], mode="promise_in_bounds") for i, a in enumerate(layers)]

        def write(layer: jax.Array, pages: jax.Array) -> jax.Array:
            def write_page(k: Any, out: jax.Array) -> jax.Array:
                return lax.dynamic_update_slice_in_dim(out, lax.dynamic_slice_in_dim(pages, k, 1), rows[k], 0)

            written: jax.Array = lax.fori_loop(0, rows.shape[0], write_page, layer)
            return written

        # A loop a layer: one loop over ten layers took half as long again.
        return [write(layer, array[i]) for i, layer in enumerate(layers)]


def _copies_rows(dtype: Any) -> bool:
    """Whether a loop of one-page updates is the faster scatter. XLA for CPU copies a page of 4-byte values at memcpy speed
    in it, 1.6 times as fast as in its own scatter; narrower types it converts, pool and all (docs/performance.md)."""
    return jax.default_backend() == "cpu" and dtype.itemsize >= 4


def _shapes(pools: Pools) -> tuple[PoolShape, ...]:
    return tuple((len(layers), layers[0].shape, str(layers[0].dtype)) for layers in pools)


def _placed(array: Any, sharding: Any) -> jax.Array:
    """The array committed to the pools' devices: anything else would compile the program a second time."""
    if isinstance(array, jax.Array) and array.committed and array.sharding == sharding:
        return array
    placed: jax.Array = jax.device_put(array, sharding)
    return placed
