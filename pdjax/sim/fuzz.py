"""Random worlds: each seed draws a whole trace file, which is run, healed and checked, and can be replayed.

A seed draws which kinds of fault are on and how often (a swarm: runs in which one kind is missing reach other states
than runs with all of them). The last steps of every file heal the world and send one probe through every pair, so
that what is checked afterwards is liveness. Must never read real time for a decision, and never keep state between
seeds.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pdjax.core import transitions
from pdjax.core.settings import PDSettings
from pdjax.sim.properties.sometimes import MOMENTS

MESSAGES = ("hello", "unknown", "pending", "ready", "done", "done_ack", "abort", "failed")
P_EVENTS = ("admitted", "prefilled", "registered", "withdrawn")
D_EVENTS = ("peer_known", "pull_started", "landed", "scattered", "first_token")
ANY_EVENTS = ("success", "failed", "released")
TO_P, TO_D = ("hello", "done", "abort"), ("unknown", "pending", "ready", "failed", "done_ack")
# What a message may say that its sender would not say now: old, foreign and made-up names, never a false "quiet".
CONFUSED: dict[str, dict[str, list[Any]]] = {
    "hello": {"attempt": [1, 1 << 62], "ack_epoch": [0, 1], "digest": ["other"], "fingerprint": ["other"]},
    "abort": {"attempt": [1], "uuid": [0, 1], "digest": ["other"]},
    "done": {"attempt": [1], "uuid": [1]},
    "unknown": {"attempt": [1]},
    "pending": {"attempt": [1]},
    "ready": {"attempt": [1], "uuid": [1]},
    "failed": {"attempt": [1], "echo": [True, False]},
    "done_ack": {"attempt": [1], "uuid": [1]},
}
FAULTS = (
    "abort", "disconnect", "drop", "duplicate", "delay", "corrupt", "hang", "fail", "corrupt_part", "truncate", "slow",
    "inject", "error", "crash", "stop", "partition", "pages", "clock", "drain",
)  # fmt: skip
RAISED = "the run raised"
MAX_REQUESTS, MAX_FAULTS = 20, 10

Trace = dict[str, Any]


# ---------------------------------------------------------------- drawing


def draw(seed: int) -> Trace:
    """The trace file of a seed. The same seed gives the same file on any machine."""
    return _Draw(seed).trace()


class _Draw:
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
        for step in steps:  # a clock that went back before a start is docs/decisions/0006
            if "clock" in step and any(s.get("crash") == step["clock"]["node"] for s in steps):
                step["clock"]["jump"] = abs(step["clock"]["jump"])
        steps += self._heal()
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
                "gated": rng.random() < 0.2,
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

    def _when(self) -> float:
        return round(self.rng.uniform(0, self.span_ms), 2)

    def _trigger(self, room: int | None = None) -> Trace:
        """A time, or an event of a room: faults that follow the protocol's own steps find more."""
        rng = self.rng
        if rng.random() < 0.4:
            return {"at": self._when()}
        if room is None:
            room = rng.choice(self.rooms)[1]
        event = rng.choice(["sent", "delivered", *P_EVENTS, *D_EVENTS, *ANY_EVENTS])
        on: Trace = {"event": event, "room": room if room < 1 << 53 else str(room)}
        if event in ("sent", "delivered"):
            on["message"] = rng.choice(MESSAGES)
        step: Trace = {"on": on}
        if rng.random() < 0.2:
            step["nth"] = 2
        if rng.random() < 0.5:
            step["after"] = rng.choice([0.05, 0.3, 5, 200])
        return step

    # ---------------------------------------------------------------- faults

    def _abort(self) -> list[Trace]:
        rid, room = self.rng.choice(self.rooms)
        action: Trace = {"rid": rid}
        if self.rng.random() < 0.6:
            action["to"] = [self.rng.choice(["prefill", "decode"])]
        return [{**self._trigger(room), "abort": action}]

    def _disconnect(self) -> list[Trace]:
        rid, room = self.rng.choice(self.rooms)
        return [{**self._trigger(room), "disconnect": {"rid": rid}}]

    def _room(self) -> int | str:
        """A room of some request, as a file has it."""
        room = self.rng.choice(self.rooms)[1]
        return room if room < 1 << 53 else str(room)

    def _message(self, do: str) -> list[Trace]:
        rng = self.rng
        match: Trace = {"room": self._room()}  # a rule that is left over must not meet a probe
        if rng.random() < 0.8:
            match["type"] = rng.choice(MESSAGES)
        rule: Trace = {
            "match": match,
            "nth": rng.choice([1, 1, 2]),
            "times": rng.choice([1, 1, 2, 8]),
            "do": do,
        }
        if do in ("delay", "duplicate"):
            rule["by"] = rng.choice([0.1, 1, 30, 400, 2500])
        return [{**self._trigger(), "message": rule}]

    def _drop(self) -> list[Trace]:
        return self._message("drop")

    def _duplicate(self) -> list[Trace]:
        return self._message("duplicate")

    def _delay(self) -> list[Trace]:
        return self._message("delay")

    def _corrupt(self) -> list[Trace]:
        return self._message("corrupt")

    def _transfer(self, do: str) -> list[Trace]:
        rng = self.rng
        match: Trace = {"room": self._room()}
        rule: Trace = {"match": match, "nth": rng.choice([1, 1, 2]), "times": rng.choice([1, 1, 2]), "do": do}
        if do == "slow":
            rule["by"] = rng.choice([1, 50, 700, 3000])
        return [{"at": 0, "transfer": rule}]

    def _hang(self) -> list[Trace]:
        return self._transfer("hang")

    def _fail(self) -> list[Trace]:
        return self._transfer("fail")

    def _corrupt_part(self) -> list[Trace]:
        return self._transfer("corrupt")

    def _truncate(self) -> list[Trace]:
        return self._transfer("truncate")

    def _slow(self) -> list[Trace]:
        return self._transfer("slow")

    def _inject(self) -> list[Trace]:
        rng = self.rng
        to, sender = rng.choice(
            [(rng.choice(self.ps), rng.choice(self.ds)), (rng.choice(self.ds), rng.choice(self.ps))]
        )
        if rng.random() < 0.2:
            return [
                {**self._trigger(), "inject": {"to": to, "bytes": rng.randbytes(rng.randrange(40)).hex()}}
            ]
        room = rng.choice([*[r for _, r in self.rooms], 77777])
        kind = rng.choice(MESSAGES if rng.random() < 0.1 else TO_P if to in self.ps else TO_D)
        message: Trace = {"type": kind, "room": room if room < 1 << 53 else str(room)}
        for field_, values in CONFUSED.get(kind, {}).items():
            if kind in ("done", "failed") or rng.random() < 0.4:
                message[field_] = rng.choice(values)
        if kind == "hello" and {"digest", "ack_epoch", "fingerprint"} & message.keys():
            message["attempt"] = 1  # no D says so in the name of an attempt that lives
        return [
            {
                **self._trigger(room if room != 77777 else None),
                "inject": {"to": to, "from": sender, "message": message},
            }
        ]

    def _error(self) -> list[Trace]:
        rng = self.rng
        if rng.random() < 0.5:
            action: Trace = {"node": rng.choice(self.ps), "in": rng.choice(["prefill", "gather", "register"])}
        else:
            action = {"node": rng.choice(self.ds), "in": rng.choice(["pull", "scatter", "decode"])}
        return [{"at": self._when(), "error": {**action, "room": self._room()}}]

    def _crash(self) -> list[Trace]:
        rng = self.rng
        name = rng.choice([*self.nodes, "b0"])
        crash = {**self._trigger(), "crash": name}
        if rng.random() < 0.2:  # away from the start, until the registry has forgotten it
            crash = {"at": 0, "crash": name}
        back = {k: v for k, v in crash.items() if k != "crash"}
        gap = rng.choice([0, 1, 40, 700, 2500])
        steps = [crash, {**self._later(back, gap), "restart": name}]
        if name != "b0" and rng.random() < 0.7:  # a new life is heard of when it has something to do
            self.extra += 1
            request = {
                "rid": f"x{self.extra}", "room": 9000 + self.extra, "prompt": 5, "output": 2,
                "prefill": name if name in self.ps else rng.choice(self.ps),
                "decode": name if name in self.ds else rng.choice(self.ds),
            }  # fmt: skip
            steps.append({**self._later(back, gap + rng.choice([0.5, 3, 100])), "request": request})
        return steps

    @staticmethod
    def _later(trigger: Trace, by_ms: float) -> Trace:
        key = "at" if "at" in trigger else "after"
        return {**trigger, key: round(trigger.get(key, 0) + by_ms, 2)}

    def _stop(self) -> list[Trace]:
        rng = self.rng
        return [
            {
                **self._trigger(),
                "stop": {"node": rng.choice(self.nodes), "for": rng.choice([1, 60, 400, 1200, 2500])},
            }
        ]

    def _partition(self) -> list[Trace]:
        rng = self.rng
        pair = [rng.choice(self.ps), rng.choice(self.ds)]
        return [{**self._trigger(), "partition": {"between": pair, "for": rng.choice([5, 100, 900, 2500])}}]

    def _pages(self) -> list[Trace]:
        rng = self.rng
        name = rng.choice(self.ds if rng.random() < 0.8 else self.ps)
        self.short.add(name)
        return [{**self._trigger(), "pages": {"node": name, "free": rng.choice([0, 1, 4])}}]

    def _clock(self) -> list[Trace]:
        rng = self.rng
        return [
            {
                "at": self._when(),
                "clock": {"node": rng.choice(self.nodes), "jump": rng.choice([-(10**7), 10**7])},
            }
        ]

    def _drain(self) -> list[Trace]:
        rng = self.rng
        side = rng.choice([self.ps, self.ds])
        if len(side) < 2 or self.drained:
            return []
        self.drained.add(name := rng.choice(side))
        return [{**self._trigger(), "drain": name}]

    # ---------------------------------------------------------------- healing

    def _heal(self) -> list[Trace]:
        """When every fault is over: all nodes up, all pages back, then one probe through each pair.

        The gap before the probes is what the slowest timer of the settings takes to clear what a fault left.
        """
        s = self.settings
        longest_s = max(s.request_timeout_s, s.transfer_timeout_s + s.graveyard_timeout_s, s.limbo_timeout_s)
        heal = round(self.span_ms + 2700 + s.request_timeout_s * 1000)
        steps: list[Trace] = [
            {"at": heal, "restart": n} for n in [*self.nodes, "b0"] if n not in self.drained
        ]
        steps += [{"at": heal, "pages": {"node": n, "free": None}} for n in sorted(self.short)]
        probe = round(heal + 1000 * longest_s + 2500)
        for i, p in enumerate(self.ps):
            for j, d in enumerate(self.ds):
                if not {p, d} & {*self.drained, self.odd}:
                    n = 10 * i + j
                    request = {
                        "rid": f"probe-{p}-{d}", "room": 500000 + n, "prompt": 5, "output": 2, "prefill": p, "decode": d,
                    }  # fmt: skip
                    steps.append({"at": probe + 20 * n, "request": request})
        return steps


