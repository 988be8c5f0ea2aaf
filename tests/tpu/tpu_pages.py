"""Checks of the page movers on the device: bit for bit against numpy, timed against XLA's own and the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from tpu_bench import Bench, spec_of
from tpu_timing import seconds_from, seconds_of

from pdjax.core.pools import Part, PoolTransferSpec, plan_parts
from pdjax.engine.kernels.mover import PageMover, make_mover
from pdjax.engine.kernels.pallas import PallasMover
from pdjax.engine.kernels.plan import Ids, gather_ids, scatter_ids
from pdjax.engine.kernels.xla import XlaMover

Pool = list[jax.Array]


def plans(num_pages: int, rng: np.random.Generator) -> Iterator[tuple[str, list[int]]]:
    """Page lists of every kind: one page, neighbours, neighbours backwards, scattered ones, the whole pool."""
    pages = np.arange(1, num_pages)
    some = max(2, num_pages // 3)
    yield "one", [num_pages - 1]
    yield "run", pages[:some].tolist()
    yield "backwards", pages[:some][::-1].tolist()
    yield "scattered", rng.permutation(pages)[:some].tolist()
    yield "all", rng.permutation(pages).tolist()


def compare(
    mover: PageMover, spec: PoolTransferSpec, content: np.ndarray[Any, Any], pages: list[int]
) -> None:
    """Gather these pages, and scatter them into a pool of zeros: every byte as numpy has it. Raises AssertionError.

    content: (layers, num_pages, page_size, width).
    """
    parts, ids = plan_parts([spec], len(pages)), gather_ids(pages, spec.shape[0])
    pool = [jax.device_put(layer) for layer in content]
    arrays = mover.gather([pool], ids, parts)
    for part, array in zip(parts, arrays, strict=True):
        rows = ids[part.page : part.page_stop]
        _same(np.asarray(array), content[part.layer : part.layer_stop][:, rows], f"gather of {part.layer}…")
    empty = [jnp.zeros(spec.shape, spec.dtype) for _ in range(spec.n_layers)]
    [written] = mover.scatter([empty], arrays, scatter_ids(pages, spec.shape[0]), parts)
    for layer, array in enumerate(written):
        expected = np.zeros(spec.shape, content.dtype)
        expected[pages] = content[layer, pages]
        # Page 0 takes the padding of a bucket.
        _same(np.asarray(array)[1:], expected[1:], f"scatter into layer {layer}")


def _same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], what: str) -> None:
    wrong = int((found.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8)).sum())
    assert wrong == 0, f"{what}: {wrong} of {found.nbytes} bytes differ"


def exact(bench: Bench) -> None:
    """Every dtype, page size and kind of plan, with the mover that the engine chooses here."""
    sizes, rng, n = bench.sizes, np.random.default_rng(0), 0
    for dtype in sizes.exact_dtypes:
        mover = make_mover(bench.hardware.platform, dtype)
        for page_size in sizes.exact_page_sizes:
            shape = (sizes.exact_pages, page_size, sizes.exact_width)
            spec = spec_of(shape, dtype, sizes.exact_layers)
            values = rng.integers(-100, 100, (sizes.exact_layers, *shape))
            content = values.astype(jnp.dtype(dtype))
            for kind, pages in plans(sizes.exact_pages, rng):
                try:
                    compare(mover, spec, content, pages)
                except AssertionError as error:
                    raise AssertionError(f"{dtype}, pages of {page_size}, {kind}: {error}") from error
                n += 1
    bench.figure("combinations compared bit for bit", n, "")


class _Timed:
    """The pool of the sizes, and requests of so many pages in it."""

    def __init__(self, bench: Bench) -> None:
        sizes = bench.sizes
        self.spec = spec_of((sizes.num_pages, sizes.page_size, sizes.width), sizes.dtype, sizes.layers)
        self.pool = [jnp.full(self.spec.shape, layer, sizes.dtype) for layer in range(sizes.layers)]
        self._rng = np.random.default_rng(1)

    def request(self, n_pages: int) -> tuple[Ids, Ids, tuple[Part, ...]]:
        """(ids of a gather, ids of a scatter, parts) of scattered pages."""
        pages = self._rng.permutation(np.arange(1, self.spec.shape[0]))[:n_pages].tolist()
        parts = plan_parts([self.spec], n_pages)
        return gather_ids(pages, self.spec.shape[0]), scatter_ids(pages, self.spec.shape[0]), parts

    def seconds(self, mover: PageMover, n_pages: int, rounds: int) -> tuple[float, float, int]:
        """(gather, scatter, bytes moved) of one request."""
        source, target, parts = self.request(n_pages)
        gather_s = seconds_of(lambda: mover.gather([self.pool], source, parts), rounds)
        arrays = mover.gather([self.pool], source, parts)

        def scatter(pool: Pool) -> Pool:
            [self.pool] = mover.scatter([pool], arrays, target, parts)
            return self.pool

        scatter_s = seconds_from(scatter, self.pool, rounds)
        return gather_s, scatter_s, sum(part.nbytes for part in parts)


def rate(bench: Bench) -> None:
    """The engine's mover beside XLA's own gather and scatter, for requests of several lengths."""
    sizes, timed = bench.sizes, _Timed(bench)
    platform = bench.hardware.platform
    for name, mover in (("engine", make_mover(platform, sizes.dtype)), ("xla", XlaMover(platform))):
        for n_pages in sizes.pages:
            gather_s, scatter_s, n_bytes = timed.seconds(mover, n_pages, sizes.rounds)
            bench.moved(f"{name} gather, {n_pages} pages", n_bytes, gather_s)
            bench.moved(f"{name} scatter, {n_pages} pages", n_bytes, scatter_s)


def depth_sweep(bench: Bench) -> None:
    """The kernels with fewer and more layers in flight: which depth is best only the hardware can tell."""
    sizes = bench.sizes
    interpret = False if bench.hardware.is_tpu else pltpu.InterpretParams()
    timed = _Timed(bench)
    n_pages = sizes.pages[len(sizes.pages) // 2] if bench.hardware.is_tpu else sizes.pages[0]
    for depth in sizes.depths:
        mover = PallasMover(depth=depth, interpret=interpret)
        gather_s, scatter_s, n_bytes = timed.seconds(mover, n_pages, sizes.rounds)
        bench.moved(f"gather, {n_pages} pages, depth {depth}", n_bytes, gather_s)
        bench.moved(f"scatter, {n_pages} pages, depth {depth}", n_bytes, scatter_s)
