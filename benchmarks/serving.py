"""Time to first token and between tokens, PD against an ordinary server, at 1, 4 and 16 requests at once; start-up time.

SmolLM2 where it was fetched (`pdjax fetch smollm2`), else the tiny model. One deployment holds P, D, an ordinary server
and the rust router; the ways take turns, one run each a round. Every request has a connection of its own: kept-alive
ones add a fixed 40 ms through the rust router (facts/router §7). All processes share this machine's cores, so PD can
show its overhead here, never its gain.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable

from bench_common import Report, finish, model_name, parse
from bench_fleet import QUICK_SIZES, PairRun, TimedFleet

from pdjax.bench.client import Load, Outcome, Run
from pdjax.bench.dialects import Generate
from pdjax.bench.workload import Job, synthetic
from pdjax.serve.local import Plan

CONCURRENT, QUICK_CONCURRENT = (1, 4, 16), (1, 2)
ROUNDS, QUICK_ROUNDS = 3, 1
LENGTHS, QUICK_LENGTHS = (96, 12), (12, 3)  # tokens in and out
SIZES = ("--context-length", "128", "--num-pages", "200", "--chunked-prefill-size", "128")
TIMEOUT_S = 300.0
PLAIN, PAIR, ROUTED = "ordinary server", "PD, no router", "PD, rust router"


def measure(run: Run, jobs: list[Job]) -> list[Outcome]:
    asyncio.run(run.go(jobs))
    for outcome in run.outcomes:
        assert not outcome.error, f"{outcome.error}: {outcome.detail}"
    return run.outcomes


def ways(fleet: TimedFleet, concurrency: int, seed: int) -> dict[str, Callable[[], Run]]:
    """Way → a run of it. No prompt is sent twice: two ways share P, and its cache of prefixes would help the second."""
    for_plain, for_pair, for_routed = (Generate(512, 3 * seed + i) for i in range(3))

    def load(name: str) -> Load:
        return Load(fleet.addresses[name], concurrency, TIMEOUT_S, fresh_connections=True)

    def pair() -> Run:
        run = PairRun(load("decode-0"), for_pair)
        run.legs = fleet.legs
        return run

    return {
        PLAIN: lambda: Run(load("plain-0"), for_plain),
        PAIR: pair,
        ROUTED: lambda: Run(load("router"), for_routed),
    }


def rounds(
    fleet: TimedFleet, concurrent: tuple[int, ...], n_rounds: int, lengths: tuple[int, int]
) -> dict[tuple[int, str], list[Outcome]]:
    """(requests at once, way) → outcomes. The first round warms up and is not counted."""
    taken: dict[tuple[int, str], list[Outcome]] = defaultdict(list)
    for i in range(n_rounds + 1):
        for n in concurrent:
            jobs = synthetic(max(n, 2), *lengths, seed=i)
            for way, make in ways(fleet, n, 100 * i + n).items():
                outcomes = measure(make(), jobs)
                if i:
                    taken[n, way] += outcomes
    return taken


def summarise(
    report: Report, model: str, lengths: tuple[int, int], taken: dict[tuple[int, str], list[Outcome]]
) -> None:
    def ttft_ms(outcomes: list[Outcome]) -> float:
        return statistics.median(o.ttft_s for o in outcomes) * 1e3

    def itl_ms(outcomes: list[Outcome]) -> float:
        return statistics.median(o.itl_s for o in outcomes) * 1e3

    report.table(
        f"{model}, {lengths[0]} tokens in, {lengths[1]} out: medians in ms",
        ("at once", "way", "requests", "TTFT", "between tokens", "end to end"),
        [
            (n, way, len(o), ttft_ms(o), itl_ms(o), statistics.median(x.e2e_s for x in o) * 1e3)
            for (n, way), o in taken.items()
        ],
    )
    for n in dict.fromkeys(n for n, _ in taken):
        plain, pair = taken[n, PLAIN], taken[n, PAIR]
        for name, of in (("TTFT", ttft_ms), ("between tokens", itl_ms)):
            beside = f"PD {of(pair):.4g} ms, ordinary server {of(plain):.4g} ms"
            report.add(f"{name}, {n} at once, PD / ordinary server", of(pair) / of(plain), "×", beside)


def main() -> None:
    args = parse(__doc__)
    model = model_name(args.quick)
    quick = args.quick
    lengths = QUICK_LENGTHS if quick else LENGTHS
    report = Report("serving", quick)
    with TimedFleet(Plan(model, plain=1, router="rust", extra=QUICK_SIZES if quick else SIZES)) as fleet:
        fleet.start()
        concurrent, n_rounds = (QUICK_CONCURRENT, QUICK_ROUNDS) if quick else (CONCURRENT, ROUNDS)
        taken = rounds(fleet, concurrent, n_rounds, lengths)
    summarise(report, model, lengths, taken)
    report.table(f"start-up, {model}, all at once", ("process", "seconds"), list(fleet.ready_s.items()))
    report.add(
        "start-up of registry, P, D, ordinary server and router together",
        fleet.ready_s["all, with peers found"],
        "s",
        "programs compiled before are kept on disk",
    )
    finish(report, args)


if __name__ == "__main__":
    main()
