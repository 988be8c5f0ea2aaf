"""One scenario file on real processes, compared with the simulator's run of the same file.

Must never call a difference a success: what was not as in the simulator is in ``differs`` or ``findings``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pdjax.campaign.anchors import anchored, tied
from pdjax.campaign.client import HttpRouter, Record
from pdjax.campaign.fleet import REGISTRY, Fleet, Seat
from pdjax.campaign.logs import Logs
from pdjax.campaign.recorded import broken_properties
from pdjax.campaign.reference import Reference
from pdjax.campaign.remote import RemoteError
from pdjax.campaign.scenario import Scenario
from pdjax.sim.node import Timing
from pdjax.sim.replay import Result, run_trace, t_free_s
from pdjax.sim.trace_file import parse
from pdjax.sim.trace_types import Trace

SLOWER = 2.0  # real work takes some times what a file's does; its timers are stretched by as much
SETTLE_S = 120.0  # the most that a fleet may take to be strictly at rest before a file
ROOM_SHIFT = 1_000_000
ROOM_LIMIT = 1 << 40  # rooms beyond are there for their bits: no file has them by chance
EXTRA_S = 1.0  # what a loaded machine adds to a bound


@dataclass(frozen=True)
class Seen:
    """How a request ended: for its client, without what only a clock knows."""

    outcome: str
    reason: str
    status: int

    def __str__(self) -> str:
        return f"{self.outcome} ({self.reason or self.status})"


@dataclass
class Report:
    """One file. differs: not as in the simulator. findings: breaches that the logs or the end state show."""

    name: str
    differs: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcomes: dict[str, Seen] = field(default_factory=dict)
    seconds: float = 0.0
    free_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not (self.differs or self.findings)


async def settle(fleet: Fleet, reference: Reference, trace: Trace) -> None:
    """Before a file: every process lives and is strictly at rest, no prefix is cached, the right tokens are known."""
    for name in [REGISTRY, *fleet.instances]:
        seat = fleet.seats[name]
        if seat.leaving and seat.child is not None:
            await asyncio.to_thread(seat.child.join, SETTLE_S)
        if not seat.alive:
            await fleet.start(name)
    await asyncio.gather(*(fleet.remote(name).do("reset") for name in fleet.instances))
    _, left = await fleet.until_free(SETTLE_S)
    if left:
        raise RuntimeError(f"the processes were not at rest within {SETTLE_S:g} s: {left}")
    await asyncio.gather(*(fleet.ready(name) for name in fleet.instances))
    for name in fleet.instances:
        await fleet.http.post(f"{fleet.seats[name].url}/flush_cache", params={"timeout": 5})
    for step in trace.steps:
        if step.action == "request":
            await reference.of(step.value, trace)


async def replay(
    trace: Trace, fleet: Fleet, logs: Logs, reference: Reference, slower: float = SLOWER
) -> Report:
    """Run a file that ``express.cannot`` has nothing against, on a fleet of its plan."""
    report = Report(trace.name)
    began_s = time.monotonic()
    await settle(fleet, reference, trace)
    logs.more()
    before = len(logs.lines)
    simulated = run_trace(trace)
    scenario = await _run(trace, fleet, reference, slower, simulated, report)
    router = scenario.router
    bound = trace.quiescent_within
    settings = [spec.settings for spec in trace.nodes]
    bound_s = (bound / 1000 if bound is not None else t_free_s(settings)) * slower + EXTRA_S
    for name in fleet.instances:
        await _reset(fleet.seats[name])
    report.free_s, left = await fleet.until_free(bound_s, strict=False)
    if left:
        report.findings.append(f"V2: not free {bound_s:g} s after the last outcome: {left}")
    logs.more()
    report.findings += logs.breaches(before)
    report.findings += broken_properties(logs.decoded, before)
    report.findings += fleet.wrong_ends()
    _compare(trace, scenario, simulated, report)
    report.differs += overdue(trace, router.records, slower, scenario.stood_between)
    report.outcomes = {rid: Seen(r.outcome, r.reason, r.status) for rid, r in router.records.items()}
    report.seconds = time.monotonic() - began_s
    return report


async def _run(
    trace: Trace, fleet: Fleet, reference: Reference, slower: float, simulated: Result, report: Report
) -> Scenario:
    scenario: Scenario

    def told(event: str, room: int) -> None:
        scenario.noted(event, room, "x0")

    router = HttpRouter(fleet, trace.router, slower, told)
    scenario = Scenario(trace, fleet, router, reference, slower)
    fleet.heard = scenario.heard
    limit_s = time.monotonic() + simulated.end_ms * slower / 1000 + 60.0
    try:
        await scenario.begin(anchored(trace, simulated.log_lines))
        while router.n_open or scenario.pending:
            if time.monotonic() - scenario.stood_s > limit_s:
                open_ = [rid for rid, r in router.records.items() if r.ended_s is None]
                report.findings.append(f"V1: no end: {open_ or 'a step'} is open")
                break
            await asyncio.sleep(0.01)
    finally:
        fleet.heard = lambda remote, said: None
        await scenario.close()
        await router.close()
    report.findings += scenario.errors + router.errors
    skipped = set(simulated.skipped) | set(simulated.unfired)
    for step in trace.steps:
        fired = scenario.fired.get(step.index)
        if fired is None and step.index not in skipped:
            report.differs.append(f"step {step.index} ({step.action}) never came")
        elif fired is not None and fired.by_time:
            report.notes.append(f"step {step.index} ({step.action}) came by its time, not by its event")
        elif fired is not None and not fired.worked and step.index not in skipped:
            report.notes.append(f"step {step.index} ({step.action}) found no target")
    return scenario


async def _reset(seat: Seat) -> None:
    """No fault is in force any more. A process that is on its way out needs none of it."""
    if seat.remote is not None and seat.alive:
        try:
            await seat.remote.do("reset")
        except RemoteError:
            if seat.alive and not await asyncio.to_thread(_ended_soon, seat):
                raise


def _ended_soon(seat: Seat) -> bool:
    return seat.child is not None and seat.child.join(EXTRA_S)


# ---------------------------------------------------------------- the comparison


def _compare(trace: Trace, scenario: Scenario, simulated: Result, report: Report) -> None:
    """With the simulator's run of the file; where that is another one, with its runs at other speeds.

    How fast a process works is no part of the protocol, and which of two things comes first may depend on it.
    """
    records, raw = scenario.router.records, _unpinned(trace.raw)
    if any(fired.late_ms for fired in scenario.fired.values()):
        raw = as_it_was(raw, scenario)
        simulated = run_trace(parse(raw))
        report.notes.append("compared with the simulator's run in which a restart takes as long as here")
    found = differences(simulated, records)
    if found:
        speed = speed_of(tied(raw, anchored(parse(raw), simulated.log_lines)), records)
        if speed is not None:
            report.notes.append(f"as in the simulator when {speed}")
            return
    report.differs += found


def speed_of(raw: Mapping[str, Any], records: Mapping[str, Record]) -> str | None:
    """The first of SPEEDS at which the simulator's run of the file ends as these did."""
    for speed, (timing, reset_s) in SPEEDS.items():
        if not differences(run_trace(parse(_at_speed(raw, timing)), reset_s=reset_s), records):
            return speed
    return None


