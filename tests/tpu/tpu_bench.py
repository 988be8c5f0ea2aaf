"""What a check is given: the hardware, the sizes, and where its figures go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from tpu_hardware import Hardware
from tpu_report import Figure
from tpu_sizes import Sizes

from pdjax.core.pools import PoolTransferSpec


@dataclass
class Bench:
    """peer: "ip:port" of a process that offers KV (tpu_transfer), for the checks that need two processes."""

    hardware: Hardware
    sizes: Sizes
    emit: Callable[[Figure], None]
    check: str = ""
    peer: str = ""

    def figure(self, name: str, value: float, unit: str, best: float | None = None) -> None:
        self.emit(Figure(self.check, name, value, unit, best))

    def moved(self, name: str, n_bytes: int, seconds: float) -> None:
        """A copy inside the device's memory: its time, and its rate beside the roofline. It reads and writes n_bytes each."""
        self.figure(f"{name}: time", seconds * 1e3, "ms")
        self.figure(f"{name}: memory traffic", 2 * n_bytes / seconds / 1e9, "GB/s", self.hardware.hbm_gb_s)


def spec_of(shape: tuple[int, ...], dtype: str, layers: int) -> PoolTransferSpec:
    """A pool of layers × shape, which is (num_pages, page_size, width)."""
    page_bytes = int(np.prod(shape[1:])) * jnp.dtype(dtype).itemsize
    return PoolTransferSpec("kv", "kv", dtype, shape, layers, page_bytes)
