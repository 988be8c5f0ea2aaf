"""A run as a Chrome trace (https://ui.perfetto.dev opens it): a process for each node, a track for each room."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pdjax.sim.replay import Result
from pdjax.sim.view.story import WORLD, sentence
from pdjax.sim.view.svg import _arrows


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

    def tid(line: dict[str, Any]) -> int:
        room = str(line.get("room", ""))
        return tids.setdefault(room, len(tids) + 1) if room else 0

    open_: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        pid, us = pids[line["node"]], line["t"] * 1000
        if "role" in line and line["from"] != line["to"]:
            key = (line["node"], str(line["room"]))
            if key in open_:
                began = open_.pop(key)
                events.append({**began, "dur": us - began["ts"]})
            if line["to"] != "Absent":
                open_[key] = {
                    "ph": "X", "name": line["to"], "cat": line["role"], "pid": pid, "tid": tid(line), "ts": us,
                    "args": {"event": line["event"], "row": line["row"]},
                }  # fmt: skip
        if line["event"] not in ("sent", "delivered"):
            name = line["event"]
            if line["node"] == WORLD and name == "step":
                name = sentence(result.trace.raw["steps"][line["step"]], line["step"])
            args = {k: v for k, v in line.items() if k not in ("t", "node", "n")}
            events.append(
                {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid(line), "ts": us, "args": args}
            )
    end = result.end_ms * 1000
    events += [{**began, "dur": max(end - began["ts"], 1)} for began in open_.values()]
    for i, arrow in enumerate(_arrows(lines)):
        if arrow["arrived"] and arrow["from"] in pids and arrow["to"] in pids:
            track = tids.setdefault(str(arrow["room"]), len(tids) + 1)
            flow = {"cat": "message", "name": arrow["message"], "id": i, "tid": track}
            events.append({**flow, "ph": "s", "pid": pids[arrow["from"]], "ts": arrow["t"] * 1000})
            events.append(
                {**flow, "ph": "f", "bp": "e", "pid": pids[arrow["to"]], "ts": arrow["to_t"] * 1000}
            )
    for room, n in tids.items():
        args = {"name": f"room {room}"}
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": n, "args": args} for pid in pids.values()
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
