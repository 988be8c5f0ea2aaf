"""What a scheduler is started with. Must never read flags: serve does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings


def of_settings(settings: PDSettings) -> dict[str, Any]:
    """The fields of SchedulerConfig that the settings of the hand-off decide."""
    return {
        "recompute": settings.on_failure == "recompute",
        "max_recompute": settings.max_recompute,
        "recompute_every": settings.recompute_every,
        "request_timeout_s": settings.request_timeout_s,
    }


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler. Raises ConfigError on a value that cannot work.

    context_length: longest prompt + output, in tokens. max_running: requests that own a decode row (D: or whose KV
    is on its way); 0: the runner's largest batch. max_queue: requests taken in and not started, a submit beyond
    it is refused. chunked_prefill_size: prompt tokens computed in one step. disable_radix_cache: no prompt shares the
    pages of another one (on D none ever does). overlap: results are read one turn after their step was launched.
    recompute, on D: a prompt whose P is lost is prefilled here; max_recompute: how many may wait for that;
    recompute_every: while others decode, a chunk of one is computed in one of so many steps; request_timeout_s: from
    its arrival on, none waits longer for its turn.
    """

    context_length: int
    eos_ids: frozenset[int] = frozenset()
    max_running: int = 0
    max_queue: int = 1024
    chunked_prefill_size: int = 512
    disable_radix_cache: bool = False
    overlap: bool = True
    recompute: bool = False
    max_recompute: int = 64
    recompute_every: int = 4
    request_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (
            ("context_length", 2),
            ("max_running", 0),
            ("max_queue", 1),
            ("chunked_prefill_size", 1),
            ("max_recompute", 1),
            ("recompute_every", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: set it to at least {least}")
