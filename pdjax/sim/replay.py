"""run_trace: one trace file run in a simulated world, watched by every property. The fuzzer's inner loop.

Must never read a file, print, or keep anything between two runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pdjax.core import conform, log_lines
from pdjax.core.settings import PDSettings
from pdjax.faults.work import INJECTED
from pdjax.sim.digest import digest_of, first_difference
from pdjax.sim.faults import Scenario
from pdjax.sim.loop import Name, choice_of
from pdjax.sim.properties import Monitor, Violation
from pdjax.sim.router import Record, Router
from pdjax.sim.trace_file import parse
from pdjax.sim.trace_types import Trace
from pdjax.sim.world import World

MAX_EVENTS = 500_000  # of one run, some 700 times an ordinary one: beyond it something goes in circles
LOOK_S = 0.005  # how often a settling world is looked at


class NoEndError(RuntimeError):
    """The run goes in circles, or stands still with a request open. The text says at what time."""


@dataclass(frozen=True)
class Outcome:
    """How a request ended for its client. ms: from its step to its end."""

    outcome: str
    reason: str
    status: int
    tokens: tuple[int, ...]
    ms: float
    wrong: str = ""


@dataclass
class Result:
    """What a run showed. mismatches: expectations of the file that were not met, properties aside.

    coverage: "rows" → {row of the table: times}, "moments" → {interesting state: times}. unfired: steps that never
    fired; skipped: steps that found no target; idle_rules: steps whose rule on messages or pulls never acted. quiet_ms: when everything was free after the last outcome.
    """

    trace: Trace
    outcomes: dict[str, Outcome]
    violations: list[Violation]
    log_lines: list[bytes]
    events: int
    taken: list[Name]
    coverage: dict[str, dict[Any, int]]
    mismatches: list[str]
    unfired: list[int]
    skipped: list[int]
    idle_rules: list[int]
    end_ms: float
    quiet_ms: float | None
    graveyard: int = 0
    records: Mapping[str, Record] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        return digest_of(self.log_lines)

    @cached_property
    def choices(self) -> list[dict[str, Any]]:
        """As a file that replays exactly this run has them."""
        return [choice_of(name) for name in self.taken]

    @cached_property
    def differs_at(self) -> int | None:
        """The first line of the log that is not as the file's digest has it; None: it is, or there is no digest."""
        return first_difference(self.trace.digest, self.log_lines) if self.trace.digest else None

    @property
    def broken(self) -> list[str]:
        """Properties that were broken, in the order of their first breach."""
        return list(dict.fromkeys(v.property for v in self.violations))

    @property
    def ok(self) -> bool:
        """As the file expects."""
        return not self.mismatches and set(self.broken) == set(self.trace.violations)


def t_free_s(settings: list[PDSettings]) -> float:
    """T_free of protocol §7, for the slowest node."""
    return max(max(s.lease_s, s.limbo_timeout_s) + s.answer_bound_s for s in settings)


