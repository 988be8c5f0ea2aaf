"""Random trace files: each seed draws a world, requests and faults, and at the end heals it all.

A seed draws which kinds of fault are on and how often (a swarm: runs in which one kind is missing reach other states
than runs with all of them). The last steps of every file heal the world and send one probe through every pair, so
that what is checked afterwards is liveness. Must never keep state between seeds, or draw a file that is not valid.
"""

from __future__ import annotations

import random
from typing import Any

from pdjax.core.settings import PDSettings
from pdjax.sim.draw_faults import FAULTS, MAX_FAULTS, MAX_REQUESTS, Faults
from pdjax.sim.draw_prefixes import share_prefixes
from pdjax.sim.draw_recompute import recompute_lost_ones
from pdjax.sim.transport import SimTransport

Trace = dict[str, Any]


def draw(seed: int) -> Trace:
    """The trace file of a seed. The same seed gives the same file on any machine."""
    trace = _Draw(seed).trace()
    share_prefixes(trace, seed)
    _stage_on_host(trace, seed)
    recompute_lost_ones(trace, seed)
    return trace


def _stage_on_host(trace: Trace, seed: int) -> None:
    """Some worlds' P, or one of them, stages its KV. The random numbers are its own: requests and faults stay what they are."""
    rng = random.Random(f"staging {seed}")
    world = trace["world"]
    if rng.random() < 0.7:
        return
    flags = world["flags"]
    if rng.random() < 0.3:
        flags = flags.setdefault(rng.choice(world["prefill"]), {})
    flags["disaggregation-host-staging"] = True


