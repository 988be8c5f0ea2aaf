"""The file that shows a mutant's mistake: a scenario where one shows it, else a way through the model.

A file breaks a property with the mutant and none without it, and has at most MAX_STEPS steps. Must never keep one that
was not seen to do both.
"""

from __future__ import annotations

import re
from typing import Any

from pdjax.sim import shrink
from pdjax.sim.explore import Config, Violation, saved, scenario
from pdjax.sim.mutate.patches import Mutant
from pdjax.sim.mutate.runs import MAX_STEPS, broken
from pdjax.sim.replay import run_trace
from pdjax.sim.schema import TraceError

SHRINK_S = 10.0  # for one file
STUCK = frozenset({"V2", "V7", "S12"})


def slug(name: str) -> str:
    """A mutant's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("!", "not ").replace("to =", "to the same")).strip(
        "-"
    )


def from_model(mutant: Mutant, violation: Violation, config: Config) -> tuple[str, dict[str, Any]]:
    """Property and file of what a search has found. The patch must be off."""
    name = slug(mutant.name)
    plain = scenario.trace(violation, config, name)
    found = shown(mutant, plain)
    if found:
        return found, _told(small(mutant, plain, found), mutant, found)
    stuck = not _walks_into(mutant, saved.trace(violation, config, name, stuck=False))
    made = saved.trace(violation, config, name, stuck=stuck)
    if _walks_into(mutant, made) != violation.rule or saved.walk(made["model"]).breaches:
        raise AssertionError(
            f"{mutant.name}: the way that the search has found does not show {violation.rule}"
        )
    return violation.rule, _told(made, mutant, violation.rule)


def _walks_into(mutant: Mutant, trace: dict[str, Any]) -> str:
    with mutant.patch():
        found = saved.walk(trace["model"]).broken
    return found[0] if found else ""


def shown(mutant: Mutant, trace: dict[str, Any]) -> str:
    """The property that a scenario breaks with the mutant and not without it; "": none, or it is too long."""
    if len(trace["steps"]) > MAX_STEPS or run_trace(trace, conformance=False).violations:
        return ""
    with mutant.patch():
        found = broken(trace)
    return found[0] if found else ""


def from_seed(mutant: Mutant, trace: dict[str, Any], rule: str) -> dict[str, Any] | None:
    """A random world made small. None: not small enough."""
    made = small(mutant, trace | {"name": slug(mutant.name)}, rule)
    return _told(made, mutant, rule) if shown(mutant, made) == rule else None


def small(mutant: Mutant, trace: dict[str, Any], rule: str) -> dict[str, Any]:
    """Fewer steps and plainer values, as long as the same property breaks with the mutant."""

    def signature(candidate: dict[str, Any]) -> tuple[str, ...]:
        try:
            return tuple(broken(candidate)[:1])
        except TraceError:
            return ()

    with mutant.patch():
        return shrink.shrink(trace, signature=(rule,), limit_s=SHRINK_S, run=signature).trace


def _told(trace: dict[str, Any], mutant: Mutant, rule: str) -> dict[str, Any]:
    rids = [s["request"]["rid"] for s in trace["steps"] if "request" in s]
    why = f"with the mutant “{mutant.name}” ({mutant.what}) this breaks {rule}; without it nothing breaks"
    return trace | {"why": why, "expect": {"outcomes": dict.fromkeys(rids, "any")}}
