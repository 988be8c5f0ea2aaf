"""What a scheduler is started with. Must never read flags: serve does."""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.core.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler. Raises ConfigError on a value that cannot work.

    context_length: longest prompt + output, in tokens. max_running: requests that own a decode row (D: or whose KV
    is on its way); 0: the runner's largest batch. max_queue: requests taken in and not started, a submit beyond
    it is refused. chunked_prefill_size: prompt tokens computed in one step. disable_radix_cache: no prompt shares the
    pages of another one (on D none ever does). overlap: results are read one turn after their step was launched.
    """

    context_length: int
    eos_ids: frozenset[int] = frozenset()
    max_running: int = 0
    max_queue: int = 1024
    chunked_prefill_size: int = 512
    disable_radix_cache: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        for name, least in (
            ("context_length", 2),
            ("max_running", 0),
            ("max_queue", 1),
            ("chunked_prefill_size", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: set it to at least {least}")
