"""Making a failing trace small: fewer steps, then plainer values, as long as it still fails in the same way.

A fault names its target and is skipped when there is none, so deleting a step never changes what another one means.
Must never accept a trace that fails in another way: what is kept is the property, or the differing outcome.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Trace = dict[str, Any]


@dataclass
class Shrunk:
    trace: Trace
    runs: int
    signature: tuple[str, ...]


def signature_of(trace: Trace) -> tuple[str, ...]:
    """How a trace fails: properties that it breaks beyond those it names, then outcomes that differ. () when it passes."""
    from pdjax.sim.fuzz import RAISED
    from pdjax.sim.replay import run_trace
    from pdjax.sim.schema import TraceError

    try:
        result = run_trace(trace)
    except TraceError:
        return ()
    except Exception:
        return (RAISED,)
    return tuple(failures(trace, result))


def failures(trace: Trace, result: Any) -> list[str]:
    known = trace.get("expect", {}).get("violations", [])
    broken = [name for name in result.broken if name not in known]
    missing = [f"not {name}" for name in known if name not in result.broken]
    return [*broken, *missing, *(text.split(",")[0].split(" found")[0] for text in result.mismatches)]


def shrink(
    trace: Trace,
    *,
    signature: tuple[str, ...] | None = None,
    limit_s: float = 5.0,
    run: Callable[[Trace], tuple[str, ...]] = signature_of,
) -> Shrunk:
    """The smallest trace found in limit_s that still shows the first entry of the signature. ValueError: it passes."""
    wanted = signature if signature is not None else run(trace)
    if not wanted:
        raise ValueError("nothing to shrink: the trace passes")
    runs, until = 0, time.perf_counter() + limit_s

    def fails(candidate: Trace) -> bool:
        nonlocal runs
        runs += 1
        return wanted[0] in run(candidate)

    def over() -> bool:
        return time.perf_counter() > until

    best = {k: v for k, v in trace.items() if k not in ("choices", "digest")}
    if not fails(best):  # it needs its recorded choices
        best = {k: v for k, v in trace.items() if k != "digest"}
    best = _fewer_steps(best, fails, over)
    changed = True
    while changed and not over():
        changed = False
        for candidate in _plainer(best):
            if over():
                break
            if candidate != best and fails(candidate):
                best, changed = candidate, True
                break
    best = _fewer_steps(best, fails, over)
    return Shrunk(_tidy(best), runs, wanted)


def _with_steps(trace: Trace, steps: list[Any]) -> Trace:
    rids = {s["request"]["rid"] for s in steps if "request" in s}
    steps = [s for s in steps if _rid(s) is None or _rid(s) in rids]
    rooms = {str(s["request"]["room"]) for s in steps if "request" in s}
    steps = [s for s in steps if not _rooms(s) - rooms]
    out = {**trace, "steps": steps}
    if "expect" in trace:
        outcomes = {k: v for k, v in trace["expect"].get("outcomes", {}).items() if k in rids}
        out["expect"] = {**trace["expect"], "outcomes": outcomes}
    return out


def _rid(step: Trace) -> str | None:
    for kind in ("abort", "disconnect"):
        if kind in step:
            return str(step[kind]["rid"])
    return None


def _rooms(step: Trace) -> set[str]:
    """Rooms that the step waits for, or that its rule or error matches: they must be some request's."""
    named = [step.get("on", {}), step.get("error", {})]
    named += [step[k].get("match", {}) for k in ("message", "transfer") if k in step]
    return {str(x["room"]) for x in named if "room" in x}


def _fewer_steps(trace: Trace, fails: Callable[[Trace], bool], over: Callable[[], bool]) -> Trace:
    """Delta debugging: drop halves, quarters, … single steps."""
    size = max(len(trace["steps"]) // 2, 1)
    while not over():
        i, dropped = 0, False
        while i < len(trace["steps"]) and not over():
            steps = trace["steps"]
            candidate = _with_steps(trace, steps[:i] + steps[i + size :])
            if len(candidate["steps"]) < len(steps) and candidate["steps"] and fails(candidate):
                trace, dropped = candidate, True
            else:
                i += size
        if size == 1 and not dropped:
            break
        size = max(size // 2, 1)
    return trace


def _plainer(trace: Trace) -> Iterator[Trace]:
    """Candidates that are one value simpler."""
    world = trace.get("world", {})
    for key in ("timing", "clock_offset", "router", "pools", "pages", "page_size"):
        if key in world:
            yield {**trace, "world": {k: v for k, v in world.items() if k != key}}
    for side in ("prefill", "decode"):
        names = world.get(side, [])
        for name in names if len(names) > 1 else []:
            if f'"{name}"' not in _text(trace["steps"]):
                fewer = {**world, side: [n for n in names if n != name]}
                for key in ("pages", "clock_offset"):
                    if key in fewer:
                        fewer[key] = {k: v for k, v in fewer[key].items() if k != name}
                yield {**trace, "world": fewer}
    for i, step in enumerate(trace["steps"]):
        for simple in _plainer_step(step):
            steps = list(trace["steps"])
            steps[i] = simple
            yield {**trace, "steps": steps}


def _plainer_step(step: Trace) -> Iterator[Trace]:
    if "request" in step:
        request = step["request"]
        for key in ("legs", "stream", "n", "eos", "prefix"):
            if key in request:
                yield {**step, "request": {k: v for k, v in request.items() if k != key}}
        for key, small in (("prompt", (1, 5, 9)), ("output", (1, 2, 3))):
            for value in small:
                if value < request[key]:
                    yield {**step, "request": {**request, key: value}}
        for key, first in (("prefill", "p0"), ("decode", "d0")):
            if request.get(key, first) != first:
                yield {**step, "request": {**request, key: first}}
    for key in ("nth", "after"):
        if key in step and "on" in step:
            yield {k: v for k, v in step.items() if k != key}
    for kind in ("message", "transfer"):
        if kind in step:
            for key in ("nth", "times"):
                if step[kind].get(key, 1) != 1:
                    yield {**step, kind: {k: v for k, v in step[kind].items() if k != key}}
    if "at" in step:
        for value in (
            0,
            round(step["at"], -3),
            round(step["at"], -2),
            round(step["at"], -1),
            round(step["at"]),
        ):
            if value < step["at"]:
                yield {**step, "at": value}


def _text(value: Any) -> str:
    import json

    return json.dumps(value)


def _tidy(trace: Trace) -> Trace:
    """Names of the form that the file format wants, steps in the order of their times where they have one."""
    out = copy.deepcopy(trace)
    steps = out["steps"]
    if all("at" in s for s in steps):
        out["steps"] = sorted(steps, key=lambda s: s["at"])
    return out
