"""Campaigns: random worlds (``draw``) run, checked and counted.

Must never read real time for a decision, and never keep state between seeds.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdjax.core import transitions
from pdjax.sim.draw import draw
from pdjax.sim.properties.sometimes import MOMENTS
from pdjax.sim.workers import workers

RAISED = "the run raised"


@dataclass
class Found:
    """What one seed showed. signature: how it failed, as ``shrink`` keeps it; text: for people."""

    seed: int
    digest: str = ""
    signature: list[str] = field(default_factory=list)
    text: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    events: int = 0


def run_seed(seed: int) -> Found:
    """Draw, run, check."""
    from pdjax.sim.replay import run_trace
    from pdjax.sim.shrink import failures

    trace = draw(seed)
    found = Found(seed)
    try:
        result = run_trace(trace)
    except Exception as error:  # the world itself gave up: a finding, and the campaign goes on
        found.signature, found.text = [RAISED], f"{type(error).__name__}: {error}"
        return found
    found.digest = result.digest
    found.signature = failures(trace, result)
    found.text = "; ".join([*map(str, result.violations[:2]), *result.mismatches[:2]])
    found.outcomes.update(o.outcome for o in result.outcomes.values())
    found.moments.update(result.coverage["moments"])
    found.rows.update(result.coverage["rows"])
    found.events = result.events
    return found


@dataclass
class Report:
    """A campaign so far."""

    seeds: int = 0
    seconds: float = 0.0
    failed: list[Found] = field(default_factory=list)
    total: Found = field(default_factory=lambda: Found(-1))

    def add(self, found: Found) -> None:
        self.seeds += 1
        self.total.outcomes += found.outcomes
        self.total.moments += found.moments
        self.total.rows += found.rows
        self.total.events += found.events
        if found.signature:
            self.failed.append(found)

    @property
    def rate(self) -> float:
        return self.seeds / self.seconds if self.seconds else 0.0


def campaign(
    n_seeds: int,
    *,
    first: int = 0,
    jobs: int = 1,
    keep_going: bool = False,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run seeds [first, first + n_seeds). Stops at the first failure unless keep_going."""
    report, began = Report(), time.perf_counter()
    for found in _results(range(first, first + n_seeds), jobs):
        report.add(found)
        report.seconds = time.perf_counter() - began
        progress(report)
        if report.failed and not keep_going:
            break
    return report


def _results(seeds: range, jobs: int) -> Iterator[Found]:
    if jobs <= 1:
        with _collected_by_hand():
            yield from map(_run_alone, seeds)
        return
    with workers(jobs, _begin) as pool:
        yield from pool.imap_unordered(_run_alone, seeds, chunksize=8)


def _run_alone(seed: int) -> Found:
    """A world is one great cycle of objects that are all of use until it ends: the collector looks only then."""
    found = run_seed(seed)
    gc.collect()
    return found


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()  # what stays for ever is not looked at again
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _begin() -> None:
    """A worker starts."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.disable()


def summary(report: Report, *, coverage: bool = False) -> str:
    """A campaign in a few lines."""
    total = report.total
    outcomes = ", ".join(f"{n} {name}" for name, n in sorted(total.outcomes.items()))
    text = (
        f"{report.seeds} seeds, {len(report.failed)} failed, {total.events} events, {report.rate:.1f} seeds/s\n"
        f"requests: {outcomes}"
    )
    if not coverage:
        return text
    lines = [text, "moments:"]
    lines += [f"  {total.moments.get(name, 0):6} {name}: {what}" for name, what in MOMENTS.items()]
    missing = [i for i in range(len(transitions.ROWS)) if i not in total.rows]
    lines.append(
        f"rows: {len(transitions.ROWS) - len(missing)} of {len(transitions.ROWS)} reached; not: {missing}"
    )
    return "\n".join(lines)
