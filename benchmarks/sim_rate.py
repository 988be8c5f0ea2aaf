"""Worlds and events of ``sim fuzz`` per second of one core, beside a bare simpy loop of as many events, and a profile.

Rates are of CPU seconds, so that a busy machine disturbs them less. Rounds alternate between worlds, simpy and our own
loop with nothing in it. The profile samples the process by its CPU time, and a sample belongs to the innermost module of ours
that was at work: what a library does for it is its own.
"""

from __future__ import annotations

import gc
import logging
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType

import simpy
from bench_common import Report, finish, parse

from pdjax.sim import fuzz
from pdjax.sim.loop import Loop

ROUNDS, WORLDS = 5, 60  # worlds of each round; seeds are those of ``sim fuzz``
QUICK_ROUNDS, QUICK_WORLDS = 1, 3
PROFILED, QUICK_PROFILED = 200, 3
SAMPLE_S = 0.002
GOAL_MS = 20.0  # of one world: 50 in a second
GAPS = tuple(
    1.0 + i / 16 for i in range(8)
)  # of the bare loops: about as many sources of events as a world has

# Module (below pdjax/) → group; the first prefix that fits.
GROUPS = (
    ("sim/properties/", "properties"),
    ("core/conform", "the log against the table"),
    ("core/trace", "event log"),
    ("core/wire", "frames"),
    ("core/link", "frames"),
    ("core/", "core: table, rooms, messages"),
    ("engine/bootstrap/", "network, transport, registry"),
    ("engine/", "manager and driver"),
    ("sched/", "schedulers"),
    ("sim/net", "network, transport, registry"),
    ("sim/transport", "network, transport, registry"),
    ("sim/membership", "network, transport, registry"),
    ("sim/runner", "simulated device"),
    ("sim/loop", "loop and clock"),
    ("sim/ports", "loop and clock"),
    ("sim/world", "world and nodes"),
    ("sim/node", "world and nodes"),
    ("sim/router", "router, faults, files"),
    ("sim/", "router, faults, files"),
)
ELSEWHERE = "elsewhere"


def group_of(filename: str) -> str | None:
    """The group of a source file; None: it is not ours."""
    _, found, module = filename.rpartition("/pdjax/")
    return next((group for prefix, group in GROUPS if found and module.startswith(prefix)), None)


class Profile:
    """Counts where the process is, each SAMPLE_S of its CPU time. Main thread only."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()

    def _sample(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            group = group_of(frame.f_code.co_filename)
            if group is not None:
                self.samples[group] += 1
                return
            frame = frame.f_back
        self.samples[ELSEWHERE] += 1

    def of(self, work: Callable[[], object]) -> None:
        before = signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        try:
            work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


def cpu_s(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def bare_simpy(n_events: int) -> None:
    """n_events timeouts of a few processes, and nothing that they do."""
    env = simpy.Environment()

    def source(n: int, gap: float) -> simpy.events.ProcessGenerator:
        for _ in range(n):
            yield env.timeout(gap)

    for i, gap in enumerate(GAPS):
        env.process(source(n_events // len(GAPS) + (i < n_events % len(GAPS)), gap))
    env.run()


def bare_loop(n_events: int) -> None:
    """The same through the loop of the simulator, every tie drawn and recorded."""
    loop = Loop(seed=1)

    def source(n: int, gap: float) -> None:
        if n:
            loop.after(gap, lambda: source(n - 1, gap))

    for i, gap in enumerate(GAPS):
        source(n_events // len(GAPS) + (i < n_events % len(GAPS)), gap)
    while loop.step():
        pass
    assert loop.n_events == n_events


def measure(report: Report, rounds: int, worlds: int) -> None:
    world_ms, rates, simpy_rates, loop_rates, n_events = [], [], [], [], 0
    wall_s = 0.0
    for i in range(rounds):
        done = fuzz.Report()

        def run(first: int = i * worlds) -> None:
            nonlocal done
            done = fuzz.campaign(worlds, first=first, keep_going=True)

        began = time.perf_counter()
        spent_s = cpu_s(run)
        wall_s += time.perf_counter() - began
        events = done.total.events
        assert not done.failed, done.failed[0].text
        n_events += events
        world_ms.append(spent_s / worlds * 1e3)
        rates.append(events / spent_s)
        simpy_rates.append(events / cpu_s(lambda n=events: bare_simpy(n)))
        loop_rates.append(events / cpu_s(lambda n=events: bare_loop(n)))
    ms = statistics.median(world_ms)
    report.add("one world, every property checked", ms, "ms of one core", goal=GOAL_MS)
    report.add(
        "worlds", 1e3 / ms, "/s of one core", f"{rounds * worlds / wall_s:.1f}/s by the clock on the wall"
    )
    report.add("events of a world", n_events / (rounds * worlds), "")
    rate = statistics.median(rates)
    bare = statistics.median(simpy_rates)
    report.add("events in worlds", rate, "/s", f"simpy, nothing done: {bare:,.0f}/s")
    report.add("events in our bare loop", statistics.median(loop_rates), "/s", f"simpy: {bare:,.0f}/s")
    report.add("an event of a world, in events of simpy", bare / rate, "×")


def profile(report: Report, worlds: int) -> None:
    sampler = Profile()
    sampler.of(lambda: fuzz.campaign(worlds, keep_going=True))
    total = sum(sampler.samples.values()) or 1
    report.table(
        "where the time goes (share of CPU samples, by the innermost module of ours)",
        ("part", "%"),
        [(name, f"{n / total:.1%}") for name, n in sampler.samples.most_common()],
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(__doc__, argv)
    logging.disable(logging.CRITICAL)
    report = Report("sim_rate", args.quick)
    fuzz.campaign(QUICK_WORLDS)  # warm: imports, caches
    measure(report, QUICK_ROUNDS if args.quick else ROUNDS, QUICK_WORLDS if args.quick else WORLDS)
    profile(report, QUICK_PROFILED if args.quick else PROFILED)
    finish(report, args)


if __name__ == "__main__":
    main(sys.argv[1:])
