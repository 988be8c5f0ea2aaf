"""A world of simulated processes under virtual time: nodes p0… and d0…, the registry b0, and one event log.

Who posts requests (router, tests) and what goes wrong (faults) come from outside. Must never read real time, draw
from anything but the world's one Random, or import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pdjax.core.errors import PDError
from pdjax.core.identity import make_epoch
from pdjax.core.settings import PDSettings
from pdjax.core.trace import EventLog
from pdjax.engine.bootstrap.registry import Registry
from pdjax.sched.config import SchedulerConfig, of_settings
from pdjax.sched.request import SamplingParams
from pdjax.sim.loop import GAP_S, Name
from pdjax.sim.net import REGISTRY, SimNet
from pdjax.sim.node import Client, Node, NodeSpec, Timing
from pdjax.sim.runner import expected_tokens

START_UNIX_S = 1_000_000  # wall clock at the start of every world


class World:
    """lines: the merged event log. requests: rid → what the router knows of it. now: seconds since the start.

    Without ``specs`` it is n_prefill × p and n_decode × d of one kind.
    """

    def __init__(
        self, n_prefill: int = 1, n_decode: int = 1, *, settings: PDSettings | None = None, page_size: int = 4,
        num_pages: int = 64, eos_ids: frozenset[int] = frozenset(), budget_bytes: int = 1 << 20,
        weights: dict[str, str] | None = None, specs: Sequence[NodeSpec] = (), timing: Timing | None = None,
        seed: int = 0, choices: Iterable[Name] = (), clock_offset_s: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        timing = timing or Timing()
        self.timing = timing
        self.net = SimNet(timing.link / 1000, jitter_s=timing.jitter / 1000, seed=seed, choices=choices)
        self.net.page_s = timing.pull_per_page / 1000
        self.eos_ids = eos_ids
        names = [f"p{i}" for i in range(n_prefill)] + [f"d{i}" for i in range(n_decode)]
        lost = of_settings(settings or PDSettings())
        config = SchedulerConfig(context_length=4096, eos_ids=eos_ids, **lost)
        self.specs = {spec.name: spec for spec in specs} or {
            name: NodeSpec(
                name, settings or PDSettings(), config, page_size, num_pages,
                budget_bytes=budget_bytes, weights=(weights or {}).get(name, "sim"),
            )
            for name in names
        }  # fmt: skip
        self.lines: list[bytes] = []
        self.taps: list[Callable[[dict[str, Any]], None]] = []
        self.rows: dict[int, None] = {}  # rows of the table that were reached
        self.requests: dict[str, Any] = {}
        self.posted: set[int] = set()  # every room of every request
        self.clock_offset_s = clock_offset_s or {}
        self.early_lines: list[dict[str, Any]] = []  # written before anybody could watch
        self.instants: list[Callable[[], None]] = []  # after every event
        self.on_crash: list[Callable[[str], None]] = []
        self._lives = 0
        self._logs: dict[str, EventLog] = {}
        self._ttl_s = next(iter(self.specs.values())).settings.heartbeat_ttl_s
        self.net.registry = Registry(self._ttl_s)
        self.net.on_member = lambda event, instance: self.log(REGISTRY).line(event, instance=instance)
        self.nodes: dict[str, Node] = {}
        # What a driver or a scheduler raised: its thread would be dead (S11). The default lets it through.
        self.on_raise: Callable[[str, BaseException], None] | None = None
        self.taps.append(self.early_lines.append)
        for name in self.specs:
            self.nodes[name] = self._make(name, listed=True)
        self.taps.clear()

    @property
    def now(self) -> float:
        return self.net.clock()

    # ---------------------------------------------------------------- the event log

    def log(self, node: str) -> EventLog:
        """The log of a process that is no P or D: b0, x0, or "sim" for what is done to the world."""
        if node not in self._logs:
            self._logs[node] = EventLog(node, 1, self.net.clock, self.lines.append, self._tap)
        return self._logs[node]

    def _tap(self, line: dict[str, Any]) -> None:
        if "role" in line:
            if line["row"] >= 0:
                self.rows[line["row"]] = None
            if line["from"] != line["to"] and line["to"] in ("Success", "Failed"):
                self.nodes[line["node"]].closing[int(line["room"])] = None
        for tap in self.taps:
            tap(line)

    def _raised(self, node: str, error: Exception) -> None:
        if self.on_raise is None:
            raise error
        self.on_raise(node, error)

    def _after(self, node: Node) -> None:
        """A driver or scheduler has run: which of its ended rooms are free now?"""
        if node.closing:
            for room in [r for r in node.closing if node.room_is_free(r)]:
                del node.closing[room]
                node.manager.log.line("released", room)
        if node.draining and not node.left and not node.manager.n_live and node.scheduler.idle():
            node.left = True
            node.manager.log.line("left")
            node.registry.leave()

    # ---------------------------------------------------------------- processes

    def _make(self, name: str, *, listed: bool) -> Node:
        self._lives += 1
        # A start takes longer than a second, so two lives never share the high bits of an epoch.
        wall_s = START_UNIX_S + self.now + self._lives + self.clock_offset_s.get(name, 0.0)
        epoch = make_epoch(wall_s, self.net.rng.getrandbits(32))
        return Node(
            self.net, self.specs[name], epoch=epoch, timing=self.timing, write=self.lines.append, tap=self._tap,
            listed=listed, after=self._after, on_raise=self._raised,
        )  # fmt: skip

    def crash(self, name: str) -> None:
        """Process death. b0 loses its table."""
        if name == REGISTRY:
            self.net.registry = None
            self.net.thaw(REGISTRY)
            self.log(REGISTRY).line("crashed")
        elif self.nodes[name].alive:
            node = self.nodes[name]
            node.manager.log.line("crashed")
            node.crash()
            for client in node.clients.values():
                client.on_end = client.on_tokens = lambda: None
            for told in self.on_crash:
                told(name)

    def restart(self, name: str) -> Node | None:
        """A new life on the same addresses, with a new epoch and empty memory."""
        if name == REGISTRY:
            self.net.registry = Registry(self._ttl_s)
            self.log(REGISTRY).line("restarted")
            return None
        if self.nodes[name].alive:
            self.nodes[name].crash()
        node = self.nodes[name] = self._make(name, listed=False)
        node.manager.log.line("restarted")
        return node

    def drain(self, name: str, within_s: float | None = None) -> None:
        """Admit nothing more, finish, leave. within_s: when what this life still has is ended."""
        node = self.nodes[name]
        life = node.manager
        life.log.line("draining")
        node.drain()

        def end() -> None:
            until = self.net.frozen(name)
            if until:
                self.net.at(until + GAP_S, end, ("stop", name))
            elif node.alive and node.manager is life:
                node.end_all()

        if within_s is not None:
            self.net.after(within_s, end, ("stop", name))

    def settings_of(self, name: str) -> PDSettings:
        return self.specs[name].settings

    # ---------------------------------------------------------------- running

    def step(self, stop_s: float = float("inf")) -> bool:
        """One event and what watches it. False: nothing is due by stop_s."""
        if not self.net.step(stop_s):
            return False
        for watch in self.instants:
            watch()
        return True

    def run(self, until: Callable[[], bool] = lambda: False, limit_s: float = 400.0) -> bool:
        """Run until ``until`` holds; False: limit_s of virtual time passed first."""
        stop = self.now + limit_s
        while not until():
            if not self.step(stop):
                self.net.clock.advance_to(stop)
                return until()
        return True

    # ---------------------------------------------------------------- for tests without a router

    def request(
        self,
        room: int,
        prompt: Sequence[int],
        n_out: int = 4,
        *,
        p: str = "p0",
        d: str = "d0",
        rid: str | None = None,
    ) -> tuple[Client, Client]:
        """Both legs at once, past the router."""
        sampling = SamplingParams(max_new_tokens=n_out)
        rid = rid or f"r{room}"
        return tuple(self.nodes[n].submit(rid, room, prompt, sampling, p) for n in (p, d))  # type: ignore[return-value]

    def right(self, prompt: Sequence[int], n_out: int) -> list[int]:
        """The tokens that a server without PD would give."""
        sampling = SamplingParams(max_new_tokens=n_out)
        model = next(iter(self.specs.values())).model
        return expected_tokens(prompt, sampling, n_out, model=model, eos_ids=self.eos_ids)

    # ---------------------------------------------------------------- the end condition

    def held(self, *, strict: bool = True) -> dict[str, dict[str, int]]:
        """What is not free on each live node."""
        return {
            name: held
            for name, node in self.nodes.items()
            if node.alive and (held := node.held(strict=strict))
        }

    def quiescent(self, *, strict: bool = False) -> bool:
        """Everything is free again, as trace-format says it: graveyard pulls and their notices do not count."""
        return not any(node.alive and node.held(strict=strict) for node in self.nodes.values())


__all__ = ["Client", "Node", "PDError", "World"]
