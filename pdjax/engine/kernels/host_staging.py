"""Host staging (RFC-2 §5.5 mode B): packed arrays move from the device into preallocated pinned host memory.

What is offered to a D then lies in a slot of the host pool (core.budget decides which, and when it may be written
again), and the packed copy on the device is free as soon as it has been read. A slot's arrays are donated to the copy,
so the memory stays what was allocated at the start. Must never write into a slot that was not reserved for these bytes,
and never keep a slot: its owner does. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pdjax.core.budget import Slot
from pdjax.core.errors import ConfigError
from pdjax.core.pools import Part

HOST_KIND = "pinned_host"  # memory that the device's DMA engines reach; every backend of JAX 0.10 names it so
StageKey = tuple[str, int, int]  # "stage", arrays of a hand-off, bytes of a hand-off


class HostStage:
    """Copies the packed arrays of one device into slots.

    compiles: how often the program for each hand-off size was compiled in this process; above 1, requests wait for it.
    The first use raises ConfigError on a device that has no such memory.
    """

    def __init__(self, device: jax.Device) -> None:
        self.compiles: Counter[StageKey] = Counter()
        self._device = device

    @cached_property
    def _host(self) -> jax.sharding.SingleDeviceSharding:
        """Asked for when something is staged: a server that stages nothing runs on a device without such memory, too."""
        kinds = [memory.kind for memory in self._device.addressable_memories()]
        if HOST_KIND not in kinds:
            raise ConfigError(
                f"--disaggregation-host-staging: {self._device} has no {HOST_KIND} memory, only {', '.join(kinds)}; drop it"
            )
        return jax.sharding.SingleDeviceSharding(self._device, memory_kind=HOST_KIND)

    @cached_property
    def _copy(self) -> Any:
        return jax.jit(self._trace_copy, donate_argnums=0, out_shardings=self._host)

    @cached_property
    def _zeros(self) -> Any:
        return jax.jit(_zeros, static_argnums=0, out_shardings=self._host)

    def prepare(self, slot: Slot, parts: Sequence[Part]) -> None:
        """Give a fresh slot its memory: one array of zeros a part, each committed to the device's host memory."""
        slot.arrays = self._zeros(tuple((part.shape, part.dtype) for part in parts))

    def copy(self, arrays: Sequence[jax.Array], parts: Sequence[Part], slot: Slot) -> list[jax.Array]:
        """The same arrays in the slot's memory, what was there before is overwritten. Dispatches, does not wait.

        arrays: one a part, on the device. Raises ValueError when the slot was made for another hand-off.
        """
        n_bytes = sum(part.nbytes for part in parts)
        if slot.n_bytes != n_bytes:
            raise ValueError(f"slot {slot.number} is for {slot.n_bytes} bytes, this hand-off has {n_bytes}")
        if slot.arrays is None:
            self.prepare(slot, parts)
        # Taken out first: a copy that fails has consumed them, and the next one must not find them deleted.
        before, slot.arrays = slot.arrays, None
        slot.arrays = self._copy(before, list(arrays))
        return list(slot.arrays)

    def _trace_copy(self, slot: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        # Runs once a compile. The update spans the whole buffer: XLA writes into the donated memory all the same.
        self.compiles["stage", len(arrays), sum(a.size * a.dtype.itemsize for a in arrays)] += 1
        return [
            lax.dynamic_update_slice(lies, jax.device_put(comes, jax.memory.Space.Host), (0,) * comes.ndim)
            for lies, comes in zip(slot, arrays, strict=True)
        ]


def _zeros(shapes: tuple[tuple[tuple[int, ...], str], ...]) -> list[jax.Array]:
    # Put there explicitly: of out_shardings alone the arrays' type would not say that they are on the host.
    return [jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host) for shape, dtype in shapes]
