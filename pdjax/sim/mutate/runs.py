"""Mutants in the simulator: recorded traces and random worlds, run until a property speaks.

Must never count the comparison of event logs with the table: only S and V properties.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdjax.sim import replay
from pdjax.sim.draw import draw
from pdjax.sim.mutate.patches import Mutant, attribute
from pdjax.sim.trace_file import parse

MAX_STEPS = 12  # of a counterexample: what a stranger can follow
MAX_EVENTS = 60_000  # of one run; ten times what the longest recorded trace needs
STUCK_S = 15  # of processor time in one run, after which a loop of the program does not come back


@dataclass
class Run:
    """One trace of the fixed set, and the rows that the unchanged program meets in it. path: "" for a random world."""

    name: str
    path: str
    trace: dict[str, Any]
    rows: frozenset[int]
    seconds: float


class Stuck(Exception):
    """A turn of a driver or a step of a scheduler never ends."""


@contextmanager
def _processor_time(limit_s: float) -> Iterator[None]:
    """Raises Stuck in the middle of what this thread does once it has used so much: of other threads' time nothing counts."""
    until, over = time.thread_time() + limit_s, False

    def look(signum: int, frame: Any) -> None:
        if over:  # the signal was on its way when the run ended
            return
        left_s = until - time.thread_time()
        if left_s <= 0:
            raise Stuck
        signal.setitimer(signal.ITIMER_PROF, left_s)

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def broken(trace: dict[str, Any]) -> list[str]:
    """The properties that a run breaks, first breach first.

    A run that raises breaks S11, one that goes in circles V1, one that hangs V5.
    """
    with attribute(replay, "MAX_EVENTS", MAX_EVENTS):
        run = replay.Run(parse(trace), conformance=False)
        try:
            with _processor_time(STUCK_S):
                run.go()
                return run.finish().broken
        except Stuck:
            return [*_seen(run), "V5"]
        except Exception:  # a mutant may break the program in any way
            return [*_seen(run), "V1" if run.world.net.n_events > MAX_EVENTS else "S11"]


def _seen(run: replay.Run) -> list[str]:
    return run.monitor.violated() if run.monitor is not None else []


def baseline(traces: Iterable[tuple[str, str, dict[str, Any]]]) -> list[Run]:
    """Run the unchanged program, quickest first. ValueError: a trace breaks a property as it is."""
    runs = []
    for name, path, trace in traces:
        began = time.perf_counter()
        result = replay.run_trace(trace, conformance=False)
        if result.violations:
            raise ValueError(f"{name} violates {result.violations[0]} without any mutant")
        rows = frozenset(result.coverage["rows"])
        runs.append(Run(name, path, trace, rows, time.perf_counter() - began))
    return sorted(runs, key=lambda run: run.seconds)


def recorded_traces(*folders: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """The traces of the project that a stranger can follow and that break nothing, with their paths."""
    found = []
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            trace = json.loads(path.read_text(encoding="utf-8"))
            small = len(trace["steps"]) <= MAX_STEPS and "model" not in trace
            if small and not trace.get("expect", {}).get("violations"):
                found.append((path.stem, path.as_posix(), trace))
    return found


def random_worlds(n_seeds: int) -> list[tuple[str, str, dict[str, Any]]]:
    return [(f"seed {seed}", "", draw(seed)) for seed in range(n_seeds)]


def noticed(mutant: Mutant, runs: list[Run]) -> tuple[str, Run] | None:
    """Run the mutant where its row is met, until a property speaks: that property and the run. The patch must be on."""
    meeting = [run for run in runs if mutant.differs_in(run.rows)]
    meeting.sort(key=lambda run: (run.name != mutant.shown_by, not mutant.below & run.rows))
    for run in meeting:
        found = broken(run.trace)
        if found:
            return found[0], run
    return None
