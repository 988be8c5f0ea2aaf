"""A counterexample as a trace file (``pdjax.trace/1``), as far as a scenario can say it.

Legs, losses, copies, aborts, failing and hanging pulls, deaths and new lives become steps, each fired by the event that
came before it. A scenario cannot force a timer: it gets short timers, and those that fired stand in its ``why``. Must
never claim an outcome: the file expects nothing but that no property breaks.
"""

from __future__ import annotations

from typing import Any

from pdjax.sim.explore.config import Config
from pdjax.sim.explore.parts import Action
from pdjax.sim.explore.search import Violation
from pdjax.sim.explore.story import sentence

SHORT = {
    "disaggregation-lease": 2.0, "disaggregation-peer-timeout": 0.6, "disaggregation-hello-interval": 0.1,
    "disaggregation-answer-bound": 0.1, "disaggregation-bootstrap-timeout": 3.0, "disaggregation-transfer-timeout": 3.0,
    "disaggregation-limbo-timeout": 5.0, "disaggregation-request-timeout": 20.0, "disaggregation-graveyard-timeout": 8.0,
}  # fmt: skip

_EVENTS = {
    "admit": "admitted", "kv_ready": "prefilled", "issue": "pull_started", "land": "landed", "scatter": "scattered",
    "crash": "crashed", "restart": "restarted",
}  # fmt: skip


def trace(violation: Violation, config: Config, name: str = "found-by-sim-check") -> dict[str, Any]:
    """The file's content. Steps that a scenario cannot say are left to ``why``."""
    rids = _rids(config)
    steps = [
        _request(ask, rid, violation.steps)
        for ask, rid in zip(config.asks, dict.fromkeys(rids.values()), strict=True)
    ]
    seen: dict[tuple[str, int], int] = {}
    after: dict[str, Any] = {"at": 0}
    for action in violation.steps:
        step = _step(action, config, rids, seen)
        if step is not None:
            rule = "message" in step or "transfer" in step
            trigger = {"at": 0} if rule else after
            steps.insert(0, trigger | step) if rule else steps.append(trigger | step)
        after = _trigger(action) or after
    timers = [
        sentence(a) for a in violation.steps if a[0] in ("timer", "silence", "limbo", "early", "graveyard")
    ]
    why = f"{violation.rule}: {violation.text}" + (f"; in the model: {'; '.join(timers)}" if timers else "")
    return {
        "format": "pdjax.trace/1",
        "name": name,
        "why": why,
        "world": {
            "prefill": list(config.prefills),
            "decode": list(config.decodes),
            "page_size": 4,
            "flags": SHORT,
        },
        "steps": steps,
        "expect": {"outcomes": dict.fromkeys(rids.values(), "any")},
    }


def _rids(config: Config) -> dict[tuple[str, int], str]:
    """(node, room) → the request whose leg that is; requests that share a room have rids of their own."""
    found: dict[tuple[str, int], str] = {}
    for n, ask in enumerate(config.asks):
        rid = f"r{ask.room}" + (f"-{n}" if any(a.room == ask.room for a in config.asks[:n]) else "")
        for node, there in ((ask.d, ask.d_leg), (ask.p, ask.p_leg)):
            if there or (node, ask.room) not in found:
                found[node, ask.room] = rid
    return found


def _request(ask: Any, rid: str, actions: list[Action]) -> dict[str, Any]:
    came = {(a[1], a[2]) for a in actions if a[0] == "leg"}
    value: dict[str, Any] = {
        "rid": rid, "room": ask.room, "prompt": 9, "output": 3, "prefill": ask.p, "decode": ask.d,
    }  # fmt: skip
    legs = {
        side: {"drop": True}
        for side, node in (("prefill", ask.p), ("decode", ask.d))
        if (node, ask.room) not in came or not (ask.p_leg if side == "prefill" else ask.d_leg)
    }
    if legs:
        value["legs"] = legs
    return {"at": 0, "request": value}


def _step(
    action: Action, config: Config, rids: dict[tuple[str, int], str], seen: dict[tuple[str, int], int]
) -> dict[str, Any] | None:
    kind = action[0]
    if kind in ("deliver", "lose", "copy"):
        message = action[3][1]
        key = (message[0], message[1])
        nth = seen.get(key, 0) + 1
        if kind != "copy":
            seen[key] = nth
        if kind == "deliver":
            return None
        rule = {"match": {"type": message[0], "room": message[1]}, "nth": nth}
        return {"message": rule | ({"do": "drop"} if kind == "lose" else {"do": "duplicate", "by": 20})}
    if kind == "abort_local":
        side = "prefill" if action[1] in config.prefills else "decode"
        return {"abort": {"rid": rids[action[1], action[2]], "to": [side]}}
    if kind in ("hang", "part_fails"):
        return {"transfer": {"match": {"room": action[2]}, "do": "hang" if kind == "hang" else "fail"}}
    if kind in ("crash", "restart"):
        return {kind: action[1]}
    return None


def _trigger(action: Action) -> dict[str, Any] | None:
    """The event that the next step may wait for."""
    kind = action[0]
    if kind == "deliver":
        return {
            "on": {
                "event": "delivered",
                "node": action[2],
                "message": action[3][1][0],
                "room": action[3][1][1],
            }
        }
    if kind in ("crash", "restart"):
        return {"on": {"event": _EVENTS[kind], "node": action[1]}}
    if kind in _EVENTS:
        return {"on": {"event": _EVENTS[kind], "room": action[2]}}
    return None