# ---------------------------------------------------------------- running


@dataclass
class Found:
    """What one seed showed. signature: how it failed, as ``shrink`` keeps it; text: for people."""

    seed: int
    digest: str = ""
    signature: list[str] = field(default_factory=list)
    text: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    events: int = 0


def run_seed(seed: int) -> Found:
    """Draw, run, check."""
    from pdjax.sim.replay import run_trace
    from pdjax.sim.shrink import failures

    trace = draw(seed)
    found = Found(seed)
    try:
        result = run_trace(trace)
    except Exception as error:  # the world itself gave up: a finding, and the campaign goes on
        found.signature, found.text = [RAISED], f"{type(error).__name__}: {error}"
        return found
    found.digest = result.digest
    found.signature = failures(trace, result)
    found.text = "; ".join([*map(str, result.violations[:2]), *result.mismatches[:2]])
    found.outcomes.update(o.outcome for o in result.outcomes.values())
    found.moments.update(result.coverage["moments"])
    found.rows.update(result.coverage["rows"])
    found.events = result.events
    return found


@dataclass
class Report:
    """A campaign so far."""

    seeds: int = 0
    seconds: float = 0.0
    failed: list[Found] = field(default_factory=list)
    total: Found = field(default_factory=lambda: Found(-1))

    def add(self, found: Found) -> None:
        self.seeds += 1
        self.total.outcomes += found.outcomes
        self.total.moments += found.moments
        self.total.rows += found.rows
        self.total.events += found.events
        if found.signature:
            self.failed.append(found)

    @property
    def rate(self) -> float:
        return self.seeds / self.seconds if self.seconds else 0.0


