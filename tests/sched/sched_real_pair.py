"""The same pair over the real managers and simulated ports: what the fake manager promises must hold there too."""

from __future__ import annotations

import random

from quick_settings import QUICK
from sched_harness import assert_initial
from sched_pair import Pair

from pdjax.core.identity import make_epoch
from pdjax.core.pools import Fingerprint, KVArgs
from pdjax.engine.base import BaseKVManager
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.manager import KVManager, Ports
from pdjax.sim.membership import SimRegistryClient
from pdjax.sim.net import SimChannel, SimNet
from pdjax.sim.transport import SimTransport

SETTLE_S = 60.0  # longer than any timer of QUICK


class RealPair(Pair):
    def make_managers(self, budget_bytes: int) -> tuple[BaseKVManager, BaseKVManager]:
        assert QUICK.check() == []
        self.net = SimNet()
        self.net.registry = Registry(1e9)
        self.clock = self.net.clock
        self.transports = []
        return self._manager("prefill", 1, budget_bytes), self._manager("decode", 2, budget_bytes)

    def _manager(self, role: str, n: int, budget_bytes: int) -> KVManager:
        runner = self.p_runner if role == "prefill" else self.d_runner
        fingerprint = Fingerprint(
            1, "sim", "sim", "uint64", runner.page_size, 2, 1, 1, "flat", "single", 0, 1, "sim"
        )
        args = KVArgs(list(runner.pools), runner.page_size, fingerprint, f"{role}0", f"http://{role}:80")
        channel = SimChannel(self.net, f"{role}@1", "p.test:1" if role == "prefill" else None)
        client = SimRegistryClient(self.net, fingerprint.hash)
        self.transports.append(SimTransport(self.net, f"{role}@1"))
        manager = KVManager(
            args,
            "registry.test:8998",
            role=role,
            settings=QUICK,
            ports=Ports(self.transports[-1], channel, client, self.clock),
            epoch=make_epoch(1000 + n, n << 20),
            budget_bytes=budget_bytes,
        )
        client.announce(registration(args, role, manager.epoch, zmq_addr=channel.address or ""), listed=True)
        return manager

    def nudge(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            self.clock.advance(rng.choice([0.0, 0.0001, 0.0005]))
            self.net.run_due()
        rng.choice([self.p_manager, self.d_manager]).turn()

    def settle(self, turns: int = 20_000) -> None:
        end = self.clock() + SETTLE_S
        for _ in range(turns):
            worked = self.net.run_due()
            for manager in (self.p_manager, self.d_manager):
                manager.turn()
            worked |= self.p.step() | self.d.step()
            if worked:
                continue
            held = [manager.quiescent() for manager in (self.p_manager, self.d_manager)]
            if self.clock() >= end or (self.p.idle() and self.d.idle() and not any(map(any_held, held))):
                return
            times = [
                self.net.next_at(),
                self.d.next_wake(),
                *(m.next_deadline() for m in (self.p_manager, self.d_manager)),
            ]
            self.clock.advance_to(max(min(t for t in times if t is not None), self.clock() + 1e-6))
        raise AssertionError("the pair is still busy")

    def half_state(self, role: str, room: int):
        manager = self.p_manager if role == "prefill" else self.d_manager
        return manager.rooms[room].poll

    def half_reason(self, role: str, room: int) -> str:
        manager = self.p_manager if role == "prefill" else self.d_manager
        return manager.rooms[room].reason

    def assert_initial(self) -> None:
        assert_initial(self.p)
        assert_initial(self.d)
        for manager, transport in zip((self.p_manager, self.d_manager), self.transports, strict=True):
            assert not any_held(manager.quiescent()), manager.quiescent()
            assert transport.unpulled() == 0
            assert "illegal" not in manager.counters.counts


def any_held(quiescent: dict[str, int]) -> bool:
    return any(quiescent.values())
