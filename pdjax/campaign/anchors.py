"""When a step of a file strikes in a run whose work takes other times: at the same place among the events of the protocol.

A step at a time is read as one that waits for the event that precedes it in the simulator's run of the file, so that an abort
in the middle of a prefill still comes in the middle of it. Must never change a step that the file itself ties to an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdjax.sim.runfaults import MILESTONES as RUN_MILESTONES
from pdjax.sim.trace_types import On, Step, Trace, room_text

# Events that a room meets once, in every run in which the same happens to it.
MILESTONES = frozenset([*RUN_MILESTONES, "success", "failed"])

# A step that follows its event so closely acts at it, while the process stands still: nothing that a room meets lies
# between the two, and a request over HTTP takes longer than that.
AT_ONCE_MS = 5.0


@dataclass(frozen=True)
class Trigger:
    """When a step acts: nth event ``on`` and after_ms, or at_ms from the start. by_ms: at the latest, whatever came."""

    step: Step
    on: On | None
    nth: int
    after_ms: float
    at_ms: float
    by_ms: float | None = None


def anchored(trace: Trace, log: Sequence[bytes]) -> list[Trigger]:
    """log: of the simulator's run of this file."""
    lines = [msgspec.json.decode(line) for line in log]
    out = []
    for step in trace.steps:
        if step.on is not None:
            out.append(Trigger(step, step.on, step.nth, step.after, 0.0))
        elif not step.at:
            out.append(Trigger(step, None, 1, 0.0, 0.0))
        else:
            out.append(_anchor(step, step.at, lines))
    return out


def _anchor(step: Step, at_ms: float, lines: Sequence[dict[str, Any]]) -> Trigger:
    """The newest milestone before the step; the time where there is none."""
    newest, seen = None, []
    for line in lines:
        if _is_step(line, step) or line["t"] > at_ms:
            break
        if line["event"] in MILESTONES and "role" not in line and line["node"][0] in "pd" and "room" in line:
            newest = line
            seen.append((line["event"], line["room"], line["node"]))
    if newest is None:
        return Trigger(step, None, 1, 0.0, at_ms)
    key = (newest["event"], newest["room"], newest["node"])
    on = On(newest["event"], int(newest["room"]), newest["node"])
    after_ms = at_ms - newest["t"]
    return Trigger(step, on, seen.count(key), after_ms if after_ms > AT_ONCE_MS else 0.0, 0.0, by_ms=at_ms)


def _is_step(line: dict[str, Any], step: Step) -> bool:
    if step.action == "request":
        return bool(line["event"] == "request" and line.get("rid") == step.value["rid"])
    return bool(line["event"] == "step" and line.get("step") == step.index)


def tied(raw: Mapping[str, Any], triggers: Sequence[Trigger]) -> dict[str, Any]:
    """The file with the events that its steps are tied to in place of their times, for a run at other speeds."""
    steps = []
    for trigger, given in zip(triggers, raw["steps"], strict=True):
        step = {key: value for key, value in given.items() if key not in ("at", "on", "nth", "after")}
        if trigger.on is None:
            steps.append({"at": trigger.at_ms, **step})
            continue
        on: dict[str, Any] = {"event": trigger.on.event}
        if trigger.on.room is not None:
            on["room"] = room_text(trigger.on.room)
        for key, value in (("node", trigger.on.node), ("message", trigger.on.message)):
            if value:
                on[key] = value
        steps.append({"on": on, "nth": trigger.nth, "after": trigger.after_ms, **step})
    return {**raw, "steps": steps}
