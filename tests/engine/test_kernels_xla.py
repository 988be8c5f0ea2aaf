"""Gather and scatter in plain XLA, bit for bit against numpy, and without a compile per request."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.core.errors import ConfigError
from pdjax.core.pools import PoolTransferSpec, page_bucket, plan_parts
from pdjax.engine.kernels.checksum import checksum, chosen
from pdjax.engine.kernels.plan import PlanError, gather_ids, scatter_ids
from pdjax.engine.kernels.xla import MERGE_PAGES, XlaMover, groups_of

NUM_PAGES = 48


def pool_spec(
    dtype: str = "float32", *, layers: int = 3, page_size: int = 4, tail: int = 8
) -> PoolTransferSpec:
    page_bytes = page_size * tail * jnp.dtype(dtype).itemsize
    return PoolTransferSpec("kv", "kv", dtype, (NUM_PAGES, page_size, tail), layers, page_bytes)


def make_pool(spec: PoolTransferSpec, seed: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    device = jax.devices()[0]
    values = [rng.integers(-100, 100, spec.shape) for _ in range(spec.n_layers)]
    return [jax.device_put(jnp.asarray(value, spec.dtype), device) for value in values]


def copies(pool: list[jax.Array]) -> list[np.ndarray]:
    return [np.array(layer) for layer in pool]


SPECS = {
    "float32": pool_spec(),
    "bfloat16": pool_spec("bfloat16"),
    "int8": pool_spec("int8"),
    "float8_e4m3fn": pool_spec("float8_e4m3fn"),
    "one_layer_a_part": pool_spec(layers=2, page_size=64, tail=1024),  # a page of a layer is 256 KiB
    "cut_along_pages": pool_spec(layers=1, page_size=256, tail=4096),  # 4 MiB: four pages in a part
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("n", [1, 5, 11])
def test_pages_arrive_bit_for_bit(name: str, n: int) -> None:
    spec = SPECS[name]
    parts = plan_parts([spec], n)
    if name == "cut_along_pages":
        assert (len(parts) > 1) == (n > 4)
    rng = random.Random(n)
    source, target = (rng.sample(range(1, NUM_PAGES), n) for _ in range(2))
    pool, other = make_pool(spec, 1), make_pool(spec, 2)
    before, untouched = copies(pool), copies(other)
    mover = XlaMover("cpu")
    arrays = mover.gather([pool], gather_ids(source, NUM_PAGES), parts)
    padded = source + [source[-1]] * (page_bucket(n) - n)
    for part, array in zip(parts, arrays, strict=True):
        assert (array.shape, str(array.dtype), array.nbytes) == (part.shape, part.dtype, part.nbytes)
        rows = padded[part.page : part.page_stop]
        exact = np.stack([before[layer][rows] for layer in range(part.layer, part.layer_stop)])
        assert np.array_equal(np.asarray(array), exact)
    [written] = mover.scatter([other], arrays, scatter_ids(target, NUM_PAGES), parts)
    for layer, (was, now) in enumerate(zip(untouched, copies(written), strict=True)):
        was[target] = before[layer][source]
        assert np.array_equal(was[1:], now[1:]), (
            "a page that is not a destination changed, or a destination is wrong"
        )


@pytest.mark.parametrize("n", [1, 2])
def test_a_narrow_float_arrives_in_a_large_pool_and_in_a_small_one(n: int) -> None:
    """Below MERGE_PAGES pages of the pool for each that is written, all of it is walked over; above, none."""
    num_pages = 2 * MERGE_PAGES
    rng = np.random.default_rng(n)
    bits = rng.integers(0, 1 << 16, (num_pages + n, 4, 8), np.uint16)
    # Every pattern but NaN: XLA's own scatter turns a signalling one into a quiet one.
    bits[(bits & 0x7FFF) > 0x7F80] = 0
    values = bits.view(jnp.bfloat16)
    spec = PoolTransferSpec("kv", "kv", "bfloat16", (num_pages, 4, 8), 1, 64)
    pool = [jax.device_put(values[:num_pages], jax.devices()[0])]
    pages = [num_pages - 1, 7][:n]
    mover = XlaMover("cpu")
    [[written]] = mover.scatter(
        [pool], [values[None, num_pages:]], scatter_ids(pages, num_pages), plan_parts([spec], n)
    )
    expected = bits[:num_pages].copy()
    expected[pages] = bits[num_pages:]
    assert np.array_equal(np.asarray(written).view(np.uint16), expected)


def test_several_pools_travel_together() -> None:
    specs = [pool_spec(), pool_spec("bfloat16", layers=2, tail=16)]
    pools = [make_pool(spec, i) for i, spec in enumerate(specs)]
    others = [make_pool(spec, i + 5) for i, spec in enumerate(specs)]
    parts = plan_parts(specs, 3)
    mover = XlaMover("cpu")
    before = [copies(pool) for pool in pools]
    arrays = mover.gather(pools, gather_ids([3, 1, 2], NUM_PAGES), parts)
    written = mover.scatter(others, arrays, scatter_ids([7, 8, 9], NUM_PAGES), parts)
    for was, now in zip(before, written, strict=True):
        for layer, array in zip(was, copies(now), strict=True):
            assert np.array_equal(layer[[3, 1, 2]], array[[7, 8, 9]])


def test_scatter_is_in_place() -> None:
    """The pools are donated: no second pool is allocated, and the old handles are dead."""
    spec = pool_spec(page_size=16, tail=64)
    pool = make_pool(spec, 1)
    parts = plan_parts([spec], 2)
    pointers = [layer.unsafe_buffer_pointer() for layer in pool]
    arrays = [np.zeros(part.shape, part.dtype) for part in parts]
    [written] = XlaMover("cpu").scatter([pool], arrays, scatter_ids([1, 2], NUM_PAGES), parts)
    assert [layer.unsafe_buffer_pointer() for layer in written] == pointers
    assert all(layer.is_deleted() for layer in pool)


def test_a_gathered_copy_does_not_follow_the_pool() -> None:
    """Source stability (S4): the pages are reused at once, the packed arrays stay."""
    spec = pool_spec()
    pool = make_pool(spec, 1)
    parts = plan_parts([spec], 2)
    mover = XlaMover("cpu")
    before = copies(pool)
    arrays = mover.gather([pool], gather_ids([4, 6], NUM_PAGES), parts)
    mover.scatter([pool], [jnp.ones_like(a) for a in arrays], scatter_ids([4, 6], NUM_PAGES), parts)
    assert np.array_equal(np.asarray(arrays[0]), np.stack([layer[[4, 6]] for layer in before]))


def test_two_hundred_requests_compile_once_a_bucket() -> None:
    spec = pool_spec()
    pool, mover, rng = make_pool(spec, 1), XlaMover("cpu"), random.Random(0)
    buckets = set()
    for i in range(200):
        n = rng.randint(1, 20)
        buckets.add(page_bucket(n))
        parts = plan_parts([spec], n)
        arrays: list[Any] = mover.gather(
            [pool], gather_ids(rng.sample(range(1, NUM_PAGES), n), NUM_PAGES), parts
        )
        if i % 2:  # what a transport delivers may be plain memory
            arrays = [np.array(a) for a in arrays]
        [pool] = mover.scatter(
            [pool], arrays, scatter_ids(rng.sample(range(1, NUM_PAGES), n), NUM_PAGES), parts
        )
    pools = ((spec.n_layers, spec.shape, spec.dtype),)
    assert mover.compiles == {(name, b, pools): 1 for name in ("gather", "scatter") for b in buckets}
    assert mover._gather._cache_size() == mover._scatter._cache_size() == len(buckets)


def test_a_large_gather_is_cut_into_programs_that_begin_early_and_compile_once() -> None:
    spec = pool_spec(layers=6, page_size=128, tail=1024)  # 8 MiB of 16 pages a layer
    parts = plan_parts([spec, spec], 16)
    groups = list(groups_of(parts))
    assert [part for group in groups for part in group] == list(parts)
    assert [len(group) for group in groups] == [2, 2, 2] * 2
    assert all(len({part.pool for part in group}) == 1 for group in groups)
    pools = [make_pool(spec, 1), make_pool(spec, 2)]
    pages = list(range(1, 17))
    mover = XlaMover("cpu")
    arrays = mover.gather(pools, gather_ids(pages, NUM_PAGES), parts)
    for part, array in zip(parts, arrays, strict=True):
        assert np.array_equal(np.asarray(array[0]), np.asarray(pools[part.pool][part.layer])[pages])
    assert sum(mover.compiles.values()) == mover._gather._cache_size() == 1


def test_an_array_that_differs_from_its_part_is_refused_before_any_write() -> None:
    spec = pool_spec()
    parts = plan_parts([spec], 2)
    pool = make_pool(spec, 1)
    for wrong in (np.zeros((3, 3, 4, 8), np.float32), np.zeros(parts[0].shape, np.float16)):
        with pytest.raises(PlanError, match=r"is stated as float32\[3, 2, 4, 8\] but its array is"):
            XlaMover("cpu").scatter([pool], [wrong], scatter_ids([1, 2], NUM_PAGES), parts)
    assert not any(layer.is_deleted() for layer in pool)


def test_on_a_tpu_a_pool_that_would_be_copied_is_refused_whatever_its_type() -> None:
    spec, mover = pool_spec(dtype="float16"), XlaMover("tpu")  # of a type that has no kernel
    parts, pool = plan_parts([spec], 2), make_pool(spec, 1)
    with pytest.raises(ConfigError, match="would be copied by every program on a TPU"):
        mover.gather([pool], gather_ids([1, 2], NUM_PAGES), parts)
    arrays = [np.zeros(part.shape, part.dtype) for part in parts]
    with pytest.raises(ConfigError, match="would be copied by every program on a TPU"):
        mover.scatter([pool], arrays, scatter_ids([1, 2], NUM_PAGES), parts)
    assert not any(layer.is_deleted() for layer in pool)


@pytest.mark.parametrize("n", [1, 3])
def test_ids_of_another_bucket_are_refused_before_any_write(n: int) -> None:
    spec = pool_spec()
    parts = plan_parts([spec], 2)
    pool, pages = make_pool(spec, 1), list(range(1, n + 1))
    with pytest.raises(PlanError, match=f"the plan has {n} pages but the packed arrays carry 2"):
        XlaMover("cpu").gather([pool], gather_ids(pages, NUM_PAGES), parts)
    arrays = [np.zeros(part.shape, part.dtype) for part in parts]
    with pytest.raises(PlanError, match=f"the plan has {n} pages but the packed arrays carry 2"):
        XlaMover("cpu").scatter([pool], arrays, scatter_ids(pages, NUM_PAGES), parts)
    assert not any(layer.is_deleted() for layer in pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_checksum_sees_every_byte_and_not_the_kind_of_array(dtype: str) -> None:
    value = jnp.arange(60).reshape(3, 4, 5).astype(dtype)
    sums = {checksum(value), checksum(np.asarray(value))}
    assert len(sums) == 1
    sums |= {checksum(value.at[2, 3, 4].add(1)), checksum(jnp.roll(value, 1)), checksum(value[:, ::-1])}
    assert len(sums) == 4


def test_sampled_checksums_reach_every_part_in_turn() -> None:
    assert chosen(5, "off", 0) == set()
    assert chosen(5, "all", 3) == {0, 1, 2, 3, 4}
    for n in (1, 3, 8, 30):
        turns = [chosen(n, "sampled", turn) for turn in range(8)]
        assert all(turns), "every hand-off is checked somewhere"
        assert set().union(*turns) == set(range(n))
        assert max(map(len, turns)) <= -(-n // min(n, 8))
