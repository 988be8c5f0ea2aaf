"""P and D with the real schedulers and managers, joined in memory, with any number of requests that wait.

Time is virtual and pulls never end: P has offered the first request's KV, which fills its budget, and every other request
waits for budget on P and for its ``ready`` on D. Each D room renews its hello in its own moment, so that ``beat`` is the
same work however many wait. Must never open a socket or import JAX.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdjax.core.effects import BudgetFreed
from pdjax.core.identity import make_epoch
from pdjax.core.pools import Fingerprint, KVArgs, Part, request_digest
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Leg, Packed
from pdjax.engine.manager import KVManager, Ports
from pdjax.engine.ports import Entry, FrameIn, LookupDone, TransportEvent
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Output, Request, SamplingParams
from pdjax.sched.scheduler import Scheduler, SchedulerConfig
from pdjax.sim.ports import VirtualClock
from pdjax.sim.runner import SimRunner

LONG_S = 1e7  # no timer but the hello's is due while anything is measured
PROMPT = list(range(16))  # one page; the requests share it, so that memory is without prompts
P_ADDRESS, D_ADDRESS = "p", "d"


def settings() -> PDSettings:
    return PDSettings(
        bootstrap_timeout_s=LONG_S,
        transfer_timeout_s=LONG_S,
        request_timeout_s=LONG_S,
        tombstone_s=LONG_S,
        max_rooms=1 << 20,
    )


@dataclass
class Channel:
    """Frames into the other side's list."""

    name: str
    address: str | None
    inbox: deque[FrameIn] = field(default_factory=deque)
    other: Channel | None = None

    def send(self, address: str, frame: bytes) -> bool:
        assert self.other is not None
        self.other.inbox.append(FrameIn(self.name, frame))
        return True

    def receive(self) -> list[FrameIn]:
        frames = list(self.inbox)
        self.inbox.clear()
        return frames

    def wait(self, timeout_s: float) -> None: ...

    def wake(self) -> None: ...

    def forget(self, address: str) -> None: ...

    def close(self) -> None: ...


class Transport:
    """Takes offers, and pulls that never end."""

    tick_s = LONG_S

    def __init__(self) -> None:
        self.ids = itertools.count(1)

    def start(self, sink: Callable[[TransportEvent], None]) -> None: ...

    def offer(self, peer: str, uuid: int, packed: Packed) -> None: ...

    def address_for(self, peer: str) -> str:
        return P_ADDRESS

    def withdraw(self, peer: str, uuid: int, life_s: float) -> None: ...

    def pull(self, peer: str, address: str, uuid: int, parts: Sequence[Part]) -> int:
        return next(self.ids)

    def abandon(self, pull_id: int) -> None: ...

    def drop_peer(self, peer: str) -> None: ...

    def tick(self) -> None: ...

    def close(self, wait_s: float) -> None: ...


