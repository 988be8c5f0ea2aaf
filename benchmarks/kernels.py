"""Gather and scatter of KV pages on this backend beside numpy's own indexed copy of the same pages in the same run.

Each round takes numpy and the mover once, in a new order, with fresh random page ids; medians are compared. Pages have
64 KiB, or as little as keeps a move at 128 MiB. The pool of a layer has four times as many pages as are moved, as in
facts/kernels §1.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import numpy as np
from bench_common import Report, finish, parse

from pdjax.core.pools import PoolTransferSpec, plan_parts
from pdjax.engine.jax_transfer.process import prepare_process
from pdjax.engine.kernels.mover import make_mover
from pdjax.engine.kernels.plan import gather_ids, scatter_ids

DTYPES = ("float32", "bfloat16")
LAYERS = (1, 28, 64)
PAGES = (16, 64, 256, 1024)
PAGE_BYTES = 64 << 10
MOVE_BYTES = 128 << 20  # of the largest move
PAGE_SIZE = 16  # tokens
WAYS = ("gather", "numpy gather", "scatter", "numpy scatter")
ROUNDS = 9
WARM_ROUNDS = 2
AT = (28, 64)  # the size that the goals are for
# Most of numpy's time: 1 / 0.45, 1 / 0.4 and 1 / 0.25.
GOALS = {("gather", "float32"): 2.22, ("scatter", "float32"): 2.5, ("scatter", "bfloat16"): 4.0}


@dataclass
class Case:
    """One pool on the device and in numpy's memory, and pages to move."""

    dtype: str
    layers: int
    n: int
    page_bytes: int

    def __post_init__(self) -> None:
        kind = jax.numpy.dtype(self.dtype)
        self.num_pages = 4 * self.n + 1
        shape = (self.num_pages, PAGE_SIZE, self.page_bytes // PAGE_SIZE // kind.itemsize)
        self.spec = PoolTransferSpec("kv", "kv", self.dtype, shape, self.layers, self.page_bytes)
        self.parts = plan_parts([self.spec], self.n)
        rng = np.random.default_rng(1)
        row = rng.integers(0, 100, shape).astype(kind)
        self.plain = [row.copy() for _ in range(self.layers)]
        self.pool = [jax.device_put(layer, jax.devices()[0]) for layer in self.plain]
        self.plain_packed = [layer[: self.n].copy() for layer in self.plain]
        self.mover = make_mover(jax.default_backend(), self.dtype)
        self.packed = self.mover.gather([self.pool], gather_ids([1] * self.n, self.num_pages), self.parts)
        jax.block_until_ready(self.packed)

    def ways(self, pages: list[int]) -> dict[str, Callable[[], Any]]:
        source, target = gather_ids(pages, self.num_pages), scatter_ids(pages, self.num_pages)

        def gather() -> Any:
            return jax.block_until_ready(self.mover.gather([self.pool], source, self.parts))

        def scatter() -> None:
            [self.pool] = self.mover.scatter([self.pool], self.packed, target, self.parts)
            jax.block_until_ready(self.pool)

        def plain_scatter() -> None:
            for layer, rows in zip(self.plain, self.plain_packed, strict=True):
                layer[pages] = rows

        return {
            "gather": gather,
            "scatter": scatter,
            "numpy gather": lambda: [layer[pages] for layer in self.plain],
            "numpy scatter": plain_scatter,
        }

    def measure(self, rounds: int) -> dict[str, float]:
        """Way → median seconds, interleaved."""
        rng = random.Random(2)
        taken: dict[str, list[float]] = {}
        for turn in range(rounds + WARM_ROUNDS):
            ways = list(self.ways(rng.sample(range(1, self.num_pages), self.n)).items())
            rng.shuffle(ways)
            for name, way in ways:
                began = time.perf_counter()
                way()
                if turn >= WARM_ROUNDS:
                    taken.setdefault(name, []).append(time.perf_counter() - began)
        return {name: statistics.median(seconds) for name, seconds in taken.items()}


def page_bytes_for(layers: int, n: int) -> int:
    """Bytes of a page such that the whole move stays within MOVE_BYTES."""
    size = PAGE_BYTES
    while size * layers * n > MOVE_BYTES:
        size //= 2
    return size


def main() -> None:
    args = parse(__doc__)
    prepare_process()
    report = Report("kernels", args.quick)
    sizes = [(2, 3)] if args.quick else list(product(LAYERS, PAGES))
    for dtype in DTYPES:
        rows = []
        for layers, n in sizes:
            page_bytes = page_bytes_for(layers, n)
            took = Case(dtype, layers, n, page_bytes).measure(3 if args.quick else ROUNDS)
            gc.collect()  # of this size, before the next one is made
            shares = [took[f"numpy {move}"] / took[move] for move in ("gather", "scatter")]
            rows.append((layers, n, page_bytes >> 10, *(took[way] * 1e3 for way in WAYS), *shares))
            if (layers, n) == AT or args.quick:
                for move in ("gather", "scatter"):
                    report.add(
                        f"{move}, {dtype}, {layers} layers × {n} pages",
                        took[move] / took[f"numpy {move}"],
                        "× numpy's time",
                        f"numpy {took[f'numpy {move}'] * 1e3:.3g} ms, ours {took[move] * 1e3:.3g} ms",
                        None if args.quick else GOALS.get((move, dtype)),
                    )
        report.table(
            f"{dtype}: pages of a layer, moved at once",
            (
                "layers",
                "pages",
                "KiB a page",
                *(f"{way} ms" for way in WAYS),
                "gather, of numpy's speed",
                "scatter, of numpy's speed",
            ),
            rows,
        )
    finish(report, args)


if __name__ == "__main__":
    main()