_ALL_SLOWER = {"link": 10, "prefill_per_token": 10, "decode_step": 10, "pull_per_page": 10}
# D looks at its pulls every 5 ms when it is idle (facts/peer-servers), and hears of a closed socket at once.
LATE_RESET_S = 0.01
# Real work against what the simulator's defaults say: a link is HTTP, a prefill of few tokens is one launch. With each
# the time until the failure of a pull is seen, where that matters: a peer's death reaches D on two ways.
SPEEDS: dict[str, tuple[Mapping[str, float], float | None]] = {
    "links are slower": ({"link": 20}, None),
    "prefill is faster": ({"prefill_per_token": 0.1}, None),
    "prefill is slower": ({"prefill_per_token": 10}, None),
    "decode is slower": ({"decode_step": 10}, None),
    "links and decode are slower": ({"link": 20, "decode_step": 10}, None),
    "everything is slower": (_ALL_SLOWER, None),
    "a death is heard before the pull fails": ({}, LATE_RESET_S),
    "everything is slower, and a death is heard before the pull fails": (_ALL_SLOWER, 10 * LATE_RESET_S),
}


def _at_speed(raw: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, Any]:
    world = dict(raw.get("world", {}))
    base = {**asdict(Timing()), **world.get("timing", {})}
    world["timing"] = {**base, **{key: base[key] * factor for key, factor in factors.items()}}
    return {**raw, "world": world}


