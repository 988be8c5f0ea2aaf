"""The steps of one file at work on real processes: when each fires, and so that nothing acts out of order (actions.py says what each does).

A step that waits for an event acts while the process in which it happened stands still behind its gate. The scenario's own
clock stands while a process starts again, because that takes seconds here and nothing in the simulator. Must never hurt a
process that the fleet did not start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdjax.campaign.actions import Actions
from pdjax.campaign.anchors import Trigger
from pdjax.campaign.client import HttpRouter
from pdjax.campaign.express import senders
from pdjax.campaign.fleet import Fleet, Seat
from pdjax.campaign.reference import Reference
from pdjax.campaign.remote import Remote, RemoteError
from pdjax.sim.trace_types import EMITTERS, On, Step, Trace

TICK_S = 0.002  # of the scenario's clock
LOOK_S = 0.05  # how often it is looked whether a step is still waited for
UNDER_WAY_S = 0.01  # a frame that was sent is on the network by then
GRACE_MS = 4000.0  # a step whose event has not come so long after its own time fires all the same


@dataclass
class _Wait:
    trigger: Trigger
    left: int


@dataclass
class Fired:
    """What became of one step. late_ms: how long the scenario's clock stood before it, in the file's milliseconds."""

    worked: bool
    late_ms: float = 0.0
    by_time: bool = False


@dataclass
class Scenario(Actions):
    """fired: index of the step → what became of it. pending: steps whose time or event has come or will."""

    trace: Trace
    fleet: Fleet
    router: HttpRouter
    reference: Reference
    slower: float
    fired: dict[int, Fired] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    acted: dict[int, int] = field(default_factory=dict)  # rule → how often
    pending: int = 0
    _waiting: list[_Wait] = field(default_factory=list)
    _triggers: list[Trigger] = field(default_factory=list)
    _watches: list[list[Any]] = field(default_factory=list)
    _began_s: float = 0.0
    _stood: list[tuple[float, float]] = field(
        default_factory=list
    )  # from, to: when the scenario's clock stood
    _standing: int = 0
    _standing_since_s: float = 0.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _order: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rules: dict[str, list[tuple[int, Mapping[str, Any]]]] = field(
        default_factory=lambda: {"message": [], "transfer": []}
    )

    # ------------------------------------------------------------ the scenario's clock

    @property
    def stood_s(self) -> float:
        return self.stood_between(self._began_s, time.monotonic())

    def stood_between(self, from_s: float, to_s: float) -> float:
        """Seconds between these times in which the scenario's clock stood."""
        spans = self._stood + ([(self._standing_since_s, to_s)] if self._standing else [])
        return sum(max(min(end, to_s) - max(start, from_s), 0.0) for start, end in spans)

    def now_ms(self) -> float:
        """The file's time: milliseconds since the first step, without those in which a process started again."""
        return (time.monotonic() - self._began_s - self.stood_s) * 1000 / self.slower

    def _stand(self) -> None:
        if not self._standing:
            self._standing_since_s = time.monotonic()
        self._standing += 1

    def _move_on(self) -> None:
        self._standing -= 1
        if not self._standing:
            self._stood.append((self._standing_since_s, time.monotonic()))

    async def _until(self, at_ms: float) -> None:
        while (rest_ms := at_ms - self.now_ms()) > 0:
            await asyncio.sleep(TICK_S if self._standing else rest_ms * self.slower / 1000)

    def _soon(self, work: Any) -> None:
        """Like _spawn, for what the run has to wait for."""
        self.pending += 1

        async def counted() -> None:
            try:
                await work
            finally:
                self.pending -= 1

        self._spawn(counted())

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.errors.append(f"the harness failed: {task.exception()!r}")

    # ------------------------------------------------------------ triggers

    async def begin(self, triggers: list[Trigger]) -> None:
        """Rules and watches into every process, then the steps of time 0, in the order of the file."""
        self._triggers = triggers
        events = {(t.on.event, t.on.room, t.on.message, t.on.node) for t in triggers if t.on is not None}
        self._watches = [list(event) for event in sorted(events, key=str)]
        at_once = [t for t in triggers if t.on is None and not t.at_ms]
        for trigger in at_once:
            if trigger.step.action in self._rules:
                self._rules[trigger.step.action].append((trigger.step.index, trigger.step.value))
        await asyncio.gather(*(self.prepare(self.fleet.seats[name]) for name in self.fleet.instances))
        self._waiting = [_Wait(t, t.nth) for t in triggers if t.on is not None]
        self._began_s = time.monotonic()
        for trigger in at_once:
            await self._perform(trigger, 0.0)
        for trigger in triggers:
            if trigger.on is None and trigger.at_ms:
                self._soon(self._at(trigger, trigger.at_ms))
            elif trigger.by_ms is not None:
                self._soon(self._at_the_latest(trigger, trigger.by_ms + GRACE_MS))

    async def _at(self, trigger: Trigger, at_ms: float) -> None:
        stood_s = self.stood_s
        await self._until(at_ms)
        await self._perform(trigger, (self.stood_s - stood_s) * 1000 / self.slower)

    async def _at_the_latest(self, trigger: Trigger, at_ms: float) -> None:
        while self.now_ms() < at_ms:
            if not any(wait.trigger is trigger for wait in self._waiting):
                return
            await asyncio.sleep(LOOK_S)
        for wait in [wait for wait in self._waiting if wait.trigger is trigger]:
            self._waiting.remove(wait)
            await self._perform(trigger, 0.0)
            self.fired[trigger.step.index].by_time = True

    def told(self, event: str, room: int | None, node: str, message: str = "") -> list[Trigger]:
        """An event has come: the steps that act now. Those with a delay are on their way."""
        due = []
        for wait in list(self._waiting):
            if not _matches(wait.trigger.on, event, room, node, message):
                continue
            wait.left -= 1
            if wait.left == 0:
                self._waiting.remove(wait)
                if wait.trigger.after_ms:
                    self._soon(self._at(wait.trigger, self.now_ms() + wait.trigger.after_ms))
                else:
                    due.append(wait.trigger)
        return due

    def heard(self, remote: Remote, said: Mapping[str, Any]) -> None:
        """What a fault socket says by itself."""
        if "acted" in said:
            self.acted[said["acted"]] = self.acted.get(said["acted"], 0) + 1
        elif "hit" in said:
            line = said["line"]
            room = int(line["room"]) if "room" in line else None
            due = self.told(line["event"], room, line["node"], line.get("message", ""))
            if due:
                self._soon(self._act_and_go(remote, said["hit"], due))
            else:
                remote.tell("go", hit=said["hit"])

    async def _act_and_go(self, remote: Remote, hit: int, due: list[Trigger]) -> None:
        try:
            if any(_hurts(trigger.step, remote.name) for trigger in due):
                # What its turn has sent is under way already, and arrives whatever becomes of it.
                await remote.do("flush")
                await asyncio.sleep(UNDER_WAY_S)
            for trigger in due:
                await self._perform(trigger, 0.0)
        finally:
            remote.tell("go", hit=hit)

    def noted(self, event: str, room: int | None, node: str) -> None:
        """An event that the harness itself has made or seen."""
        for trigger in self.told(event, room, node):
            self._soon(self._at(trigger, 0.0))

    async def _perform(self, trigger: Trigger, late_ms: float) -> None:
        """One step after the other, in the order in which they came; a restart takes its time outside of the order."""
        step = trigger.step
        stood_s = self.stood_s
        act = getattr(self, f"_{step.action}")
        try:
            async with self._order:
                worked = True if step.action == "restart" else await act(step.index, step.value)
            if step.action == "restart":
                worked = await act(step.index, step.value)
        except (RemoteError, httpx.HTTPError) as error:
            self.errors.append(f"step {step.index} ({step.action}): {type(error).__name__} {error}")
            worked = False
        if step.at is not None:
            late_ms = self.stood_s * 1000 / self.slower  # its time counts from the first step
        elif step.action == "restart":
            late_ms += (self.stood_s - stood_s) * 1000 / self.slower
        self.fired[step.index] = Fired(worked is not False, late_ms)

    async def prepare(self, seat: Seat) -> None:
        """Tell a life of a process what is waited for and which rules hold; a rule that is used up is none."""
        remote = seat.remote
        assert remote is not None
        await remote.do("reset")
        watches = [
            [event, room, message]
            for event, room, message, node in self._watches
            if node in ("", seat.name) and seat.name[0] in EMITTERS[event]
        ]
        await remote.do("watch", events=watches)
        timing = self.trace.timing
        await remote.do(
            "pace",
            prefill_per_token_s=timing.prefill_per_token * self.slower / 1000,
            decode_step_s=timing.decode_step * self.slower / 1000,
        )
        messages = [r for r in self._rules["message"] if seat.name in senders(self.trace, r[1]["match"])]
        transfers = [r for r in self._rules["transfer"] if r[1]["match"].get("from", seat.name) == seat.name]
        await self._send_rules(remote, messages, transfers)

    async def _send_rules(self, remote: Remote, messages: list[Any], transfers: list[Any]) -> None:
        def fresh(rules: list[Any]) -> list[Any]:
            return [
                r
                for r in rules
                if r[1].get("times", 1) is None or self.acted.get(r[0], 0) < r[1].get("times", 1)
            ]

        messages, transfers = fresh(messages), fresh(transfers)
        if messages or transfers:
            await remote.do("rules", messages=messages, transfers=transfers, ms_s=self.slower / 1000)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def unfired(self) -> list[int]:
        return [step.index for step in self.trace.steps if step.index not in self.fired]


def _hurts(step: Step, name: str) -> bool:
    """This step kills or stops that very process."""
    return (step.action == "crash" and step.value == name) or (
        step.action == "stop" and step.value["node"] == name
    )


def _matches(on: On | None, event: str, room: int | None, node: str, message: str) -> bool:
    return (
        on is not None
        and on.event == event
        and (on.room is None or on.room == room)
        and (not on.node or on.node == node)
        and (not on.message or on.message == message)
    )
