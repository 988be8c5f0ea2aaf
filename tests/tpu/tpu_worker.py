"""One process of the suite, which owns the chips that its environment shows it.

``--describe`` prints the hardware; ``--offer IP:PORT`` is the other end of the transfer check (on a second host it is
started by hand); ``--checks a,b`` runs checks and prints a JSON line for each figure and each check that passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tpu_sizes import BY_NAME

# Check → its module and function. Loaded on demand: the other end of a transfer needs no kernels.
CHECKS = {
    "pages-exact": ("tpu_pages", "exact"),
    "pages-rate": ("tpu_pages", "rate"),
    "depth-sweep": ("tpu_pages", "depth_sweep"),
    "staging-rate": ("tpu_staging", "rate"),
    "transfer": ("tpu_transfer", "rate"),
}


def say(kind: str, /, **what: Any) -> None:
    print(json.dumps({kind: what}), flush=True)


def run(names: list[str], sizes: str, peer: str) -> None:
    """Run the checks in their order. One that raises ends the process: the suite goes on with the next in a fresh one."""
    from tpu_bench import Bench
    from tpu_hardware import of_this_process

    hardware = of_this_process()
    say("hardware", **dataclasses.asdict(hardware))
    bench = Bench(
        hardware, BY_NAME[sizes], lambda figure: say("figure", **dataclasses.asdict(figure)), peer=peer
    )
    for bench.check in names:
        began = time.monotonic()
        module, function = CHECKS[bench.check]
        getattr(importlib.import_module(module), function)(bench)
        say("passed", check=bench.check, seconds=time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--offer", metavar="IP:PORT")
    parser.add_argument("--checks", default="")
    parser.add_argument("--sizes", choices=list(BY_NAME), default="full")
    parser.add_argument("--peer", default="")
    args = parser.parse_args()
    if args.describe:
        from tpu_hardware import describe

        print(describe())
    elif args.offer:
        from tpu_transfer import serve_offers

        serve_offers(args.offer)
    else:
        run(args.checks.split(","), args.sizes, args.peer)


if __name__ == "__main__":
    main()
