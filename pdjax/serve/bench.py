"""``pdjax bench``: its flags, checked and turned into a run of the client in pdjax/bench.

Must never import JAX: the client runs on any machine that reaches the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pdjax.bench.client import Load
from pdjax.bench.dialects import Completions, Dialect, Generate
from pdjax.bench.measures import parse_bounds
from pdjax.bench.report import page, tables
from pdjax.bench.session import session
from pdjax.bench.workload import FIRST_ID, Job, fitted, read_trace, synthetic
from pdjax.core.errors import ConfigError
from pdjax.serve.port_args import arg, check_seconds

APIS = ("generate", "completions")
# What 0 stands for without a trace and a rate; lengths in tokens.
DEFAULT_INPUT, DEFAULT_OUTPUT, DEFAULT_CONCURRENCY = 128, 32, 8


@dataclass(frozen=True)
class BenchArgs:
    """What is asked of which server, and where the figures go."""

    url: str = arg("url", "address of a server or router")
    api: str = arg(
        "api", "how to ask: sglang's /generate with token ids, or OpenAI's completions", "generate", APIS
    )
    model: str = arg("served-model", "model name in OpenAI requests", "default")
    num_requests: int = arg("num-requests", "requests to send; of a trace: at most so many (0: all)", 100)
    concurrency: int = arg(
        "concurrency",
        f"so many at once, each followed by the next (0: {DEFAULT_CONCURRENCY}, or no limit with a rate or a trace)",
        0,
    )
    rate: float = arg("request-rate", "requests a second, at random times (Poisson; 0: by concurrency)", 0.0)
    trace: str = arg(
        "trace", "file of requests in Mooncake's or Azure's format: lengths and times from there", ""
    )
    trace_speed: float = arg("trace-speed", "how many times as fast as recorded", 1.0)
    input_len: int = arg(
        "input-len", f"prompt tokens; of a trace: at most so many (0: {DEFAULT_INPUT}, or as recorded)", 0
    )
    output_len: int = arg(
        "output-len", f"output tokens; of a trace: at most so many (0: {DEFAULT_OUTPUT}, or as recorded)", 0
    )
    spread: float = arg("length-spread", "lengths are drawn from the last part of this size, 0 to 1", 0.0)
    seed: int = arg("seed", "of lengths, prompts and arrivals", 0)
    vocab_size: int = arg("vocab-size", "token ids are drawn below it", 512)
    warmup: int = arg("warmup", "requests sent first and not counted", 1)
    timeout_s: float = arg("timeout", "seconds after which a request has failed", 600.0)
    fresh_connections: bool = arg("fresh-connections", "a new connection for each request", False)
    api_key: str = arg("api-key", "sent as bearer token; in PDJAX_API_KEY it is in no list of processes", "")
    goodput: str = arg(
        "goodput", "bounds in ms, as in: ttft:200 itl:50 e2e:2000; counts the requests that keep them", ""
    )
    json_file: str = arg("json-file", "write the figures there as JSON", "")
    html_file: str = arg("html", "write a page with the curves there", "")

    def check(self) -> None:
        """Raises ConfigError."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {self.url}: give an address such as http://127.0.0.1:30000")
        if self.rate and self.trace:
            raise ConfigError("--request-rate and --trace: the trace says when requests come; leave one out")
        if self.api not in APIS:
            raise ConfigError(f"--api {self.api}: choose one of {', '.join(APIS)}")
        for flag, value, least in (
            ("num-requests", self.num_requests, 0 if self.trace else 1),
            ("concurrency", self.concurrency, 0),
            ("request-rate", self.rate, 0),
            ("input-len", self.input_len, 0),
            ("output-len", self.output_len, 0),
            ("vocab-size", self.vocab_size, FIRST_ID + 1),
            ("warmup", self.warmup, 0),
        ):
            if not value >= least:
                raise ConfigError(f"--{flag} {value}: must be at least {least}")
        if not 0 <= self.spread < 1:
            raise ConfigError(f"--length-spread {self.spread:g}: must be at least 0 and below 1")
        if not self.trace_speed > 0:
            raise ConfigError(f"--trace-speed {self.trace_speed:g}: must be above 0")
        check_seconds("timeout", self.timeout_s)
        for flag, name in (("json-file", self.json_file), ("html", self.html_file)):
            if name and (why := _unwritable(Path(name).absolute())):
                raise ConfigError(f"--{flag} {name}: {why}")

    def jobs(self) -> list[Job]:
        """Raises ConfigError for a trace that cannot be read."""
        if self.trace:
            jobs = read_trace(Path(self.trace), self.num_requests)
            return fitted(jobs, max_input=self.input_len, max_output=self.output_len, speed=self.trace_speed)
        lengths = self.input_len or DEFAULT_INPUT, self.output_len or DEFAULT_OUTPUT
        return synthetic(
            self.num_requests, *lengths, spread=self.spread, rate=self.rate or None, seed=self.seed
        )

    def load(self) -> Load:
        closed = not (self.trace or self.rate)
        concurrency = self.concurrency or (DEFAULT_CONCURRENCY if closed else 0)
        return Load(self.url.rstrip("/"), concurrency, self.timeout_s, self.fresh_connections, self.api_key)

    def dialect(self) -> Dialect:
        if self.api == "generate":
            return Generate(self.vocab_size, self.seed)
        return Completions(self.model, self.seed)


def _unwritable(path: Path) -> str:
    """Why no file can be written there, "" when one can: asked before the run, not when its figures would be lost."""
    if not os.path.isdir(path.parent):
        return "its directory does not exist"
    if os.path.isdir(path):
        return "is a directory; name a file"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "may not be written"


def run_bench(args: BenchArgs, more_bounds: Sequence[str]) -> int:
    """The exit code: 0, 1 when no request succeeded, 130 after SIGINT. Raises ConfigError.

    more_bounds: what follows --goodput as further words.
    """
    args.check()
    bounds = parse_bounds([*args.goodput.split(), *more_bounds])
    jobs = args.jobs()
    console = Console(stderr=True)
    done = asyncio.run(session(args.load(), args.dialect(), jobs, bounds, args.warmup, console))
    Console(file=sys.stdout).print(tables(done.figures))
    for note in done.notes:
        console.print(f"note: {note}", highlight=False)
    told = {**done.figures, "url": args.url, "api": args.api, "seed": args.seed, "notes": done.notes}
    if args.json_file:
        Path(args.json_file).write_text(json.dumps(told, indent=1) + "\n")
    if args.html_file:
        Path(args.html_file).write_text(page(f"pdjax bench {args.url}", told, done.outcomes, done.notes))
    if done.interrupted:
        return 130
    return 0 if done.figures["succeeded"] else 1