class Run:
    """One trace in one world, step by step. ``finish`` gives the result."""

    def __init__(self, trace: Trace, *, watch: bool = True, conformance: bool = True) -> None:
        self.trace = trace
        self.world = World(
            specs=trace.nodes, timing=trace.timing, seed=trace.seed, choices=trace.choices,
            clock_offset_s={k: v / 1000 for k, v in trace.clock_offset.items()},
        )  # fmt: skip
        self.records: list[dict[str, Any]] | None = [] if conformance else None
        if self.records is not None:
            self.world.taps.append(self.records.append)
            self.records.extend(self.world.early_lines)
        self.raised: list[tuple[str, BaseException]] = []
        self.world.on_raise = lambda node, error: self.raised.append((node, error))
        self.monitor = Monitor(self.world) if watch else None
        if self.monitor is not None:
            for line in self.world.early_lines:
                self.monitor.on_line(line)
            self.world.taps.append(self.monitor.on_line)
        self.router = Router(self.world, trace.router, trace.seed)
        self.scenario = Scenario(self.world, self.router, trace)
        if self.monitor is not None:
            self.world.instants.append(self.monitor.on_instant)
        self.quiet_s: float | None = None
        self.mismatches: list[str] = []

    def go(self) -> None:
        """Until every request has its outcome, every timed step has fired, and everything is free again."""
        world, router, scenario = self.world, self.router, self.scenario
        while router.n_open or scenario.pending:
            if not world.step():
                raise NoEndError(f"a request is open at {world.now * 1000:g} ms and nothing will ever happen")
            self._count()
        began_s = max(router.last_end_s, scenario.last_s)
        settings = [spec.settings for spec in self.trace.nodes]
        bound = self.trace.quiescent_within
        bound_s = bound / 1000 if bound is not None else t_free_s(settings)
        if self._settle(began_s + bound_s, strict=False):
            self.quiet_s = world.now
        else:
            text = "; ".join(f"{name}: {held}" for name, held in world.held(strict=False).items())
            self.mismatches.append(f"not free {bound_s * 1000:g} ms after the last outcome: {text}")
        # Graveyard pulls and their notices are bounded by their own timers: see them end, too.
        more_s = max(s.graveyard_timeout_s + s.notice_life_s + s.answer_bound_s for s in settings)
        self._settle(world.now + more_s, strict=True)

    def _count(self) -> None:
        if self.world.net.n_events > MAX_EVENTS:
            raise NoEndError(f"no end after {MAX_EVENTS:,} events, at {self.world.now * 1000:g} ms")

    def _settle(self, stop_s: float, *, strict: bool) -> bool:
        world = self.world
        look_s = world.now
        while True:
            if world.now >= look_s:
                if world.quiescent(strict=strict):
                    return True
                look_s = world.now + LOOK_S
            if not world.step(stop_s):
                return world.quiescent(strict=strict)
            self._count()

    def finish(self) -> Result:
        world, scenario, trace = self.world, self.scenario, self.trace
        scenario.give_back_pages()
        graveyard = sum(len(node.transport.pulls) for node in world.nodes.values() if node.alive)
        monitor = self.monitor
        if monitor is not None:
            for name, error in self.raised:
                monitor.raised(name, error)
            monitor.at_end(world)
        violations = list(monitor.violations) if monitor is not None else []
        violations += self._nonconforming({v.property for v in violations})
        outcomes = {
            rid: Outcome(r.outcome, r.reason, r.status, tuple(r.tokens), (r.ended or 0) - r.began, r.wrong)
            for rid, r in self.router.records.items()
        }
        self._compare(outcomes)
        return Result(
            trace=trace,
            outcomes=outcomes,
            violations=violations,
            log_lines=world.lines,
            events=world.net.n_events,
            taken=world.net.taken,
            coverage={
                "rows": dict(monitor.sometimes.rows) if monitor is not None else dict.fromkeys(world.rows, 1),
                "moments": dict(monitor.sometimes.moments) if monitor is not None else {},
            },
            mismatches=self.mismatches,
            unfired=[s.index for s in trace.steps if s.index not in scenario.fired],
            skipped=[i for i, found in sorted(scenario.fired.items()) if not found],
            idle_rules=scenario.idle_rules(),
            end_ms=world.now * 1000,
            quiet_ms=self.quiet_s * 1000 if self.quiet_s is not None else None,
            graveyard=graveyard,
            records=self.router.records,
        )

    def _nonconforming(self, known: set[str]) -> list[Violation]:
        """The log against the table, once more and by other code than the properties."""
        if self.records is None:
            return []
        lines = [log_lines.Line(i, raw) for i, raw in enumerate(self.records, 1)]
        return [
            Violation(
                f.rule,
                "the event log is a run of the table",
                f.text,
                lines[f.line - 1].raw["t"] if f.line else 0,
            )
            for f in conform.broken(lines)
            if INJECTED not in f.text
        ]

    def _compare(self, outcomes: Mapping[str, Outcome]) -> None:
        for rid, want in self.trace.outcomes.items():
            got = outcomes.get(rid)
            if got is None:
                if want.outcome != "any":
                    self.mismatches.append(f"{rid}: {want.outcome} expected, its request step never fired")
                continue
            found = f"{got.outcome} ({got.reason or got.status})"
            if want.outcome not in ("any", got.outcome):
                self.mismatches.append(f"{rid}: {want.outcome} expected, {found} found {got.wrong}".rstrip())
            elif want.reason and want.reason != got.reason:
                self.mismatches.append(f"{rid}: reason {want.reason} expected, {got.reason or 'none'} found")
            if want.within is not None and got.ms > want.within:
                self.mismatches.append(f"{rid}: within {want.within:g} ms expected, it took {got.ms:g} ms")


def run_trace(
    trace: Trace | Mapping[str, Any],
    *,
    watch: bool = True,
    conformance: bool = True,
    reset_s: float | None = None,
) -> Result:
    """Run a trace, a checked one or a decoded file. Raises TraceError for a wrong one, NoEndError.

    reset_s: until a pull whose peer has died is seen to have failed; None: a link's time.
    """
    with _quiet():
        run = Run(trace if isinstance(trace, Trace) else parse(trace), watch=watch, conformance=conformance)
        if reset_s is not None:
            run.world.net.reset_s = reset_s
        run.go()
        return run.finish()


@contextmanager
def _quiet() -> Iterator[None]:
    """Faults make schedulers log errors, with their tracebacks, as they should: a million worlds need none of them."""
    logger = logging.getLogger("pdjax.sched")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
