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

# (name, page bucket, (shape, dtype) of a layer of each pool)
CompileKey = tuple[str, int, tuple[tuple[tuple[int, ...], str], ...]]


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
