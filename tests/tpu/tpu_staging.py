"""Check of host staging on the device (RFC-2 §5.5 mode B): the right bytes in pinned memory, and how fast they get there."""

from __future__ import annotations

import jax
import numpy as np
from tpu_bench import Bench, spec_of
from tpu_timing import seconds_of

from pdjax.core.budget import Slot
from pdjax.core.pools import packed_bytes, plan_parts
from pdjax.engine.kernels.host_staging import HOST_KIND, HostStage


def rate(bench: Bench) -> None:
    """From packed arrays on the device into a slot that is used again and again, and the runtime's own way beside it."""
    sizes, device = bench.sizes, jax.devices()[0]
    spec = spec_of((sizes.num_pages, sizes.page_size, sizes.width), sizes.dtype, sizes.layers)
    stage, rng = HostStage(device), np.random.default_rng(2)
    for number, n_pages in enumerate(sizes.pages, 1):
        parts = plan_parts([spec], n_pages)
        arrays = [
            jax.device_put(rng.integers(-100, 100, part.shape).astype(jax.numpy.dtype(part.dtype)), device)
            for part in parts
        ]
        slot = Slot(number, packed_bytes([spec], n_pages))
        took_s = seconds_of(lambda a=arrays, p=parts, s=slot: stage.copy(a, p, s), sizes.rounds)
        assert slot.arrays is not None
        for array, staged in zip(arrays, slot.arrays, strict=True):
            assert staged.sharding.memory_kind == HOST_KIND, staged.sharding
            assert np.array_equal(np.asarray(staged), np.asarray(array)), f"{n_pages} pages: bytes differ"
        bench.figure(f"{n_pages} pages into a slot: time", took_s * 1e3, "ms")
        bench.figure(f"{n_pages} pages into a slot: rate", slot.n_bytes / took_s / 1e9, "GB/s")
    assert set(stage.compiles.values()) == {1}, f"compiled again: {stage.compiles}"
