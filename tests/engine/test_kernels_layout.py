"""Which shape a TPU pool gets, and which pools are refused: page moves in place depend on nothing else."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pdjax.core.errors import ConfigError
from pdjax.engine.kernels.layout import (
    check_pool,
    packed_sharding,
    packing,
    padded_shape,
    placed,
    pool_shape,
)

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("shape", "dtype", "padded"),
    [
        ((9, 16, 384), "bfloat16", (9, 16, 384)),
        ((9, 64, 576), "bfloat16", (9, 64, 640)),
        ((9, 16, 16, 64), "bfloat16", (9, 16, 16, 128)),
        ((9, 16, 1, 128), "bfloat16", (9, 16, 2, 128)),
        ((9, 16, 1, 128), "float32", (9, 16, 1, 128)),
        ((9, 16, 8, 2, 128), "int8", (9, 16, 8, 4, 128)),
    ],
)
def test_a_tail_is_padded_to_whole_tiles(shape, dtype, padded):
    assert padded_shape(shape, dtype) == padded
    assert pool_shape(shape, dtype, "tpu") == padded
    assert pool_shape(shape, dtype, "cpu") == shape


@settings(deadline=None)  # a shared machine may stall
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
)
def test_padding_keeps_pages_and_needs_no_more(tail, dtype):
    shape = (5, 16, *tail)
    padded = padded_shape(shape, dtype)
    assert padded[:2] == shape[:2]
    assert all(big >= small for big, small in zip(padded, shape, strict=True))
    assert padded_shape(padded, dtype) == padded
    assert math.prod(padded) < math.prod(shape[:-1]) * (shape[-1] + 128) * packing(dtype)


@pytest.mark.parametrize(("dtype", "page_size", "multiple"), [("bfloat16", 3, 2), ("int8", 6, 4)])
def test_a_page_size_that_cannot_be_padded_is_refused(dtype, page_size, multiple):
    with pytest.raises(ConfigError, match=f"page_size={page_size} .* use a multiple of {multiple} tokens"):
        padded_shape((9, page_size, 128), dtype)


def test_a_pool_stored_in_another_order_is_refused():
    device = SingleDeviceSharding(jax.devices()[0])
    pool = jnp.zeros((4, 8, 128))
    check_pool(jax.device_put(pool, device))
    turned = jax.device_put(pool, Format(Layout(major_to_minor=(1, 0, 2)), device))
    with pytest.raises(ConfigError, match=r"stored with axes \(1, 0, 2\): it must be row by row"):
        check_pool(turned)


def test_the_shard_counts_not_the_whole():
    mesh = jax.sharding.AbstractMesh((4,), ("tp",))

    def pool(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    check_pool(pool((8, 16, 512), None, None, "tp"))
    check_pool(pool((8, 16, 8, 128), None, None, "tp", None))
    with pytest.raises(ConfigError, match=r"make it as \[8, 16, 128\]"):
        check_pool(pool((8, 16, 256), None, None, "tp"))
    with pytest.raises(ConfigError, match=r"make it as \[8, 16, 2, 128\]"):
        check_pool(pool((8, 16, 4, 128), None, None, "tp"))
    for spec in (("tp",), (None, "tp")):
        with pytest.raises(ConfigError, match="pages and tokens stay whole, shard the heads"):
            check_pool(pool((8, 16, 512), *spec))


def test_packed_arrays_live_where_their_pool_does():
    device = jax.devices()[0]
    single = SingleDeviceSharding(device)
    assert packed_sharding(single) is single
    sharded = NamedSharding(Mesh([device], ("tp",)), PartitionSpec(None, None, "tp"))
    assert packed_sharding(sharded).spec == PartitionSpec(None, None, None, "tp")
    array = placed(jnp.zeros((2, 3)), single)
    assert array.committed and placed(array, single) is array
