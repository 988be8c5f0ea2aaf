"""Which implementation moves KV pages on this backend, behind two functions.

Must never choose silently: an implementation that was asked for by name and cannot run here is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Part
from pdjax.engine.kernels.plan import Ids


class PageMover(Protocol):
    """Moves pages between pools and packed arrays. ids come from ``plan``, parts from ``core.pools.plan_parts``."""

    compiles: Counter[tuple[str, int]]

    def gather(self, pools: list[list[Any]], ids: Ids, parts: Sequence[Part]) -> list[Any]: ...

    def scatter(
        self, pools: list[list[Any]], arrays: Sequence[Any], ids: Ids, parts: Sequence[Part]
    ) -> list[list[Any]]: ...


def make_mover(name: str = "xla") -> PageMover:
    """The page mover called ``name``. Raises ConfigError for a name that does not exist."""
    if name == "xla":
        from pdjax.engine.kernels.xla import XlaMover

        return XlaMover()
    raise ConfigError(f"unknown page mover {name!r}: use 'xla'")