class Registry:
    """Answers each look-up at once with the one P."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def start(self, sink: Callable[[LookupDone], None]) -> None:
        self.sink = sink

    def announce(self, registration: Mapping[str, Any]) -> None: ...

    def lookup(self, tag: int, host: str, port: int | None) -> None:
        self.sink(LookupDone(tag, (self.entry,), {}, None))

    def close(self) -> None: ...


@dataclass
class Side:
    manager: KVManager
    scheduler: Scheduler
    channel: Channel


class Crowd:
    """One P, one D, and the requests that wait at both."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1.0)
        self.settings = settings()
        epochs = {"prefill": make_epoch(1000.0, 1 << 20), "decode": make_epoch(1001.0, 2 << 20)}
        entry = Entry("p0", epochs["prefill"], P_ADDRESS, "http://p:1")
        self.p, self.d = (self._side(role, epoch, entry) for role, epoch in epochs.items())
        self.p.channel.other, self.d.channel.other = self.d.channel, self.p.channel
        self.rooms = itertools.count(1)
        self.answered = 0

    def _side(self, role: str, epoch: int, entry: Entry) -> Side:
        runner = SimRunner(num_pages=64, max_batch=4)
        prints = Fingerprint(1, "m", "w", "uint64", runner.page_size, 2, 1, 1, "flat", "single", 0, 1, "none")
        name = "p0" if role == "prefill" else "d0"
        args = KVArgs(list(runner.pools), runner.page_size, prints, name)
        channel = Channel(D_ADDRESS, None) if role == "decode" else Channel(P_ADDRESS, P_ADDRESS)
        manager = KVManager(
            args,
            "registry:1",
            role=role,
            settings=self.settings,
            ports=Ports(Transport(), channel, Registry(entry), self.clock),
            epoch=epoch,
            budget_bytes=1,  # one hand-off at a time: a room larger than all of it goes alone
        )
        config = SchedulerConfig(context_length=64, max_queue=1 << 20)
        return Side(manager, make_scheduler(role, config, runner, self.clock, manager), channel)

    def sink(self, output: Output) -> None:
        self.answered += 1

    def enter(self, side: Side, room: int) -> Request:
        """One leg, as the HTTP layer claims and submits it."""
        request = Request(f"r{room}", PROMPT, SamplingParams(), self.sink, room=room, bootstrap_host="p")
        digest = request_digest(request.prompt_ids, request.sampling.first_token_key())
        side.manager.claim(Leg(room, request.rid, digest, len(PROMPT), "p", None))
        side.scheduler.submit(request)
        return request

    def settle(self) -> None:
        """Turns and steps until nothing more happens at this time."""
        while True:
            worked = False
            for side in (self.d, self.p):
                side.manager.turn()
                worked |= side.scheduler.step()
            if not (worked or self.p.channel.inbox or self.d.channel.inbox):
                return

    def fill(self, n: int) -> None:
        """n requests at both sides, their hellos spread over one renewal."""
        gap_s = self.settings.renew_s / n
        for _ in range(n):
            room = next(self.rooms)
            self.enter(self.p, room)
            self.enter(self.d, room)
            self.clock.advance(gap_s)
            self.settle()

    @property
    def waiting(self) -> int:
        return min(side.scheduler.stats()["queued"] for side in (self.p, self.d))

    def beat(self, measure: Callable[[str, Callable[[], object]], None]) -> None:
        """One D room renews its hello and P answers: three turns, each through ``measure(name, turn)``."""
        while True:
            self.clock.advance_to(self.d.manager.next_deadline())
            if self._is_hello_next():
                break
            self.settle()
        measure("D's driver: a hello out", self.d.manager.turn)
        assert len(self.p.channel.inbox) == 1, "the beat is not one hello"
        measure("P's driver: the hello in, its answer out", self.p.manager.turn)
        assert len(self.d.channel.inbox) == 1, "P has not answered"
        measure("D's driver: the answer in", self.d.manager.turn)

    def _is_hello_next(self) -> bool:
        """Whether the timer that is due is a room's hello, and not the remains of one that was moved."""
        _, _, (kind, room) = self.d.manager._timers[0]
        record = self.d.manager.rooms.get(room) if kind == "hello" else None
        return record is not None and record.timers.get("hello", LONG_S) <= self.clock()

    def come_and_go(self, measure: Callable[[str, Callable[[], object]], None]) -> None:
        """A request comes to each side, waits behind all others, and is aborted: two steps of each scheduler."""
        for name, side in (("P", self.p), ("D", self.d)):
            request = self.enter(side, next(self.rooms))
            measure(f"{name}'s scheduler: a request comes", side.scheduler.step)
            side.scheduler.abort_request(request)
            measure(f"{name}'s scheduler: it is aborted", side.scheduler.step)
            measure(f"{name}'s scheduler: nothing to do", side.scheduler.step)
        self.settle()

    def release(self, measure: Callable[[str, Callable[[], object]], None]) -> None:
        """Budget comes back on P, too little of it: the head of the queue asks, nobody else."""
        self.p.manager._keep([BudgetFreed(0, 0)])
        measure("P's scheduler: budget came back", self.p.scheduler.step)
