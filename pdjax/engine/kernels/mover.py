"""Which implementation moves KV pages on a platform, behind two functions: the one place that decides it.

An engine calls ``make_mover`` and nothing else of this package moves pages for it. Must never guess: what each form is
good for was measured (docs/performance.md) or compiled (docs/tpu.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, Protocol

import jax.numpy as jnp

from pdjax.core.pools import Part
from pdjax.engine.kernels.plan import Ids

PoolShape = tuple[int, tuple[int, ...], str]  # layers, shape of a layer's array, dtype
# "gather": page bucket and all pools. "scatter": rows of a part and the layers that it covers.
CompileKey = tuple[str, int, tuple[PoolShape, ...]]

# kernel: Pallas, both ways. The others are XLA's, and differ in the scatter alone: its own (set), a loop of one-page
# updates (pages), or, where it pays, one pass over the pool that takes each page from where it has to come from (merge).
Form = Literal["kernel", "pages", "merge", "set"]
KERNEL_DTYPES = frozenset({"bfloat16", "float32", "int8", "float8_e4m3fn"})


class PageMover(Protocol):
    """Moves pages between pools and packed arrays. ids come from ``plan``, parts from ``core.pools.plan_parts``.

    compiles: how often each program was compiled in this process; above 1, requests wait for compiles.
    """

    compiles: Counter[CompileKey]

    def gather(self, pools: list[list[Any]], ids: Ids, parts: Sequence[Part]) -> list[Any]: ...

    def scatter(
        self, pools: list[list[Any]], arrays: Sequence[Any], ids: Ids, parts: Sequence[Part]
    ) -> list[list[Any]]: ...


def form_of(platform: str, dtype: str) -> Form:
    """How pages of this dtype are moved on this platform.

    XLA for CPU copies a page at the speed of memory in a loop, 1.3 to 1.6 times as fast as in its own scatter. But it
    computes floats narrower than 4 bytes as float32: a loop converts the whole pool for each page, a scatter each page.
    """
    if platform == "tpu":
        return "kernel" if dtype in KERNEL_DTYPES else "set"
    if platform != "cpu":
        return "set"
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return "merge" if narrow else "pages"


@cache
def make_mover(platform: str, dtype: str) -> PageMover:
    """The page mover of pools of this dtype on this platform, one for the process: owners share its programs only."""
    if form_of(platform, dtype) == "kernel":
        from pdjax.engine.kernels.pallas import PallasMover

        return PallasMover()
    from pdjax.engine.kernels.xla import XlaMover

    return XlaMover(platform)
