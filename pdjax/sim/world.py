"""A small world: real schedulers and managers on simulated ports, pumped under virtual time.

Driver and scheduler of a node are separate sources of work, so a long step never answers a peer by accident.
Must never read real time or import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdjax.core.errors import PDError
from pdjax.core.identity import make_epoch
from pdjax.core.pools import Fingerprint, KVArgs, request_digest
from pdjax.core.settings import PDSettings
from pdjax.core.trace import EventLog
from pdjax.engine.base import Leg
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.manager import KVManager, Ports
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Output, Request, SamplingParams
from pdjax.sched.scheduler import SchedulerConfig
from pdjax.sim.net import SimChannel, SimNet, SimRegistryClient, SimTransport
from pdjax.sim.runner import SimRunner, expected_tokens

CONTEXT_LENGTH = 4096


def sim_fingerprint(page_size: int, weights: str = "sim") -> Fingerprint:
    return Fingerprint(1, "sim", weights, "uint64", page_size, 2, 1, 1, "flat", "single", 0, 1, "sim")


@dataclass
class Client:
    """What the client of one leg has seen."""

    tokens: list[int] = field(default_factory=list)
    end: Output | None = None

    def sink(self, out: Output) -> None:
        assert self.end is None, "a second end"
        self.tokens += out.token_ids
        if out.finish or out.failure:
            self.end = out


class Node:
    """One process: a scheduler, a manager, a driver."""

    def __init__(
        self, net: SimNet, name: str, *, settings: PDSettings, page_size: int, num_pages: int, epoch: int,
        eos_ids: frozenset[int], budget_bytes: int, lines: list[bytes], weights: str = "sim",
    ) -> None:  # fmt: skip
        self.net, self.name, self.role = net, name, "prefill" if name.startswith("p") else "decode"
        self.runner = SimRunner(page_size=page_size, num_pages=num_pages)
        self.channel = SimChannel(net, f"{name}@{epoch}", f"{name}:1" if self.role == "prefill" else None)
        self.transport = SimTransport(net, f"{name}@{epoch}")
        fingerprint = sim_fingerprint(page_size, weights)
        client = SimRegistryClient(net, fingerprint.hash)
        self.args = KVArgs(list(self.runner.pools), page_size, fingerprint, name, f"http://{name}:80")
        self.manager = KVManager(
            self.args,
            "b0:8998",
            role=self.role,
            settings=settings,
            ports=Ports(self.transport, self.channel, client, net.clock),
            epoch=epoch,
            budget_bytes=budget_bytes,
            log=EventLog(name, epoch, net.clock, lines.append),
        )
        config = SchedulerConfig(context_length=CONTEXT_LENGTH, eos_ids=eos_ids)
        self.scheduler = make_scheduler(self.role, config, self.runner, net.clock, self.manager)  # type: ignore[arg-type]
        client.announce(registration(self.args, self.role, epoch, zmq_addr=self.channel.address or ""))
        self.alive = True

    def submit(
        self, rid: str, room: int, prompt: Sequence[int], sampling: SamplingParams, host: str = "p0"
    ) -> Client:
        """One leg, as the HTTP layer would post it: claim, then hand to the scheduler. Raises PDError."""
        client = Client()
        digest = request_digest(prompt, sampling.first_token_key())
        self.manager.claim(Leg(room, rid, digest, len(prompt), host, None))
        request = Request(rid, list(prompt), sampling, client.sink, room=room, bootstrap_host=host)
        request.times.arrived = self.net.clock()
        self.scheduler.submit(request)
        return client

    def pump(self) -> bool:
        if not self.alive:
            return False
        self.manager.turn()
        worked = False
        while self.scheduler.step():
            worked = True
        return worked

    def next_at(self) -> float:
        wake = self.scheduler.next_wake()
        return min(self.manager.next_deadline(), wake if wake is not None else float("inf"))

    def crash(self) -> None:
        self.alive = False
        self.channel.close()
        self.transport.close(0)

    def held(self) -> dict[str, int]:
        """What is not free: {} when the node is as it was at the start."""
        found = dict(self.manager.quiescent())
        found["pages"] = self.runner.num_pages - 1 - self.scheduler.cache.available_pages()
        found["registrations"] = self.transport.unpulled()
        return {k: v for k, v in found.items() if v}


class World:
    """Nodes p0… and d0… with one registry. lines: the merged event log."""

    def __init__(
        self, n_prefill: int = 1, n_decode: int = 1, *, settings: PDSettings | None = None, page_size: int = 4,
        num_pages: int = 64, eos_ids: frozenset[int] = frozenset(), budget_bytes: int = 1 << 20,
        weights: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.net = SimNet()
        self.net.registry = Registry(1e9)
        self.lines: list[bytes] = []
        self._epochs = 0
        self.eos_ids = eos_ids
        self._make: Callable[[str], Node] = lambda name: Node(
            self.net, name, settings=settings or PDSettings(), page_size=page_size, num_pages=num_pages,
            epoch=self._next_epoch(), eos_ids=eos_ids, budget_bytes=budget_bytes, lines=self.lines,
            weights=(weights or {}).get(name, "sim"),
        )  # fmt: skip
        names = [f"p{i}" for i in range(n_prefill)] + [f"d{i}" for i in range(n_decode)]
        self.nodes = {name: self._make(name) for name in names}

    def _next_epoch(self) -> int:
        self._epochs += 1
        return make_epoch(1000 + self._epochs, self._epochs << 20)

    def restart(self, name: str) -> Node:
        """A new life on the same address, with empty memory."""
        if self.nodes[name].alive:
            self.nodes[name].crash()
        self.nodes[name] = self._make(name)
        return self.nodes[name]

    def _pump_all(self) -> bool:
        worked = False
        for node in self.nodes.values():
            worked |= node.pump()
        return worked

    def run(self, until: Callable[[], bool] = lambda: False, limit_s: float = 400.0) -> bool:
        """Pump until ``until`` holds; False: limit_s of virtual time passed first."""
        stop = self.net.clock() + limit_s
        while True:
            while self.net.run_due() | self._pump_all():
                if until():
                    return True
            if until():
                return True
            times = [n.next_at() for n in self.nodes.values() if n.alive]
            if (at := self.net.next_at()) is not None:
                times.append(at)
            now = self.net.clock()
            step = max(min(times, default=stop), now + 1e-6)
            if step > stop:
                return False
            self.net.clock.advance_to(step)

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
        """Both legs at once, as the routers post them."""
        sampling = SamplingParams(max_new_tokens=n_out)
        rid = rid or f"r{room}"
        return tuple(self.nodes[n].submit(rid, room, prompt, sampling, p) for n in (p, d))  # type: ignore[return-value]

    def right(self, prompt: Sequence[int], n_out: int) -> list[int]:
        sampling = SamplingParams(max_new_tokens=n_out)
        return expected_tokens(
            prompt, sampling, n_out, model=self.nodes["d0"].runner.model, eos_ids=self.eos_ids
        )

    def held(self) -> dict[str, dict[str, int]]:
        return {name: held for name, node in self.nodes.items() if node.alive and (held := node.held())}


__all__ = ["Client", "Node", "PDError", "World"]
