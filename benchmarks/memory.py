"""Bytes that one waiting request costs each side, without its HTTP connection and its prompt (tracemalloc).

All that manager and scheduler keep of it is counted: room record, timers, queues, handles, the request's own object.
One side is dropped whole and the difference is its share, so that nothing has to be attributed by hand.
"""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

from bench_common import Report, finish, parse
from bench_rooms import Crowd, Side

WAITING, QUICK_WAITING = 10_000, 200
GOAL_BYTES = 4096
MOST_LINES = 12


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def drop(side: Side) -> None:
    """Forget everything of this side; its channel stays, the other side sends into it."""
    del side.manager, side.scheduler


def measure(n: int) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Bytes a request for each side, and the lines that allocate the most of both together."""
    crowd = Crowd()
    tracemalloc.start()
    empty = traced_bytes()
    crowd.fill(n)
    assert crowd.waiting == n - 1
    both = traced_bytes()
    lines = [
        (f"{Path(line.traceback[0].filename).name}:{line.traceback[0].lineno}", line.size / n)
        for line in tracemalloc.take_snapshot().statistics("lineno")[:MOST_LINES]
    ]
    drop(crowd.p)
    only_d = traced_bytes()
    drop(crowd.d)
    none = traced_bytes()
    tracemalloc.stop()
    assert none <= empty + 64 * n, "something outlives its side: the shares below would be wrong"
    return {"P": (both - only_d) / n, "D": (only_d - none) / n}, lines


def main() -> None:
    args = parse(__doc__)
    n = QUICK_WAITING if args.quick else WAITING
    sides, lines = measure(n)
    report = Report("memory", args.quick)
    report.table("bytes a waiting request, both sides, by line", ("line", "bytes"), lines)
    for side, n_bytes in sides.items():
        report.add(f"a waiting request on {side}", n_bytes, "bytes", f"{n:,} waiting", GOAL_BYTES)
    finish(report, args)


if __name__ == "__main__":
    main()
