"""Time of a turn of the driver and of a step of the scheduler, with 10, 1,000 and 10,000 requests that wait.

Both are the real ones over ports in memory (bench_rooms). Nothing in a turn may look at every room that waits: the
crowds take turns in the same run, and the figure is the ratio to the crowd of ten.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from bench_common import Report, finish, parse
from bench_rooms import Crowd

SIZES = (10, 1_000, 10_000)
QUICK = (2, 20)
ROUNDS, QUICK_ROUNDS = 400, 20
GOAL = 1.5


class Watch:
    """Takes the time of each named call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        self.seconds[name].append(time.perf_counter() - began)


def measure(sizes: tuple[int, ...], rounds: int) -> dict[int, dict[str, float]]:
    """Crowd size → what → median seconds."""
    crowds = {n: Crowd() for n in sizes}
    for n, crowd in crowds.items():
        crowd.fill(n)
        assert crowd.waiting == n - 1, "one is on its way, the others wait"
    watches = {n: Watch() for n in sizes}
    gc.collect()
    gc.disable()  # a collection walks every object of all crowds, and falls on whoever allocates next
    for _ in range(rounds):
        for n, crowd in crowds.items():
            crowd.beat(watches[n])
            crowd.come_and_go(watches[n])
            crowd.release(watches[n])
    gc.enable()
    return {
        n: {what: statistics.median(s) for what, s in watch.seconds.items()} for n, watch in watches.items()
    }


def main() -> None:
    args = parse(__doc__)
    sizes = QUICK if args.quick else SIZES
    taken = measure(sizes, QUICK_ROUNDS if args.quick else ROUNDS)
    report = Report("turn_time", args.quick)
    few, most = sizes[0], sizes[-1]
    report.table(
        "median microseconds of a turn or a step",
        ("what", *(f"{n:,} wait" for n in sizes), f"{most:,} / {few}"),
        [
            (what, *(taken[n][what] * 1e6 for n in sizes), taken[most][what] / taken[few][what])
            for what in taken[few]
        ],
    )
    for part in ("driver", "scheduler"):
        total = {n: sum(s for what, s in taken[n].items() if f"'s {part}:" in what) for n in (few, most)}
        report.add(
            f"{part}, all of the above, {most:,} waiting",
            total[most] / total[few],
            f"× that with {few}",
            f"{total[few] * 1e6:.0f} µs with {few}",
            None if args.quick else GOAL,
        )
    finish(report, args)


if __name__ == "__main__":
    main()
