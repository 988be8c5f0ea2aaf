"""Every benchmark, one after the other, and one summary of their figures (`make bench`).

Each runs in a process of its own, as it does alone. The summary and the JSON of all figures are written even when one
of them fails; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_common import machine, make_table
from rich.console import Console

BENCHMARKS = (
    "pages",
    "kernels",
    "handoff",
    "turn_time",
    "memory",
    "registry",
    "overhead",
    "shared_prefix",
    "serving",
    "sim_rate",
)
LIMIT_S = 900.0  # of one benchmark
END_S = 60.0  # for one that is late to end what it has started
HERE = Path(__file__).parent


def run_one(name: str, out: Path, quick: bool) -> dict[str, Any] | None:
    """The figures of one benchmark, or None when it failed."""
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file), *(["--quick"] if quick else [])]
    began = time.monotonic()
    with subprocess.Popen(command) as process:
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = _interrupted(process)
    took_s = time.monotonic() - began
    if code != 0 or not file.exists():
        print(f"{name}: failed with code {code} after {took_s:.0f} s", file=sys.stderr, flush=True)
        return None
    return {**json.loads(file.read_text()), "seconds": took_s}


def _interrupted(process: subprocess.Popen[bytes]) -> int:
    """End a benchmark that is late, with time to end the processes that it started."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(END_S) or 1
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that they work, measures nothing"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="directory of the JSON files")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)} (default: all)"
    )
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}")
    args.out.mkdir(parents=True, exist_ok=True)
    done = {name: run_one(name, args.out, args.quick) for name in args.names or BENCHMARKS}
    summary = {"machine": machine(), "quick": args.quick, "benchmarks": done}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    rows = []
    for name, told in done.items():
        if told is None:
            rows.append((name, "FAILED", "", "", ""))
            continue
        for figure in told["figures"]:
            goal = "" if figure["goal"] is None else f"≤ {figure['goal']:g}"
            verdict = {None: "", True: "met", False: "MISSED"}[figure["met"]]
            rows.append(
                (
                    figure["name"],
                    f"{figure['value']:,.4g} {figure['unit']}",
                    figure["baseline"],
                    goal,
                    verdict,
                )
            )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(make_table("all figures", ("figure", "value", "baseline", "goal", ""), rows))
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return int(any(told is None for told in done.values()))


if __name__ == "__main__":
    sys.exit(main())
