"""What a search found, for people: a counterexample as numbered steps, a report as a few lines.

Must never say more than the steps show.
"""

from __future__ import annotations

from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.explore import props
from pdjax.sim.explore.parts import Action, Move
from pdjax.sim.explore.process import GOT_LIFE_BITS
from pdjax.sim.explore.search import Report, Violation
from pdjax.sim.explore.world import World

_NUMBERS = GOT_LIFE_BITS - 4


def _id(value: int) -> str:
    """An attempt, uuid or epoch: life.count."""
    return f"{value >> GOT_LIFE_BITS}.{value & ((1 << _NUMBERS) - 1)}" if value else "none"


def message(m: tuple[Any, ...]) -> str:
    kind, room, attempt, *rest = m
    said = {
        "hello": lambda: f"acknowledged {_id(rest[0])}",
        "abort": lambda: f"uuid {_id(rest[0])}, {'quiet' if rest[1] else 'not quiet'}",
        "done": lambda: f"uuid {_id(rest[0])}",
        "done_ack": lambda: f"uuid {_id(rest[0])}",
        "ready": lambda: f"uuid {_id(rest[0])}",
        "failed": lambda: f"echo {int(rest[0])}",
    }.get(kind, lambda: "")()
    return f"{kind}(room {room}, attempt {_id(attempt)}{', ' + said if said else ''})"


def sentence(action: Action) -> str:
    """One action in words."""
    kind, *a = action
    if kind in ("deliver", "copy", "lose"):
        how = {"deliver": "arrives", "copy": "arrives, and a copy stays under way", "lose": "is lost"}[kind]
        return f"{a[0]} → {a[1]}: {message(a[2][1])} {how}"
    words = {
        "stamp": "{1} hears a frame of {0}'s present life",
        "leg": "the leg of room {1} comes to {0}",
        "leg_bad": "a malformed leg of room {1} comes to {0}",
        "leg_refused": "the leg of room {1} comes to {0}, which has no place for it",
        "candidates": "the registry answers {0} about room {1} (lives {2})",
        "no_candidate": "the registry has no instance that fits room {1} of {0}",
        "admit": "{0}'s scheduler asks for budget for room {1}",
        "kv_ready": "{0} has prefilled room {1}",
        "start": "{0} takes pages for room {1} and starts its pull",
        "issue": "{0}'s driver issues the pull of room {1}",
        "never_issued": "{0}'s driver finds that room {1} ended before its pull was issued",
        "reach": "the pull of room {1} of {0} meets the registration",
        "fenced": "the pull of room {1} of {0} comes after the withdraw and fails",
        "land": "every part of room {1} is on {0}",
        "broken": "the pull of room {1} of {0} fails: the connection is gone",
        "part_fails": "a part of room {1} fails on {0}",
        "hang": "the pull of room {1} of {0} will never settle by itself",
        "scatter": "{0} scatters room {1} and commits",
        "finish": "{0} has decoded room {1}",
        "abort_local": "room {1} is aborted on {0}",
        "engine_error": "{0}'s engine fails room {1}",
        "timer": "{0}: the {2} timer of room {1} fires",
        "early": "{0} forgets what came early for room {1}",
        "limbo": "{0}: the limbo timer of room {1} fires",
        "graveyard": "{0}: the graveyard timer of room {1} fires",
        "silence": "{0}: the silence timer of {1} fires",
        "refused": "{0} sees that nobody listens at {1}",
        "crash": "{0} dies",
        "restart": "{0} starts a new life",
    }
    return words[kind].format(*a)


def replay(world: World, steps: list[Action]) -> list[Move]:
    """The moves behind the steps. ValueError: these steps are not a run of this world."""
    moves, state = [], world.initial()
    for action in steps:
        move = next((m for m in world.moves(state) if m.action == action), None)
        if move is None:
            raise ValueError(f"not possible here: {sentence(action)}")
        moves.append(move)
        state = move.state
    return moves


def tell(violation: Violation, world: World, rows: list[t.Row] | None = None) -> str:
    """The steps with what the table decided in each, then the property that broke."""
    rows = rows if rows is not None else t.ROWS
    lines = []
    try:
        moves = replay(world, violation.steps)
    except ValueError:  # the table in force is not the one that was searched: words only
        moves = []
    for n, action in enumerate(violation.steps):
        lines.append(f"{n + 1:3}. {sentence(action)}")
        for line in moves[n].lines if moves else ():
            if line.source == line.target and not line.effects:
                continue
            names = f"{t.STATE_NAMES[line.source]} → {t.STATE_NAMES[line.target]}"
            row = f"row {line.row}" if line.row >= 0 else line.kind
            effects = ", ".join(line.effects) or "nothing"
            lines.append(
                f"       {'P' if line.role == t.SENDER else 'D'} {line.event}: {names} ({row}: {effects})"
            )
    lines.append(f"  ⇒ {violation.rule}: {violation.text}")
    meaning = props.PROPERTIES.get(violation.rule)
    if meaning:
        lines.append(f"     {violation.rule} means: {meaning}")
    return "\n".join(lines)


def summary(report: Report) -> str:
    c = report.config
    end = "" if report.complete else ", NOT complete"
    return (
        f"{c.name}: {report.states} states, {report.edges} edges, depth {report.depth}, "
        f"{len(report.coverage)} rows reached, {report.seconds:.1f} s{end}"
    )
