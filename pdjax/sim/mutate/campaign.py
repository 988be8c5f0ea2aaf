"""A campaign: each mutant in the recorded traces, in the model, in random worlds; what notices it, or how it survives.

Must never leave a mutant noticed without a file that shows it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pdjax.sim.mutate import counterexample, runs, worlds
from pdjax.sim.mutate.mistakes import mistakes
from pdjax.sim.mutate.patches import Mutant
from pdjax.sim.mutate.rows import row_mutants


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. by: the property that noticed, "" for a survivor; path: the trace that shows it.

    made: that file's content, where it is new. runs: how many traces and random worlds meet it; met: in how many
    searches it was made; same: in how many of these states and edges are the unchanged ones; differ: the others.
    """

    name: str
    by: str = ""
    path: str = ""
    made: dict[str, Any] | None = None
    runs: int = 0
    met: int = 0
    same: int = 0
    differ: tuple[str, ...] = ()

    @property
    def killed(self) -> bool:
        return bool(self.by)


@dataclass
class Library:
    """Where mutants are run: scenarios, random worlds, searches, each with the rows that the unchanged program meets."""

    traces: list[runs.Run] = field(default_factory=list)
    seeds: list[runs.Run] = field(default_factory=list)
    searches: list[worlds.Known] = field(default_factory=list)

    def add(self, name: str, path: str, trace: dict[str, Any]) -> None:
        """A file that a mutant of this campaign has given: the next ones may be shown by it, too."""
        if "model" not in trace:
            self.traces += runs.baseline([(name, path, trace)])

    def meeting(self, mutant: Mutant) -> int:
        return sum(mutant.differs_in(run.rows) for run in self.traces + self.seeds)


def judge(mutant: Mutant, library: Library) -> Verdict:
    """Scenarios first: they are what a stranger can follow best. Then the searches, then random worlds."""
    with mutant.patch():
        seen = runs.noticed(mutant, library.traces)
    if seen is not None:
        return Verdict(mutant.name, seen[0], seen[1].path)
    with mutant.patch():
        found = worlds.search(mutant, library.searches)
    if found.violation is not None and found.config is not None:
        rule, made = counterexample.from_model(mutant, found.violation, found.config)
        return Verdict(mutant.name, rule, made=made)
    with mutant.patch():
        seen = runs.noticed(mutant, library.seeds)
    if seen is not None:
        small = counterexample.from_seed(mutant, seen[1].trace, seen[0])
        if small is not None:
            return Verdict(mutant.name, seen[0], made=small)
    met = library.meeting(mutant)
    return Verdict(mutant.name, runs=met, met=found.met, same=found.same, differ=tuple(found.differ))


_LIBRARY = Library()


def _start(library: Library) -> None:
    _LIBRARY.traces, _LIBRARY.seeds = library.traces, library.seeds
    _LIBRARY.searches = worlds.known()  # hashes are comparable within one process


def _judge_named(name: str) -> Verdict:
    return judge(next(m for m in [*mistakes(), *row_mutants()] if m.name == name), _LIBRARY)


def campaign(mutants: list[Mutant], library: Library, jobs: int = 1) -> Iterator[Verdict]:
    """Judge each mutant, in order."""
    if jobs <= 1:
        library.searches = library.searches or worlds.known()
        for mutant in mutants:
            yield judge(mutant, library)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _start, (library,)) as pool:
        yield from pool.imap(_judge_named, [m.name for m in mutants], chunksize=4)
