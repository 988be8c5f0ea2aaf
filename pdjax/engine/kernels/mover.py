"""Which implementation moves KV pages on this backend, behind two functions.

Must never choose silently: an implementation that was asked for by name and cannot run here is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Part
from pdjax.engine.kernels.plan import Ids

PoolShape = tuple[int, tuple[int, ...], str]  # layers, shape of a layer's array, dtype
# "gather": page bucket and all pools. "scatter": rows of a part and the layers that it covers.
CompileKey = tuple[str, int, tuple[PoolShape, ...]]


class PageMover(Protocol):
    """Moves pages between pools and packed arrays. ids come from ``plan``, parts from ``core.pools.plan_parts``.

    compiles: how often each program was compiled in this process; above 1, requests wait for compiles.
    """

    compiles: Counter[CompileKey]

    def gather(self, pools: list[list[Any]], ids: Ids, parts: Sequence[Part]) -> list[Any]: ...

    def scatter(
        self, pools: list[list[Any]], arrays: Sequence[Any], ids: Ids, parts: Sequence[Part]
    ) -> list[list[Any]]: ...


@lru_cache
def make_mover(name: str = "xla") -> PageMover:
    """The page mover called ``name``, one for the process: owners share its programs, not their pools. Raises ConfigError for a name that does not exist."""
    if name == "xla":
        from pdjax.engine.kernels.xla import XlaMover

        return XlaMover()
    raise ConfigError(f"unknown page mover {name!r}: use 'xla'")
