"""The host stage on the CPU backend's memory kinds: same bytes, same memory, nothing left on the device."""

from __future__ import annotations

import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.core.budget import HostSlots, Slot
from pdjax.core.errors import ConfigError
from pdjax.core.pools import Part, PoolTransferSpec, packed_bytes, plan_parts
from pdjax.engine.jax_transfer.verify import mismatch
from pdjax.engine.kernels.host_staging import HOST_KIND, HostStage
from pdjax.engine.kernels.mover import make_mover
from pdjax.engine.kernels.plan import gather_ids

DEVICE = jax.devices()[0]
LAYERS, PAGES, PAGE, WIDTH = 3, 24, 4, 8


def spec(dtype: str) -> PoolTransferSpec:
    page_bytes = PAGE * WIDTH * jnp.dtype(dtype).itemsize
    return PoolTransferSpec("kv", "kv", dtype, (PAGES, PAGE, WIDTH), LAYERS, page_bytes)


def pool_of(dtype: str, seed: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    values = rng.integers(-100, 100, (LAYERS, PAGES, PAGE, WIDTH))
    return [jax.device_put(jnp.asarray(layer, dtype), DEVICE) for layer in values]


def gathered(pool: list[jax.Array], pages: list[int], dtype: str) -> tuple[list[jax.Array], tuple[Part, ...]]:
    parts = plan_parts([spec(dtype)], len(pages))
    return make_mover("cpu", dtype).gather([pool], gather_ids(pages, PAGES), parts), parts


def test_this_backend_has_the_memory_that_is_staged_into() -> None:
    assert {HOST_KIND, "device"} <= {memory.kind for memory in DEVICE.addressable_memories()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_staged_hand_off_is_the_same_bytes_in_host_memory(dtype: str) -> None:
    pool, pages = pool_of(dtype, 1), [5, 3, 17, 9, 20]
    arrays, parts = gathered(pool, pages, dtype)
    expected = [np.asarray(array).tobytes() for array in arrays]
    slot = Slot(1, packed_bytes([spec(dtype)], len(pages)))
    staged = HostStage(DEVICE).copy(arrays, parts, slot)
    assert [np.asarray(array).tobytes() for array in staged] == expected
    assert {array.sharding.memory_kind for array in staged} == {HOST_KIND}
    assert mismatch(parts, staged) is None, "the transport would refuse them"


def pointers(slot: Slot) -> list[int]:
    assert slot.arrays is not None
    return [array.unsafe_buffer_pointer() for array in slot.arrays]


def test_a_slot_is_written_in_place_time_after_time() -> None:
    stage, slots = HostStage(DEVICE), HostSlots(1 << 20)
    n_bytes = packed_bytes([spec("float32")], 4)
    [slot, *_] = slots.fill([n_bytes])
    arrays, parts = gathered(pool_of("float32", 0), [1, 2, 3, 4], "float32")
    stage.prepare(slot, parts)
    where = pointers(slot)
    for seed in range(5):
        pool = pool_of("float32", seed)
        arrays, parts = gathered(pool, [9, 2, 7, 11], "float32")
        staged = stage.copy(arrays, parts, slot)
        [array] = staged
        for layer in range(LAYERS):
            assert np.array_equal(np.asarray(array)[layer], np.asarray(pool[layer])[[9, 2, 7, 11]])
        assert pointers(slot) == where
    assert set(stage.compiles.values()) == {1}


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "device")


def test_the_packed_copy_on_the_device_is_not_kept() -> None:
    stage, pool = HostStage(DEVICE), pool_of("float32", 0)
    slot = Slot(1, packed_bytes([spec("float32")], 2))
    before = device_bytes()
    arrays, parts = gathered(pool, [1, 2], "float32")
    assert device_bytes() == before + slot.n_bytes
    staged = stage.copy(arrays, parts, slot)
    del arrays
    assert device_bytes() == before and sum(array.nbytes for array in staged) == slot.n_bytes


def test_a_slot_of_another_size_is_refused() -> None:
    arrays, parts = gathered(pool_of("float32", 0), [1, 2], "float32")
    slot = Slot(7, packed_bytes([spec("float32")], 3))
    with pytest.raises(ValueError, match="slot 7 is for"):
        HostStage(DEVICE).copy(arrays, parts, slot)
    assert slot.arrays is None


def test_a_copy_that_fails_leaves_a_slot_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has consumed the slot's memory: the next copy gets new one, and does not find deleted arrays."""
    stage = HostStage(DEVICE)
    arrays, parts = gathered(pool_of("float32", 0), [1, 2], "float32")
    slot = Slot(1, packed_bytes([spec("float32")], 2))
    stage.copy(arrays, parts, slot)

    def fails(before: list[jax.Array], _: list[jax.Array]) -> None:
        for array in before:
            array.delete()
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_copy", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            stage.copy(arrays, parts, slot)
    staged = stage.copy(arrays, parts, slot)
    assert all(np.array_equal(a, b) for a, b in zip(staged, arrays, strict=True))


def test_a_device_without_pinned_memory_is_told_when_it_is_to_stage() -> None:
    only = types.SimpleNamespace(addressable_memories=lambda: [types.SimpleNamespace(kind="device")])
    stage = HostStage(only)  # type: ignore[arg-type]
    arrays, parts = gathered(pool_of("float32", 0), [1, 2], "float32")
    with pytest.raises(ConfigError, match="has no pinned_host memory, only device; drop it"):
        stage.copy(arrays, parts, Slot(1, packed_bytes([spec("float32")], 2)))
