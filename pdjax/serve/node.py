"""One node: model, scheduler, manager and their threads, as the HTTP layer's Engine.

Threads: HTTP (event loop), scheduler (all device work), driver (peers), poller (pulls), registry client. Must never
touch the pools outside the scheduler thread, and never register before its programs are compiled (protocol §7).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pdjax.core.errors import ConfigError, PDError
from pdjax.core.identity import make_epoch
from pdjax.core.pools import KVArgs, request_digest
from pdjax.core.reasons import explain
from pdjax.core.trace import EventLog
from pdjax.engine.base import Leg
from pdjax.engine.bootstrap.client import HttpRegistryClient
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.jax_transfer.manager import JaxTransferKVManager
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine
from pdjax.engine.manager import Ports
from pdjax.engine.ports import LookupDone
from pdjax.sched.config import of_settings
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Request
from pdjax.sched.scheduler import SchedulerConfig
from pdjax.serve.args import ServeArgs
from pdjax.serve.engine_api import Role
from pdjax.serve.engine_api import Tokenizer as EngineTokenizer
from pdjax.serve.loading import Model, fingerprint_of
from pdjax.serve.log import ServerLog, hand_off_tap
from pdjax.serve.node_view import numbers_of, rooms_of
from pdjax.serve.numbers import Numbers
from pdjax.serve.router_member import RouterMember
from pdjax.serve.watchdog import Watchdog

if TYPE_CHECKING:
    from pdjax.faults.port import FaultPort

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 1.0  # facts/peer-servers §9: enough for a pull in flight, short enough for an operator
IDLE_WAIT_S = 5.0  # a wake ends it; this bounds a lost one, and a wait longer than threads can


class Node:
    """Implements serve.engine_api.Engine. ``start`` once; ``close`` once."""

    def __init__(
        self,
        args: ServeArgs,
        model: Model,
        serving_url: str,
        server_log: ServerLog | None = None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """on_drain: called when a client asks for the end of this process, from any thread."""
        self.args = args
        self.ask_to_drain = on_drain
        self.serving_url = serving_url
        self.draining = False
        self._tap = hand_off_tap(server_log) if server_log is not None else None
        self.role: Role = args.disaggregation_mode
        self.tokenizer: EngineTokenizer = model.tokenizer
        self.context_length = model.runner.context_tokens
        self.vocab_size = model.tokenizer.vocab_size
        self.model_name = model.name
        self.model_info: Mapping[str, Any] = model.info
        self.bootstrap_port = args.bootstrap_port if self.role != "null" else None
        self.disable_radix_cache = args.disable_radix_cache or self.role == "decode"
        self.runner = model.runner
        self.epoch = make_epoch(time.time(), secrets.randbits(32))
        self.instance_id = args.seat(serving_url)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._asked_at_s = 0.0  # the newest request to generate, or to drain
        self._paused = False  # a client has asked for it, and nobody has taken it back
        self._loaded = threading.Event()
        self._dead: str | None = None
        self._trace: IO[bytes] | None = None
        self.manager: JaxTransferKVManager | None = None
        self.channel: ZmqSideChannel | None = None
        self.registry: HttpRegistryClient | None = None
        self.transport: JaxTransferKVEngine | None = None
        self.router: RouterMember | None = None  # of whoever runs this process, and so is the watchdog
        self.watchdog: Watchdog | None = None
        self.faults = self._fault_port()
        if self.role != "null":
            self._make_manager(serving_url)
        config = SchedulerConfig(
            context_length=self.context_length,
            eos_ids=model.tokenizer.eos_ids,
            max_running=args.max_running_requests,
            max_queue=args.max_queue,
            chunked_prefill_size=self.runner.buckets.chunk_tokens,
            disable_radix_cache=args.disable_radix_cache,
            overlap=not args.disable_overlap_schedule,
            **of_settings(args.settings),
        )
        self.scheduler = make_scheduler(
            self.role, config, self.runner, time.monotonic, self.manager, wake=self._wake.set
        )
        self._thread = threading.Thread(target=self._run_scheduler, name="scheduler", daemon=True)
        if self.faults is not None:
            self.faults.attach(self)

    def _fault_port(self) -> FaultPort | None:
        """Of a process that a test harness has started to hurt it; else nothing of it is even imported."""
        if not self.args.fault_socket:
            return None
        from pdjax.faults.port import FaultPort

        return FaultPort(self.args.fault_socket, self.instance_id, self.args.secret())

    def _make_manager(self, serving_url: str) -> None:
        args, settings = self.args, self.args.settings
        pools = list(self.runner.pools)
        prints = fingerprint_of(self.runner)
        kv = KVArgs(pools, args.page_size, prints, self.instance_id, serving_url)
        clock = time.monotonic
        channel = self.channel = (
            ZmqSideChannel.bind(args.host, args.port_base, settings=settings, secret=args.secret())
            if self.role == "prefill"
            else ZmqSideChannel.dealer(settings=settings, secret=args.secret())
        )
        self.transport = JaxTransferKVEngine(
            settings,
            host=args.host,
            port_base=args.port_base + 1 if args.port_base else None,
            verify=args.verify,
        )
        self.registry = HttpRegistryClient(
            args.bootstrap_host or None,
            args.bootstrap_port,
            fingerprint=prints,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            token=args.token(),
            ca_file=args.ssl_ca_file,
        )
        pool_bytes = sum(p.page_bytes * p.shape[0] * p.n_layers for p in pools)
        ports, tap = Ports(self.transport, channel, self.registry, clock), self._tap
        if self.faults is not None:
            ports, tap = self.faults.wrap(ports), self.faults.tap(tap)
        self.manager = JaxTransferKVManager(
            kv,
            f"{args.bootstrap_host}:{args.bootstrap_port}",
            role=self.role,
            settings=settings,
            ports=ports,
            epoch=self.epoch,
            budget_bytes=settings.unpulled_budget_bytes or pool_bytes // 4,
            secret=args.secret(),
            log=EventLog(self.instance_id, self.epoch, clock, self._open_trace(), tap),
            on_event=self._wake.set,
        )
        self._registration = registration(
            kv, self.role, self.epoch, zmq_addr=channel.address or "", transfer_addr=args.host
        )

    def _open_trace(self) -> Callable[[bytes], object] | None:
        """A directory gets one file for each life, named after it. Without a file the lines are only tapped."""
        if not self.args.trace:
            return None if self._tap is None else len
        path = Path(self.args.trace)
        if os.path.isdir(path):
            path /= f"{self.instance_id}-{self.epoch}.ndjson"
        try:
            self._trace = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--disaggregation-trace {path}: {error.strerror}") from None
        return self._trace.write

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to compile; ``loaded`` says when requests may come. Raises ConfigError."""
        if self.faults is not None:
            self.faults.start()
        self._thread.start()

    def loaded(self, wait_s: float) -> bool:
        """Whether everything is compiled and the driver runs. Raises ConfigError when it cannot be."""
        if not self._loaded.wait(wait_s):
            return False
        if self._dead is not None:
            raise ConfigError(self._dead)
        if self.manager is not None:
            self.manager.start()
        return True

    def announce(self) -> None:
        """Into the registry: only now may others find us."""
        if self.registry is not None and self.args.bootstrap_host:
            self.registry.announce(self._registration)

    def _run_scheduler(self) -> None:
        try:
            self._warm_up()
            self._loaded.set()
            while not self._stopping.is_set():
                self._wake.clear()
                if not self.scheduler.step():
                    at = self.scheduler.next_wake()
                    self._wake.wait(_idle_wait_s(at, time.monotonic()))
        except Exception as error:
            self._dead = f"the scheduler thread has died: {type(error).__name__}: {error}"
            log.exception("the scheduler thread has died")
            self._loaded.set()

    def _warm_up(self) -> None:
        recomputes = self.args.settings.on_failure == "recompute"
        began = time.monotonic()
        staged = self.manager is not None and self.manager.host_slots is not None
        n = self.runner.warmup(
            prefill=self.role != "decode" or recomputes,
            decode=self.role != "prefill",
            gather=self.role == "prefill",
            scatter=self.role == "decode",
            stage=staged,
        )
        log.info("compiled %d programs in %.1f s", n, time.monotonic() - began)
        if self.manager is not None and staged:
            self.runner.prepare(self.manager.fill_slots(self.runner.hand_off_bytes()))

    def drain(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        self._asked_at_s = time.monotonic()
        self.draining = True
        if self.manager is not None:
            self.manager.drain()

    def end_pause(self) -> bool:
        """Whether a client had paused this node: work goes on, for what is paused never finishes."""
        paused, self._paused = self._paused, False
        if paused:
            self.scheduler.pause(False, lambda: None)
        return paused

    def quiet_s(self) -> float:
        """Since a client has asked for a generation last, or since the drain began."""
        return time.monotonic() - self._asked_at_s

    def leave_routers(self) -> None:
        if self.router is not None:
            self.router.begin_to_leave()

    def unfinished(self) -> int:
        """Requests in any queue and rooms that live, a P's whose KV waits to be pulled included."""
        return sum(_in_queues(self.scheduler.stats())) + (self.manager.n_live if self.manager else 0)

    def has_last_words(self) -> bool:
        """A P has not answered what D said last, or what the driver has to send is not sent. False without a driver."""
        if self.manager is None or not self.manager.alive():
            return False
        held = self.manager.quiescent()
        return bool(held["notices"] or held["pending_effects"])

    def end_all(self) -> None:
        """End every request and every room, and so tell the peers: their clients need not wait for a timer (V7)."""
        self.scheduler.abort_all("draining")
        if self.manager is not None:
            self.manager.end_rooms()

    def close(self) -> int:
        """Out of routers and registry, then the threads in order. How many notices have no answer yet."""
        if self.router is not None:
            self.router.leave()
        self._stopping.set()
        self._wake.set()
        self._thread.join(CLOSE_WAIT_S)
        unheard = 0
        if self.manager is not None:
            unheard = self.manager.quiescent()["notices"]
            self.manager.stop(CLOSE_WAIT_S)
        if self.faults is not None:
            self.faults.close()
        if self._trace is not None:
            self._trace.close()
        return unheard

    # ------------------------------------------------------------------ Engine

    def submit(self, req: Request) -> None:
        """Refuse what can never run, claim the room, queue. Raises PDError before anything is taken."""
        req.times.arrived = self._asked_at_s = time.monotonic()
        if self.manager is None:
            req.room = None  # without PD the bootstrap fields mean nothing
            if self.draining:
                raise PDError(explain("draining"), reason="draining")
            self.scheduler.submit(req)
            return
        if req.room is None:
            raise PDError("this server needs a bootstrap_room", reason="bad_request", status=400)
        digest = request_digest(req.prompt_ids, req.sampling.first_token_key())
        leg = Leg(req.room, req.rid, digest, len(req.prompt_ids), req.bootstrap_host, req.bootstrap_port)
        try:
            self.scheduler.check(req)
        except PDError:
            self._tell_refused(leg)
            raise
        self.manager.claim(leg)
        self.scheduler.submit(req)

    def _tell_refused(self, leg: Leg) -> None:
        """This side can never hold the request, the other one may: its leg must not wait for us (V7)."""
        assert self.manager is not None
        try:
            self.manager.refuse(leg, "bad_request")
        except PDError:
            return  # the caller raises the scheduler's own, more precise one

    def abort(self, rid: str) -> int:
        live = self._live(rid)  # first: the scheduler may end them before this thread looks
        self.scheduler.abort(rid)
        return live

    def abort_all(self) -> int:
        live = self._live(None)
        self.scheduler.abort_all()
        return live

    def abort_request(self, req: Request) -> None:
        self.scheduler.abort_request(req)

    def _live(self, rid: str | None) -> int:
        return 0 if self.manager is None else len(self.manager.live_rooms(rid))

    def info(self) -> Mapping[str, Any]:
        stats = self.scheduler.stats()
        running, waiting = _in_queues(stats)
        info: dict[str, Any] = {
            "num_running": running,
            "num_waiting": waiting,
            "num_tokens": stats["used_pages"] * self.args.page_size,
            **stats,
        }
        if self.manager is not None:
            info["held"] = self.manager.quiescent()
            info["counters"] = dict(self.manager.counters.counts)
            info["event_log_error"] = self.manager.log.error
            info["driver_longest_turn_s"] = round(self.manager.longest_turn_s, 4)
        if self.transport is not None:
            info["transport"] = self.transport.counters()
        if self.channel is not None:
            info["channel"] = self.channel.counters.as_dict()
        if self.registry is not None:
            member = self.registry.membership
            info["registry"] = {**self.registry.counters, "compatible_peers": member.compatible or 0}
            info["registry_error"] = member.error
            info["peer_reachable"] = member.reachable
            info["transfer_ports"] = self.args.transfer_ports
            info["rejected_peers"] = dict(member.rejected or {})
        if self.router is not None:
            info["router_errors"] = dict(self.router.errors)
        return info

    def numbers(self) -> Numbers:
        return numbers_of(self)

    def rooms(self, limit: int, room: int | None) -> Mapping[str, Any]:
        return rooms_of(self, limit, room)

    def ready(self) -> bool:
        if not self._loaded.is_set() or self._dead is not None or self.draining:
            return False
        if self.registry is None or not self.args.bootstrap_host:
            return True  # no pair; or D's requests say which registry knows their P, and none is known before
        member = self.registry.membership
        return bool(member.compatible) and (self.role == "prefill" or member.reachable is True)

    def passed(self) -> int:
        if self.manager is None:
            return self.scheduler.counts["finished_stop"] + self.scheduler.counts["finished_length"]
        return sum(n for _, target, n in self.manager.tally.moves() if target == "Success")

    def peers(self) -> Future[LookupDone]:
        assert self.registry is not None
        return self.registry.peers("decode" if self.role == "prefill" else "prefill")

    def failed(self) -> str | None:
        if self._dead is not None:
            return self._dead
        if self.manager is not None and not self.manager.alive():
            return "the driver thread has died"
        return None if self.registry is None else self.registry.failed()

    def flush_cache(self, timeout_s: float) -> Future[bool]:
        answer: Future[bool] = _uncancellable()
        self.scheduler.flush_cache(timeout_s, answer.set_result)
        return answer

    def pause(self, paused: bool) -> Future[None]:
        self._paused = paused
        answer: Future[None] = _uncancellable()
        self.scheduler.pause(paused, lambda: answer.set_result(None))
        return answer

    def refuse_rooms(self, rooms: Sequence[int]) -> None:
        if self.manager is None or self.role != "prefill":
            return  # P cannot tell whose abort D's would be, without a digest: its lease ends the room
        for room in rooms:
            with contextlib.suppress(PDError):  # it always raises: the caller has a more precise answer
                self.manager.refuse(Leg(room, "", "", 0, "", None), "bad_request")


def _idle_wait_s(at: float | None, now: float) -> float:
    """Until the time that an idle scheduler asks for, however far off a client's /flush_cache has put it."""
    return IDLE_WAIT_S if at is None else min(max(at - now, 0.0), IDLE_WAIT_S)


def _uncancellable() -> Future[Any]:
    """Nobody can cancel it any more under the scheduler's hands."""
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()
    return answer


def _in_queues(stats: Mapping[str, int]) -> tuple[int, int]:
    """Requests that own pages or a row, and requests that wait, of any role (``queued`` counts every waiting queue)."""
    running = sum(stats.get(q, 0) for q in ("running", "prefilling", "in_flight"))
    return running, stats["queued"]
