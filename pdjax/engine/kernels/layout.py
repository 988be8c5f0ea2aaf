"""Shapes of KV pools that a TPU keeps in the order in which they are written, so that pages are moved in place.

XLA stores an array on a TPU in tiles and orders its axes to waste little of them. Only a pool whose last two axes fill
tiles is stored row by row; any other compiles as well, but each program that touches it then copies the whole pool there
and back (facts/kernels, "the trap"). So pools are padded here, by whoever makes them, and refused here, before a kernel is
given one. Must never accept in silence a pool that would be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from pdjax.core.errors import ConfigError

LANES = 128  # elements of a tile's last axis
WORD_BYTES = 4  # rows of narrower types are packed into words


def packing(dtype: Any) -> int:
    """Rows of this dtype that share a word: 1 for float32, 2 for bfloat16, 4 for int8 and float8."""
    return max(1, WORD_BYTES // int(jnp.dtype(dtype).itemsize))


def padded_shape(shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
    """The smallest shape (num_pages, page_size, *tail) that holds ``shape`` and is stored row by row on a TPU.

    Only the tail grows: as many bytes as XLA itself would pad to. Raises ConfigError when the page size would have to.
    """
    pages, page_size, *tail = shape
    rows = packing(dtype)
    tail[-1] = _multiple(tail[-1], LANES)
    if len(tail) > 1:
        tail[-2] = _multiple(tail[-2], rows)
    elif page_size % rows:
        raise ConfigError(
            f"page_size={page_size} does not fit a pool of {jnp.dtype(dtype)} on a TPU: use a multiple of {rows} tokens"
        )
    return (pages, page_size, *tail)


def pool_shape(shape: Sequence[int], dtype: Any, platform: str) -> tuple[int, ...]:
    """The shape in which a pool is to be made on this platform: padded on a TPU, as it is elsewhere."""
    return padded_shape(shape, dtype) if platform == "tpu" else tuple(shape)


def check_pool(pool: Any) -> None:
    """Raise ConfigError unless every device keeps this layer of a pool row by row.

    pool: a jax.Array or ShapeDtypeStruct (num_pages, page_size, *tail) with a sharding. A shard counts, not the whole:
    heads that are spread over devices may leave too few on each.
    """
    sharding = pool.sharding
    shape = tuple(pool.shape if sharding is None else sharding.shard_shape(pool.shape))
    if isinstance(sharding, NamedSharding) and any(axis is not None for axis in sharding.spec[:2]):
        raise ConfigError(
            f"a pool is sharded along {sharding.spec}: pages and tokens stay whole, shard the heads"
        )
    needed = padded_shape(shape, pool.dtype)
    if needed != shape:
        raise ConfigError(
            f"a pool of {pool.dtype}{list(shape)} would be copied by every program on a TPU: make it as {list(needed)} "
            "(engine.kernels.layout.pool_shape)"
        )
    layout = getattr(getattr(pool, "format", None), "layout", None)
    if layout is not None and layout.major_to_minor != tuple(range(len(shape))):
        raise ConfigError(
            f"a pool of {pool.dtype}{list(shape)} is stored with axes {layout.major_to_minor}: it must be row by row"
        )


def packed_sharding(sharding: Sharding) -> Sharding:
    """Where the packed arrays of a pool with this sharding live: with the layers as one more axis in front."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec: Any = PartitionSpec
    return NamedSharding(sharding.mesh, spec(None, *sharding.spec), memory_kind=sharding.memory_kind)


def placed(array: Any, sharding: Sharding) -> jax.Array:
    """The array committed to this sharding: anything else would compile the program a second time."""
    if isinstance(array, jax.Array) and array.committed and array.sharding == sharding:
        return array
    moved: jax.Array = jax.device_put(array, sharding)
    return moved


def _multiple(n: int, of: int) -> int:
    return -(-n // of) * of
