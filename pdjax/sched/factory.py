"""The scheduler of each mode, wired to its manager and its prefix cache (RFC-2 §5.4, §6.3).

Must never read flags: serve does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pdjax.core.errors import ConfigError
from pdjax.engine.base import BaseKVManager
from pdjax.engine.ports import Clock, Runner
from pdjax.sched.chunk_cache import BasePrefixCache, ChunkCache
from pdjax.sched.decode import DecodeScheduler
from pdjax.sched.pages import PageAllocator
from pdjax.sched.prefill import PrefillScheduler
from pdjax.sched.radix_cache import RadixCache
from pdjax.sched.scheduler import Scheduler, SchedulerConfig

DisaggregationMode = Literal["null", "prefill", "decode"]

_CLASSES: dict[str, type[Scheduler]] = {
    "null": Scheduler,
    "prefill": PrefillScheduler,
    "decode": DecodeScheduler,
}


def make_scheduler(
    mode: DisaggregationMode,
    config: SchedulerConfig,
    runner: Runner,
    clock: Clock,
    manager: BaseKVManager | None = None,
    *,
    wake: Callable[[], None] | None = None,
    cache: BasePrefixCache | None = None,
) -> Scheduler:
    """A Scheduler for mode; with a manager, the runner is registered with it. Raises ConfigError.

    wake is called from any thread when an idle loop has to call ``step`` again. The manager must be given the same
    callback for its events: the scheduler sees those only when it steps.
    """
    if mode not in _CLASSES:
        raise ConfigError(f"--disaggregation-mode {mode}: choose null, prefill or decode")
    if (manager is None) != (mode == "null"):
        raise ConfigError(
            f"--disaggregation-mode {mode} {'takes no' if mode == 'null' else 'needs a'} KV manager"
        )
    if manager is not None:
        manager.register_runner(runner)
    if cache is None:
        cache = _make_cache(mode, config, runner, manager)
    return _CLASSES[mode](config, runner, clock, cache, manager, wake=wake)


def _make_cache(
    mode: DisaggregationMode, config: SchedulerConfig, runner: Runner, manager: BaseKVManager | None
) -> BasePrefixCache:
    """D shares nothing: what lands is written into pages of the attempt's own (RFC-2 §6.3)."""

    def note(event: str, token: int, pages: Sequence[int]) -> None:
        if manager is not None:
            manager.note(event, token=str(token), pages=list(pages))

    allocator = PageAllocator(runner.num_pages, note)
    if mode == "decode" or config.disable_radix_cache:
        return ChunkCache(allocator)
    return RadixCache(allocator, runner.page_size)
