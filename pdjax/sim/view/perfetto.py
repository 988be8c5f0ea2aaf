"""A run as a Chrome trace (https://ui.perfetto.dev opens it): a process for each node, a track for each room."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pdjax.sim.replay import Result
from pdjax.sim.view.spans import arrows_of, stays_of
from pdjax.sim.view.story import WORLD, sentence


def _us(ms: float) -> float:
    return round(ms * 1000, 3)


def perfetto(result: Result) -> str:
    """Times in microseconds of virtual time. Slices are the states of rooms, flows are messages."""
    lines = [msgspec.json.decode(line) for line in result.log_lines]
    names = [WORLD, "x0", *(spec.name for spec in result.trace.nodes), "b0"]
    pids = {name: i + 1 for i, name in enumerate(names)}
    tids: dict[str, int] = {}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for name, pid in pids.items()
    ]

    def tid(room: object) -> int:
        return tids.setdefault(str(room), len(tids) + 1) if room != "" else 0

    for line in lines:
        if line["event"] not in ("sent", "delivered"):
            name = line["event"]
            if line["node"] == WORLD and name == "step":
                name = sentence(result.trace.raw["steps"][line["step"]], line["step"])
            args = {k: v for k, v in line.items() if k not in ("t", "node", "n")}
            at = {"pid": pids[line["node"]], "tid": tid(line.get("room", "")), "ts": _us(line["t"])}
            events.append({"ph": "i", "s": "t", "name": name, **at, "args": args})
    for stay in stays_of(lines):
        ended = result.end_ms if stay.to_t is None else stay.to_t
        events.append(
            {
                "ph": "X", "name": stay.state, "cat": stay.role, "pid": pids[stay.node], "tid": tid(stay.room),
                "ts": _us(stay.t), "dur": max(_us(ended - stay.t), 1.0),
                "args": {"event": stay.event, "row": stay.row},
            }
        )  # fmt: skip
    for i, arrow in enumerate(arrows_of(lines, result.trace.timing.link)):
        if arrow.arrived and arrow.source in pids and arrow.target in pids:
            flow = {"cat": "message", "name": arrow.message, "id": i, "tid": tid(arrow.room)}
            events.append({**flow, "ph": "s", "pid": pids[arrow.source], "ts": _us(arrow.t)})
            events.append({**flow, "ph": "f", "bp": "e", "pid": pids[arrow.target], "ts": _us(arrow.to_t)})
    for room, n in {"process": 0, **tids}.items():
        args = {"name": f"room {room}" if n else room}
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": n, "args": args} for pid in pids.values()
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