class _Draw(Faults):
    """One file in the making."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        rng = self.rng
        self.ps = [f"p{i}" for i in range(rng.choice([1, 1, 2, 3]))]
        self.ds = [f"d{i}" for i in range(rng.choice([1, 1, 2, 3]))]
        self.nodes = [*self.ps, *self.ds]
        self.settings, self.flags = self._settings()
        self.span_ms = rng.choice([5, 50, 500, 1500, 2800])  # over which requests and faults are spread
        self.rooms: list[tuple[str, int]] = []
        self.twins = rng.choice([0, 0, 0, 0.3])
        self.short: set[str] = set()
        self.drained: set[str] = set()
        self.extra = 0

    def trace(self) -> Trace:
        rng = self.rng
        steps = self._requests()
        weights = {kind: rng.choice([0, 0, 1, 3]) for kind in FAULTS}
        kinds = [k for k, w in weights.items() for _ in range(w)]
        for _ in range(rng.randrange(0, MAX_FAULTS + 1) if kinds else 0):
            steps += getattr(self, "_" + rng.choice(kinds))()
        self.odd = rng.choice(self.nodes) if len(self.nodes) > 2 and rng.random() < 0.06 else ""
        if self.odd:
            self.flags[self.odd] = {"model": "other"}
        crashed = {s["crash"] for s in steps if "crash" in s}
        back = {s["clock"]["node"] for s in steps if "clock" in s and s["clock"]["jump"] < 0}
        steps += self._heal(set_back=bool(crashed & back))
        page_size = rng.choice([1, 2, 4, 16])
        need = max(
            -(-(s["request"]["prompt"] + s["request"]["output"]) // page_size)
            for s in steps
            if "request" in s
        )
        pages = {n: need + rng.choice([0, 1, need, 4 * need]) for n in self.nodes}
        world: dict[str, Any] = {
            "prefill": self.ps,
            "decode": self.ds,
            "page_size": page_size,
            "pages": pages,
            "flags": self.flags,
            "timing": {
                "jitter": rng.choice([0, 0, 0.3, 3]),
                "link": rng.choice([0.2, 0.2, 2]),
                "prefill_per_token": rng.choice([0.1, 0.1, 1, 1, 40]),
                "decode_step": rng.choice([0.2, 1, 5]),
                "pull_per_page": rng.choice([0.1, 2]),
            },
        }
        if rng.random() < 0.15:
            world["pools"] = ["main_kv", "recurrent_state"]
        if rng.random() < 0.3:
            world["router"] = {"retries": rng.choice([0, 1, 2]), "timeout": 20000}
        if rng.random() < 0.2:
            world["clock_offset"] = {n: rng.randrange(-(10**7), 10**7) for n in self.nodes}
        for name in self.nodes:
            if rng.random() < 0.3:
                self.flags.setdefault(name, {})["disable-overlap-schedule"] = True
        outcomes = {s["request"]["rid"]: "any" for s in steps if "request" in s}
        return {
            "format": "pdjax.trace/1",
            "name": f"fuzz-{self.seed}",
            "seed": self.seed,
            "world": world,
            "steps": steps,
            "expect": {"outcomes": outcomes},
        }

    def _settings(self) -> tuple[PDSettings, dict[str, Any]]:
        rng = self.rng
        while True:
            lease = rng.choice([0.6, 1.0, 2.0])
            peer = round(lease * rng.uniform(0.25, 0.45), 2)
            bound = round(peer * rng.uniform(0.08, 0.2), 3)
            transfer, bootstrap = round(rng.uniform(0.5, 2), 1), round(rng.uniform(0.5, 2), 1)
            values: dict[str, Any] = {
                "lease_s": lease,
                "peer_timeout_s": peer,
                "answer_bound_s": bound,
                "hello_interval_s": round((peer - bound) / 3 * rng.uniform(0.3, 0.9), 3),
                "transfer_timeout_s": transfer,
                "bootstrap_timeout_s": bootstrap,
                "limbo_timeout_s": round(transfer + bound + rng.choice([0, 0.2, 1]), 3),
                "graveyard_timeout_s": round(rng.uniform(0.5, 2.5), 1),
                "request_timeout_s": round(max(transfer, bootstrap) + peer + rng.uniform(0.3, 2), 1),
                "heartbeat_interval_s": 0.9,
                "heartbeat_ttl_s": 2.0,
                "unpulled_budget_bytes": rng.choice([0, 1, 3000, 20000]),
                "prefill_gate": "gated" if rng.random() < 0.2 else "eager",
            }
            settings = PDSettings(**values)
            if not settings.check():
                names = {f: PDSettings.__dataclass_fields__[f].metadata["flag"] for f in values}
                return settings, {names[f]: v for f, v in values.items()}

    # ---------------------------------------------------------------- requests

    def _requests(self) -> list[Trace]:
        rng = self.rng
        steps: list[Trace] = []
        busy = rng.random() < 0.15
        for i in range(rng.randrange(1, MAX_REQUESTS + 1) if busy else rng.randrange(1, 7)):
            request: Trace = {
                "rid": f"r{i}",
                "room": rng.choice([i, i + 100, str((1 << 62) + i)]),
                "prompt": rng.choice([1, 3, 4, 5, 9, 17, 40]),
                "output": rng.choice([1, 2, 5, 12]),
                "prefill": rng.choice(self.ps),
                "decode": rng.choice(self.ds),
            }
            at = self._when()
            if steps and rng.random() < self.twins:
                first = rng.choice(steps)
                request["room"] = first["request"]["room"]
                if rng.random() < 0.6:  # the very same prompt: only the attempt tells the two apart
                    other = first["request"]
                    request |= {"prompt": other["prompt"], "prefill": other["prefill"]}
                    request["prefix"] = {"rid": other["rid"], "tokens": other["prompt"]}
                if rng.random() < 0.4:  # when the first is a tombstone, or forgotten
                    at = round(
                        first["at"] + self.settings.tombstone_life_s * 1000 * rng.choice([0.5, 1.02, 1.1]), 2
                    )
            if rng.random() < 0.15:
                request["legs"] = {rng.choice(["prefill", "decode"]): self._leg()}
            if rng.random() < 0.05:
                request["n"] = 2
                request["room"] = 1000 + 10 * i
            if rng.random() < 0.3:
                request["stream"] = True
            self.rooms.append((request["rid"], int(request["room"])))
            steps.append({"at": at, "request": request})
        return steps

    def _leg(self) -> Trace:
        rng = self.rng
        return rng.choice(
            [
                {"delay": rng.choice([1, 30, 300])},
                {"drop": True},
                {"status": rng.choice([400, 503]), "delay": rng.choice([0, 30])},
            ]
        )

    # ---------------------------------------------------------------- healing

    def _heal(self, *, set_back: bool) -> list[Trace]:
        """When every fault is over: all nodes up, all pages back, then one probe through each pair.

        The gap before the probes is what the slowest timer of the settings takes to clear what a fault left.
        set_back: a node may start with a smaller epoch than it had; peers and the registry must forget the old one
        first (docs/decisions/0006).
        """
        s = self.settings
        longest_s = max(s.request_timeout_s, s.transfer_timeout_s + s.graveyard_timeout_s, s.limbo_timeout_s)
        heal = round(self.span_ms + 2700 + s.request_timeout_s * 1000)
        steps: list[Trace] = [
            {"at": heal, "restart": n} for n in [*self.nodes, "b0"] if n not in self.drained
        ]
        steps += [{"at": heal, "pages": {"node": n, "free": None}} for n in sorted(self.short)]
        forget_s = 2 * s.heartbeat_ttl_s + s.withdrawn_life_s + SimTransport.tick_s if set_back else 0.0
        probe = round(heal + 1000 * (longest_s + forget_s) + 2500)
        for i, p in enumerate(self.ps):
            for j, d in enumerate(self.ds):
                if not {p, d} & {*self.drained, self.odd}:
                    n = 10 * i + j
                    request = {
                        "rid": f"probe-{p}-{d}", "room": 500000 + n, "prompt": 5, "output": 2, "prefill": p, "decode": d,
                    }  # fmt: skip
                    steps.append({"at": probe + 20 * n, "request": request})
        return steps
