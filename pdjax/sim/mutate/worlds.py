"""Mutants in the model: small searches that between them meet most rows, and what the unchanged table gives there.

Every search ends in about a second, so that each mutant can be searched to the end. Must never sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdjax.sim.explore import SEARCHES, Ask, Config, Violation, explore
from pdjax.sim.explore.config import TIMERS
from pdjax.sim.explore.menu import CALM, FEW
from pdjax.sim.mutate.patches import Mutant

SMALL = FEW.but(wire=1)
AGAIN = (Ask(uses=2),)
TWINS = (Ask(), Ask(p="p1", d_leg=False))  # both P have the room


def searches() -> list[Config]:
    """The smallest first, roughly."""
    return [
        SMALL.but(name="no leg on D", asks=(Ask(d_leg=False),), lose=True, timers=TIMERS),
        SMALL.but(name="no leg on P", asks=(Ask(p_leg=False),), wire=2, lose=True, timers=TIMERS, aborts=("d",)),
        CALM,
        CALM.but(name="calm, every end", wire=4, errors=("p", "d"), bad_legs=True, part_fails=True),
        SMALL.but(name="duplicates", wire=2, duplicate=True),
        SMALL.but(name="two P have the room", asks=TWINS),
        SMALL.but(name="two D, one prompt", asks=(Ask(), Ask(d="d1", p_leg=False)), aborts=("d",)),
        SMALL.but(name="D dies", crashes=(("d0", 1),), wire=2, aborts=("d",), timers=("lease", "tombstone")),
        SMALL.but(name="P dies", crashes=(("p0", 1),), wire=2, aborts=("d",), timers=("silence", "tombstone")),
        SMALL.but(name="P dies while it is asked", crashes=(("p0", 1),), wire=2, timers=("hello",)),
        SMALL.but(name="P dies, the room again", asks=AGAIN, crashes=(("p0", 1),)),
        SMALL.but(name="D dies, the room again", asks=AGAIN, crashes=(("d0", 1),), aborts=("d",)),
        SMALL.but(name="another model", alien=("d0",), lose=True, duplicate=True, extra_prefills=("p1",)),
        SMALL.but(name="gated", gated=True, lose=True, timers=TIMERS, aborts=("p",)),
        SMALL.but(name="loss and every timer", lose=True, timers=TIMERS, hangs=True, part_fails=True),
        SEARCHES["one-room-gated"].config,
        SEARCHES["crossed"].config,
        CALM.but(name="calm, a P without the leg", wire=3, extra_prefills=("p1",), aborts=("d",)),
        SMALL.but(name="two P, and one counts as silent", asks=TWINS, timers=("silence",)),
        SMALL.but(name="two P, and one dies", asks=TWINS, crashes=(("p1", 1),)),
        SMALL.but(name="two P, and one fails", asks=TWINS, aborts=("p",)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A search of the unchanged table. graph: equal for equal sets of states and edges, within one process."""

    config: Config
    rows: frozenset[int]
    graph: int


@dataclass
class Searched:
    """What the searches that meet a mutant's row say. same: in how many of them its graph is the unchanged one."""

    violation: Violation | None = None
    config: Config | None = None
    met: int = 0
    same: int = 0
    differ: list[str] = field(default_factory=list)


def known() -> list[Known]:
    """ValueError: a search of the unchanged table finds a breach."""
    found = []
    for config in searches():
        report = explore(config)
        if not report.ok:
            bad = [f"{v.rule}: {v.text}" for v in report.violations + report.deadlocks]
            raise ValueError(f"{config.name}: {bad or 'not complete'} without any mutant")
        found.append(Known(config, frozenset(report.coverage), report.graph))
    return found


def search(mutant: Mutant, baseline: list[Known]) -> Searched:
    """Until a property breaks, or to the end of every search that meets the row. The patch must be on."""
    result = Searched()
    for world in baseline:
        if mutant.row < 0 or not mutant.differs_in(world.rows):
            continue
        result.met += 1
        try:
            report = explore(world.config)
        except Exception as error:  # a mutant may break the model in any way: that is no property
            result.differ.append(f"{world.config.name}: {type(error).__name__}")
            continue
        wrong = report.violations + report.deadlocks
        if wrong:
            result.violation, result.config = wrong[0], world.config
            return result
        if report.graph == world.graph:
            result.same += 1
        else:
            result.differ.append(world.config.name)
    return result
