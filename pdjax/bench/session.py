"""One whole run of the client: look who answers, warm up, send, show progress, sum up.

SIGINT ends the sending; what has come by then is summed up all the same. Must never print a figure of a run without
saying that it was cut short.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdjax.bench.client import Load, Outcome, Run, probe
from pdjax.bench.dialects import Dialect
from pdjax.bench.measures import summary
from pdjax.bench.workload import Job

INTERRUPTED = "interrupted: only the requests that had ended are in the figures"
KEEP_ALIVE = (
    "through this router a kept-alive connection adds a fixed 40 ms or so to the time to first token (its client "
    "sockets have no TCP_NODELAY): --fresh-connections measures without it"
)


@dataclass
class Session:
    """figures: measures.summary. interrupted: SIGINT came before the end."""

    figures: dict[str, Any]
    outcomes: list[Outcome]
    notes: list[str]
    interrupted: bool


async def session(
    load: Load, dialect: Dialect, jobs: Sequence[Job], bounds: dict[str, float], warmup: int, console: Console
) -> Session:
    """Raises ConfigError when nobody answers at the address."""
    is_rust_router = await probe(load)
    if warmup:  # compiles, connections and caches are not what is measured
        first = [replace(job, at_s=None, n_output=min(job.n_output, 4)) for job in jobs[:warmup]]
        await Run(replace(load, concurrency=load.concurrency or 1), dialect).go(first)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=len(jobs), failed=0)
        failed = 0

        def on_end(outcome: Outcome) -> None:
            nonlocal failed
            failed += bool(outcome.error)
            progress.update(task, advance=1, failed=failed)

        run = Run(load, dialect, on_end)
        interrupted = await _until_interrupted(run.go(jobs))
    notes = [INTERRUPTED] if interrupted else []
    if is_rust_router and not load.fresh_connections:
        notes.append(KEEP_ALIVE)
    return Session(summary(run.outcomes, run.duration_s, bounds), run.outcomes, notes, interrupted)


async def _until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Whether SIGINT ended it."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return task.cancelled()
