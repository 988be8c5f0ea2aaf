"""One process of the suite, which owns the chips that its environment shows it.

``--describe`` prints the hardware; ``--offer IP:PORT`` is the other end of the transfer check (on a second host it is
started by hand); ``--check NAME`` runs a check and prints a JSON line for each figure and for its success. A worker of the
suite also gets ``--end-with-stdin``: it must never keep its chips when the suite is gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tpu_sizes import BY_NAME

from pdjax.core.errors import ConfigError

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


def end_with_stdin() -> None:
    """Ends this process, wherever it is, when its stdin does."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would be held at this process's own end
            pass
        os._exit(1)

    threading.Thread(target=wait, name="end-with-stdin", daemon=True).start()


def run(check: str, sizes: str, peer: str) -> None:
    """Run one check. One that raises ends the process: the suite goes on with the next in a fresh one."""
    from tpu_bench import Bench
    from tpu_hardware import of_this_process

    hardware = of_this_process()
    say("hardware", **dataclasses.asdict(hardware))
    bench = Bench(
        hardware, BY_NAME[sizes], lambda figure: say("figure", **dataclasses.asdict(figure)), check, peer
    )
    began = time.monotonic()
    module, function = CHECKS[check]
    getattr(importlib.import_module(module), function)(bench)
    say("passed", check=check, seconds=time.monotonic() - began)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser()
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--describe", action="store_true")
    what.add_argument("--offer", metavar="IP:PORT")
    what.add_argument("--check", choices=list(CHECKS))
    parser.add_argument("--sizes", choices=list(BY_NAME), default="full")
    parser.add_argument("--peer", default="")
    parser.add_argument("--end-with-stdin", action="store_true")
    args = parser.parse_args()
    if args.end_with_stdin:
        end_with_stdin()
    if args.describe:
        from tpu_hardware import describe

        print(describe())
    elif args.offer is not None:
        from tpu_transfer import serve_offers

        try:
            serve_offers(args.offer)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    else:
        run(args.check, args.sizes, args.peer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
