"""One simulated process: the real manager and scheduler on simulated ports, and when each of them runs.

Driver and scheduler are separate sources of events. A scheduler step is split at its device calls, and their cost
passes between: meanwhile the driver answers peers, and what it decides the scheduler sees at its next step, as with
threads. Must never read real time or import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdjax.core.pools import Fingerprint, KVArgs, request_digest
from pdjax.core.settings import PDSettings
from pdjax.core.trace import EventLog
from pdjax.engine.base import Leg
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.manager import KVManager, Ports
from pdjax.faults.work import ArmedErrors, PageHold
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Output, Request, SamplingParams
from pdjax.sched.scheduler import SchedulerConfig
from pdjax.sim.loop import GAP_S, Event
from pdjax.sim.membership import SimRegistryClient
from pdjax.sim.net import SimChannel, SimNet
from pdjax.sim.runner import SimModel, SimRunner
from pdjax.sim.transport import SimTransport, Verify

PORT = 7000  # of every P's side channel


@dataclass(frozen=True)
class Timing:
    """What things cost, in milliseconds, as trace files state them."""

    link: float = 0.2
    jitter: float = 0.0
    prefill_per_token: float = 0.1
    decode_step: float = 1.0
    pull_per_page: float = 0.1
    loop: float = 0.05


@dataclass(frozen=True)
class NodeSpec:
    """What a node is started with, in every life. num_pages counts the reserved page 0."""

    name: str
    settings: PDSettings = field(default_factory=PDSettings)
    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(context_length=4096))
    page_size: int = 4
    num_pages: int = 64
    max_batch: int = 8
    budget_bytes: int = 0  # 0: what the settings say
    weights: str = "sim"
    pools: tuple[str, ...] = ("main_kv",)
    verify: Verify = "all"
    model: SimModel = field(default_factory=SimModel)

    @property
    def role(self) -> str:
        return "prefill" if self.name.startswith("p") else "decode"


def sim_fingerprint(page_size: int, weights: str = "sim") -> Fingerprint:
    return Fingerprint(1, "sim", weights, "uint64", page_size, 2, 1, 1, "flat", "single", 0, 1, "sim")


@dataclass
class Client:
    """What the server side of one leg has given. on_end is called with the last output."""

    tokens: list[int] = field(default_factory=list)
    end: Output | None = None
    request: Request | None = None
    on_end: Callable[[], None] = lambda: None
    on_tokens: Callable[[], None] = lambda: None

    def sink(self, out: Output) -> None:
        assert self.end is None, "a second end"
        self.tokens += out.token_ids
        if out.finish or out.failure:
            self.end = out
            self.on_end()
        else:
            self.on_tokens()


class Node:
    """One life of one process."""

    def __init__(
        self, net: SimNet, spec: NodeSpec, *, epoch: int, timing: Timing, write: Callable[[bytes], object],
        tap: Callable[[dict[str, Any]], None] | None = None, listed: bool = True,
        after: Callable[[Node], None], on_raise: Callable[[str, Exception], None],
    ) -> None:  # fmt: skip
        self.net, self.spec, self.name, self.role, self.epoch = net, spec, spec.name, spec.role, epoch
        self.settings, self.timing = spec.settings, timing
        self._loop_s = max(timing.loop / 1000, GAP_S)
        self._after, self._on_raise = after, on_raise
        self.alive = True
        self.draining = self.left = False
        self.clients: dict[int, Client] = {}  # room → the newest leg for it
        self.closing: dict[int, None] = {}  # rooms that have ended and are not yet free
        self._driver_name, self._scheduler_name = ("driver", self.name), ("scheduler", self.name)
        self._driver: Event | None = None
        self._driver_at = 0.0
        self._step: Event | None = None
        self._step_at = 0.0
        self._busy = False
        self.host_turns = 0  # how often its scheduler has looked at its queues
        process = f"{self.name}@{epoch}"
        self.runner = SimRunner(
            page_size=spec.page_size, num_pages=spec.num_pages, max_batch=spec.max_batch, model=spec.model,
            checksums=spec.verify != "off", pool_names=spec.pools,
        )  # fmt: skip
        listen = f"{net.ip_of(self.name)}:{PORT}" if self.role == "prefill" else None
        settings = spec.settings
        self.channel = SimChannel(
            net, process, listen, max_frame_bytes=settings.max_frame_bytes, on_wake=self.wake_driver
        )
        self.transport = SimTransport(
            net, process, verify=spec.verify, offer_life_s=settings.withdrawn_life_s
        )
        fingerprint = sim_fingerprint(spec.page_size, spec.weights)
        self.registry = SimRegistryClient(
            net, fingerprint, node=self.name, heartbeat_s=settings.heartbeat_interval_s
        )
        self.args = KVArgs(
            list(self.runner.pools), spec.page_size, fingerprint, self.name, f"http://{self.name}:30000"
        )
        self.manager = self._make_manager(EventLog(self.name, epoch, net.clock, write, tap))
        self.scheduler = make_scheduler(
            self.role,  # type: ignore[arg-type]
            spec.config,
            self.runner,
            net.clock,
            self.manager,
            wake=self.wake_scheduler,
        )
        self.page_hold = PageHold(self.scheduler.cache)
        self.errors = ArmedErrors(self)
        self.registry.announce(
            registration(self.args, self.role, epoch, zmq_addr=self.channel.address or ""), listed=listed
        )
        self.wake_driver()

    def _make_manager(self, log: EventLog) -> KVManager:
        pool_bytes = sum(p.page_bytes * p.shape[0] * p.n_layers for p in self.runner.pools)
        return KVManager(
            self.args,
            "b0:8998",
            role=self.role,
            settings=self.settings,
            ports=Ports(self.transport, self.channel, self.registry, self.net.clock),
            epoch=self.epoch,
            budget_bytes=self.spec.budget_bytes or self.settings.unpulled_budget_bytes or pool_bytes // 4,
            log=log,
            on_event=self.wake_scheduler,
        )

    # ---------------------------------------------------------------- driver

    def wake_driver(self) -> None:
        if self.alive:
            self._drive_at(self.net.clock.now_s + self._loop_s)

    def _drive_at(self, at: float) -> None:
        if self._driver is not None:
            if self._driver_at <= at:
                return
            self._driver.cancel()
        self._driver_at = at
        self._driver = self.net.at(at, self._drive, self._driver_name)

    def _drive(self) -> None:
        self._driver = None
        until = self.net.frozen(self.name)
        if until:
            self._drive_at(until + GAP_S)
            return
        manager = self.manager
        try:
            manager.turn()
        except Exception as error:
            self._on_raise(self.name, error)
        self._drive_at(max(manager.next_deadline(), self.net.clock.now_s + self._loop_s))
        self._after(self)

    # ---------------------------------------------------------------- scheduler

    def wake_scheduler(self) -> None:
        if self.alive and not self._busy:
            self._step_by(self.net.clock.now_s + self._loop_s)

    def _step_by(self, at: float) -> None:
        if self._step is not None:
            if self._step_at <= at:
                return
            self._step.cancel()
        self._step_at = at
        self._step = self.net.at(at, self._host_work, self._scheduler_name)

    def _host_work(self) -> None:
        self._step = None
        until = self.net.frozen(self.name)
        if until:
            self._step_by(until + GAP_S)
            return
        scheduler = self.scheduler
        self.host_turns += 1
        try:
            worked = scheduler.host_work()
        except Exception as error:
            worked = True
            self._on_raise(self.name, error)
        cost_s = self._device_cost_s()
        if cost_s is not None:
            self._busy = True
            self.net.after(cost_s, self._device_work, ("device", self.name))
        elif worked:
            self._step_by(self.net.clock() + self._loop_s)
        else:
            wake = scheduler.next_wake()
            if wake is not None:
                self._step_by(max(wake, self.net.clock() + self._loop_s))
        self._after(self)

    @property
    def will_look(self) -> bool:
        """Its scheduler is in a device step, or will look at its queues by itself."""
        return self._busy or self._step is not None

    def _device_cost_s(self) -> float | None:
        """What the device calls of this step will take; None: there is nothing to launch or to read.

        It passes before they are made. An overlapped loop waits after its launch instead, which nobody can tell
        apart: a launch changes what this node alone sees.
        """
        scheduler, timing = self.scheduler, self.timing
        cost = 0.0
        seq = scheduler.next_prompt()
        if seq is not None:
            chunk = min(scheduler.config.chunked_prefill_size, seq.n_prompt - seq.computed)
            cost += chunk * timing.prefill_per_token
        if scheduler.decodable():
            cost += timing.decode_step
        elif seq is None and not scheduler.unread():
            return None
        return cost / 1000

    def _device_work(self) -> None:
        if not self.alive:
            return
        until = self.net.frozen(self.name)
        if until:
            self.net.at(until + GAP_S, self._device_work, ("device", self.name))
            return
        self._busy = False
        try:
            self.scheduler.device_work()
        except Exception as error:
            self._on_raise(self.name, error)
        self._step_by(self.net.clock() + self._loop_s)
        self._after(self)

    # ---------------------------------------------------------------- HTTP

    def submit(
        self, rid: str, room: int, prompt: Sequence[int], sampling: SamplingParams, host: str = "p0",
        client: Client | None = None,
    ) -> Client:  # fmt: skip
        """One leg, as the HTTP layer posts it: check, claim, hand to the scheduler. Raises PDError."""
        client = client or Client()
        digest = request_digest(prompt, sampling.first_token_key())
        leg = Leg(room, rid, digest, len(prompt), host, None)
        request = Request(rid, list(prompt), sampling, client.sink, room=room, bootstrap_host=host)
        request.times.arrived = self.net.clock()
        client.request = request
        try:
            self.scheduler.check(request)
        except Exception:
            self.manager.refuse(leg, "bad_request")
            raise
        self.manager.claim(leg)
        self.clients[room] = client
        self.scheduler.submit(request)
        return client

    def serves(self, client: Client) -> bool:
        """This life of the node has that leg."""
        return self.alive and any(known is client for known in self.clients.values())

    # ---------------------------------------------------------------- life

    def crash(self) -> None:
        """The process is gone: nothing of it runs, its connections are reset."""
        self.alive = False
        for event in (self._driver, self._step):
            if event is not None:
                event.cancel()
        self.net.thaw(self.name)
        self.registry.close()
        self.transport.close(0)
        self.channel.close()

    def drain(self) -> None:
        """Admit nothing more; leave the registry once everything has ended (``drained``)."""
        self.draining = True
        self.manager.drain()
        self.wake_driver()

    def end_all(self) -> None:
        """The grace of a drain is over: abort what runs and end the rooms, in the order of the serving process."""
        self.scheduler.abort_all()
        self.manager.end_rooms()
        self.wake_driver()
        self.wake_scheduler()

    # ---------------------------------------------------------------- what is not free

    def room_is_free(self, room: int) -> bool:
        """Nothing on this node belongs to the room any more (its tombstone aside)."""
        client, manager = self.clients.get(room), self.manager
        if client is not None and client.end is None and client.request is not None:
            return False
        if self.role == "prefill":
            record = manager.sender.rooms.get(room)
            held = record is not None and (record.live or record.charged_bytes > 0)
            return not held and not any(key.room == room for key in manager.sender.limbo)
        record_d = manager.receiver.rooms.get(room)
        return record_d is None or not (record_d.live or record_d.pulling)

    def held(self, *, strict: bool = True) -> dict[str, int]:
        """What is not free: {} when the node is as it was at the start.

        strict False: without graveyard pulls and the notices that wait for them (bounded, and reported elsewhere).
        """
        manager = self.manager
        found = dict(manager.quiescent())
        if not strict:
            found["pulls"] -= sum(p.abandoned for p in self.transport.pulls.values())
            found["notices"] -= sum(
                len(r.notices) for r in manager.receiver.rooms.values() if r.pulling and not r.live
            )
        found["pages"] = (
            self.runner.num_pages - 1 - self.scheduler.cache.available_pages() - self.page_hold.taken
        )
        found["registrations"] = self.transport.unpulled()
        found["requests"] = sum(len(queue) for queue in self.scheduler._queues())
        return {k: v for k, v in found.items() if v}

    @property
    def stopped(self) -> bool:
        return self.net.frozen(self.name) > 0