def _unpinned(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario without the order of the run that it was found in."""
    return {key: value for key, value in raw.items() if key not in ("choices", "digest")}


def as_it_was(raw: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """The file with its restarts, and what waited for them, as late as they were."""
    steps = [dict(step) for step in raw["steps"]]
    for index, fired in scenario.fired.items():
        if fired.late_ms:
            key = "at" if "at" in steps[index] else "after"
            steps[index][key] = steps[index].get(key, 0) + round(fired.late_ms, 3)
    return {**raw, "steps": steps}


def differences(simulated: Result, records: Mapping[str, Record]) -> list[str]:
    """Per request: outcome, reason and status. A wrong token is a difference, whatever the simulator says."""
    found = []
    for rid, outcome in simulated.outcomes.items():
        record = records.get(rid)
        want = Seen(outcome.outcome, outcome.reason, outcome.status)
        if record is None:
            found.append(f"{rid}: {want} in the simulator, never posted here")
            continue
        got = Seen(record.outcome, record.reason, record.status)
        if not _alike(want, got):
            found.append(f"{rid}: {want} in the simulator, {got} here")
        if record.wrong:
            found.append(f"{rid}: {record.wrong}")
    return found


def overdue(
    trace: Trace, records: Mapping[str, Record], slower: float, stood_s: Callable[[float, float], float]
) -> list[str]:
    """Requests that took longer than the file allows (``within``, from the request's step).

    stood_s(from, to): seconds between in which the file's clock stood, because a process was starting.
    """
    found = []
    for rid, expected in trace.outcomes.items():
        record = records.get(rid)
        if expected.within is None or record is None or record.ended_s is None:
            continue  # what has not come is told elsewhere
        took_s = record.ended_s - record.began_s - stood_s(record.began_s, record.ended_s)
        bound_s = expected.within * slower / 1000 + EXTRA_S
        if took_s > bound_s:
            found.append(f"{rid}: within {bound_s:g} s expected, it took {took_s:.1f} s")
    return found


def _alike(want: Seen, got: Seen) -> bool:
    if want.outcome == got.outcome == "aborted":
        return True  # an abort that meets its own end is told by either of them
    return want == got


# ---------------------------------------------------------------- rooms


def fresh_rooms(raw: Mapping[str, Any], used: set[int]) -> dict[str, Any]:
    """The file with rooms that its processes have not seen: a room of an older file is a tombstone there.

    Every room is moved by the same amount, and only when one of them was used. Rooms are added to ``used``.
    """
    rooms = sorted(_rooms(raw))
    shift = 0
    while any(room < ROOM_LIMIT and room + shift in used for room in rooms):
        shift += ROOM_SHIFT
    used |= {room + shift if room < ROOM_LIMIT else room for room in rooms}
    if not shift:
        return dict(raw)
    moved: dict[str, Any] = _moved(dict(raw), shift)
    return moved


def _rooms(raw: Mapping[str, Any]) -> set[int]:
    found = set()
    for step in raw["steps"]:
        request = step.get("request")
        if request is not None:
            found |= {int(request["room"]) + i for i in range(request.get("n", 1))}
        if "room" in step.get("inject", {}).get("message", {}):
            found.add(int(step["inject"]["message"]["room"]))
    return found


def _moved(value: Any, shift: int) -> Any:
    """A copy in which each "room" is moved."""
    if isinstance(value, dict):
        return {
            k: (int(v) + shift if int(v) < ROOM_LIMIT else v) if k == "room" else _moved(v, shift)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_moved(one, shift) for one in value]
    return value