def campaign(
    n_seeds: int,
    *,
    first: int = 0,
    jobs: int = 1,
    keep_going: bool = False,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run seeds [first, first + n_seeds). Stops at the first failure unless keep_going."""
    report, began = Report(), time.perf_counter()
    for found in _results(range(first, first + n_seeds), jobs):
        report.add(found)
        report.seconds = time.perf_counter() - began
        progress(report)
        if report.failed and not keep_going:
            break
    return report


def _results(seeds: range, jobs: int) -> Iterator[Found]:
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _quiet) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=8)


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


def summary(report: Report, *, coverage: bool = False) -> str:
    """A campaign in a few lines."""
    total = report.total
    outcomes = ", ".join(f"{n} {name}" for name, n in sorted(total.outcomes.items()))
    text = (
        f"{report.seeds} seeds, {len(report.failed)} failed, {total.events} events, {report.rate:.1f} seeds/s\n"
        f"requests: {outcomes}"
    )
    if not coverage:
        return text
    lines = [text, "moments:"]
    lines += [f"  {total.moments.get(name, 0):6} {name}: {what}" for name, what in MOMENTS.items()]
    missing = [i for i in range(len(transitions.ROWS)) if i not in total.rows]
    lines.append(
        f"rows: {len(transitions.ROWS) - len(missing)} of {len(transitions.ROWS)} reached; not: {missing}"
    )
    return "\n".join(lines)
