"""Gather and scatter of KV pages as plain XLA programs, for any backend.

gather: one program reads the pages of all layers into private packed arrays. scatter: one program writes packed
arrays into donated pools, in place. Both take bucketed ids from ``plan`` (which has checked them), so that one
compile serves every request of a bucket. Must never see an unchecked id, and never keep a pool: its owner does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pdjax.core.pools import Part
from pdjax.engine.kernels.mover import CompileKey
from pdjax.engine.kernels.plan import Ids, PlanError

# (pool, layer, layer_stop, page, page_stop) of each part: what a program is specialised for, beside the shapes.
Layout = tuple[tuple[int, int, int, int, int], ...]
Pools = list[list[jax.Array]]


def layout_of(parts: Sequence[Part]) -> Layout:
    return tuple((p.pool, p.layer, p.layer_stop, p.page, p.page_stop) for p in parts)


class XlaMover:
    """Page mover in plain XLA; one serves any number of pools and owners."""

    def __init__(self) -> None:
        self.compiles: Counter[CompileKey] = Counter()
        self._gather: Any = jax.jit(self._trace_gather, static_argnums=2)
        self._scatter: Any = jax.jit(self._trace_scatter, static_argnums=3, donate_argnums=0)

    def gather(self, pools: Pools, ids: Ids, parts: Sequence[Part]) -> list[jax.Array]:
        """Packed arrays, one a part, each (layers, pages, page_size, *tail) of the pool's dtype. Does not block.

        pools: [pool][layer] → (num_pages, page_size, *tail). ids: int32 [bucket]. The pages may be overwritten as
        soon as this returns: the device keeps the order.
        """
        return list(self._gather(pools, ids, layout_of(parts)))

    def scatter(self, pools: Pools, arrays: Sequence[Any], ids: Ids, parts: Sequence[Part]) -> Pools:
        """The pools with the packed arrays written into pages ``ids``. The pools given are consumed. Does not block.

        A packed array in plain memory must not change until the result is computed: JAX may read it in place.
        """
        first = pools[0][0]
        ready = []
        for part, array in zip(parts, arrays, strict=True):
            if tuple(array.shape) != tuple(part.shape) or str(array.dtype) != part.dtype:
                raise PlanError(
                    f"part {part.chunk} of pool {part.pool} is stated as {part.dtype}{list(part.shape)} "
                    f"but its array is {array.dtype}{list(array.shape)}"
                )
            ready.append(_placed(array, first.sharding))
        return [list(layers) for layers in self._scatter(pools, ready, ids, layout_of(parts))]

    def _trace_gather(self, pools: Pools, ids: jax.Array, layout: Layout) -> list[jax.Array]:
        self.compiles[_key("gather", ids, pools)] += 1  # runs once a compile: this body is traced, not called
        packed = []
        for pool, layer, layer_stop, page, page_stop in layout:
            rows = ids[page:page_stop]
            # clip: ids are checked on the host, and the default mode costs a comparison a row (facts/kernels).
            packed.append(jnp.stack([a.at[rows].get(mode="clip") for a in pools[pool][layer:layer_stop]]))
        return packed

    def _trace_scatter(self, pools: Pools, arrays: list[jax.Array], ids: jax.Array, layout: Layout) -> Pools:
        self.compiles[_key("scatter", ids, pools)] += 1
        written = [list(layers) for layers in pools]
        for array, (pool, layer, layer_stop, page, page_stop) in zip(arrays, layout, strict=True):
            rows = ids[page:page_stop]
            for i in range(layer, layer_stop):
                written[pool][i] = written[pool][i].at[rows].set(array[i - layer], mode="promise_in_bounds")
        return written


def _key(name: str, ids: jax.Array, pools: Pools) -> CompileKey:
    return name, ids.shape[0], tuple((layers[0].shape, str(layers[0].dtype)) for layers in pools)


def _placed(array: Any, sharding: Any) -> jax.Array:
    """The array committed to the pools' devices: anything else would compile the program a second time."""
    if isinstance(array, jax.Array) and array.committed and array.sharding == sharding:
        return array
    placed: jax.Array = jax.device_put(array, sharding)
    return placed
