"""A way through the model as part of a trace file, and its replay: what a scenario cannot force, such as a timer.

The file's ``model`` has the search's bounds (those unlike the defaults), every move in order, and, where the breach is
that nothing leads out of the last state, the property that says so. Must never search for anything but that way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdjax.sim.explore import props, scenario
from pdjax.sim.explore.config import Ask, Config
from pdjax.sim.explore.parts import Action
from pdjax.sim.explore.search import LEVELS, Violation, leads_out
from pdjax.sim.explore.story import sentence, tell
from pdjax.sim.explore.world import World


def trace(violation: Violation, config: Config, name: str, *, stuck: bool) -> dict[str, Any]:
    """A trace file: the scenario as far as one can say it, and the model's own moves. stuck: nothing leads out."""
    model: dict[str, Any] = {"bounds": _bounds(config), "moves": [_plain(a) for a in violation.steps]}
    if stuck:
        model["stuck"] = violation.rule
    return scenario.trace(violation, config, name) | {"model": model}


@dataclass
class Walk:
    """What became of a file's moves. taken: how many were possible; breaches: what broke, the first one first."""

    world: World
    moves: list[Action]
    taken: int = 0
    breaches: list[Violation] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        return list(dict.fromkeys(v.rule for v in self.breaches))

    def told(self) -> str:
        """Numbered steps, then the property that broke or why the run ends."""
        if self.breaches:
            return tell(self.breaches[0], self.world)
        text = tell(Violation("", "", self.moves[: self.taken]), self.world).rsplit("\n", 1)[0]
        if self.taken < len(self.moves):
            return f"{text}\n  the table in force goes no further: not possible here: {sentence(self.moves[self.taken])}"
        return f"{text}\n  no property breaks"


def walk(model: Mapping[str, Any]) -> Walk:
    """Make the moves of a file. ValueError: its bounds or its moves are none of the model."""
    world = World(_config(model["bounds"]))
    checker, state = props.Checker(world), world.initial()
    found = Walk(world, [_tuples(a) for a in model["moves"]])
    for action in found.moves:
        move = next((m for m in world.moves(state) if m.action == action), None)
        if move is None:
            return found
        found.taken += 1
        texts = checker.move(state, move)
        if not move.errors:
            state = move.state
            texts = texts + checker.state(state)
        if texts:
            found.breaches += [_violation(text, found) for text in texts]
            return found
    rule = model.get("stuck")
    if rule is not None and not leads_out(world, state, rule):
        found.breaches.append(Violation(rule, LEVELS[rule].text, found.moves))
    return found


def _violation(text: str, found: Walk) -> Violation:
    rule, _, what = text.partition(": ")
    return Violation(rule, what, found.moves[: found.taken])


def _bounds(config: Config) -> dict[str, Any]:
    out = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name == "asks":
            value = tuple(_ask(a) for a in value)
        elif f.default == value or f.name in ("name", "max_states"):
            continue
        out[f.name] = _plain(value)
    return out


def _ask(ask: Ask) -> dict[str, Any]:
    return {
        f.name: getattr(ask, f.name) for f in dataclasses.fields(ask) if getattr(ask, f.name) != f.default
    }


def _config(bounds: Mapping[str, Any]) -> Config:
    known = {f.name for f in dataclasses.fields(Config)}
    if wrong := set(bounds) - known:
        raise ValueError(f"model.bounds: there is no {sorted(wrong)[0]}")
    values = {k: _tuples(v) for k, v in bounds.items() if k != "asks"}
    try:
        return Config(asks=tuple(Ask(**a) for a in bounds["asks"]), **values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"model.bounds: {error}") from None


def _plain(value: Any) -> Any:
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value
