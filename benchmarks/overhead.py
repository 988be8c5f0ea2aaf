"""What event logging, digests and the key of the side channel cost: each alone, and all together in a hand-off.

Alone: the work of one hand-off of a prompt, with and without it, taking turns. Together: two deployments of real
processes on the tiny model, one with all of it and one with none, get the same requests in turns; the figure is the
ratio of their medians.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
from bench_common import Report, finish, median_ms, parse
from bench_fleet import QUICK_SIZES, TimedFleet

from pdjax.core import wire
from pdjax.core.pools import Manifest, Part, request_digest
from pdjax.core.room import Transition
from pdjax.core.trace import EventLog
from pdjax.core.transitions import LETTERS, SENDER
from pdjax.engine.kernels.checksum import checksum
from pdjax.serve.local import Plan

ROUNDS, QUICK_ROUNDS = 300, 5
REQUESTS, QUICK_REQUESTS, WARM = 200, 3, 5
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 256, 12
KV_BYTES = (
    8 << 20
)  # of a prompt of some hundred tokens of a small model: 0.7 MB to 30 MB in docs/performance.md
N_PARTS = 8
SIZES = ("--num-pages", "512", "--context-length", "512", "--disable-radix-cache")
FRAMES = 6  # of one hand-off, both ways: hello, pending, hello, ready, done, done_ack
LINES = 48  # of one hand-off, in both event logs together
SECRET = b"k" * 64


def frame() -> wire.Frame:
    """A ``ready``: the longest message of a hand-off."""
    part = Part(
        0, 0, 0, 0, 1, 0, 16, (1, 16, 16, 2, 64), "float32", KV_BYTES // N_PARTS, checksum=(1 << 63) + 1
    )
    manifest = Manifest(1 << 60, "10.0.0.1:31001", 256, 16, 16, "f" * 32, "d" * 32, (part,) * N_PARTS)
    ready = wire.Ready(
        room=(1 << 62) + 1, attempt=1 << 60, manifest=manifest, lease_s=15.0, first=wire.FirstToken(5, -0.5)
    )
    return wire.Frame("prefill-0", 1 << 62, 1 << 40, 1 << 39, 1 << 61, 1000, (ready,))


def there_and_back(secret: bytes) -> Callable[[], object]:
    one = frame()

    def run() -> None:
        for _ in range(FRAMES):
            assert isinstance(wire.decode(wire.encode(one, secret), secret), wire.Frame)

    return run


def logging_to(path: Path | None) -> Callable[[], object]:
    """The lines of one hand-off; without a path the log is off."""
    write = None if path is None else path.open("ab", buffering=0).write
    log = EventLog("prefill-0", 1 << 62, time.monotonic, write)
    moved = Transition(
        role=SENDER, room=(1 << 62) + 1, attempt=1 << 60, source=LETTERS["B"], target=LETTERS["B"], event="hello",
        row=3, kind="row", effects=("say_pending",),
    )  # fmt: skip

    def run() -> None:
        for _ in range(LINES):
            log.transition(moved, {"peer": "decode-0", "peer_epoch": "4611686018427387904"})

    return run


def alone(report: Report, rounds: int, directory: Path) -> None:
    """Each part of the overhead by itself, a round of each after the other."""
    prompt, arrays = list(range(PROMPT_TOKENS)), np.random.default_rng(0).bytes(KV_BYTES)
    parts = np.frombuffer(arrays, np.uint8).reshape(N_PARTS, -1)
    work: dict[str, Callable[[], object]] = {
        f"{FRAMES} frames, checksum only": there_and_back(b""),
        f"{FRAMES} frames, keyed": there_and_back(SECRET),
        f"{LINES} event lines, log off": logging_to(None),
        f"{LINES} event lines, to a file": logging_to(directory / "lines.ndjson"),
        f"digest of {PROMPT_TOKENS} prompt tokens, both sides": lambda: [
            request_digest(prompt, {"temperature": 0.0}) for _ in range(2)
        ],
        f"checksums of {KV_BYTES >> 20} MB, one side": lambda: [checksum(part) for part in parts],
        f"a copy of {KV_BYTES >> 20} MB": parts.copy,
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, call in work.items():
            began = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - began)
    report.table(
        "milliseconds of one hand-off's share",
        ("what", "p50", "fastest"),
        [(name, median_ms(seconds), min(seconds) * 1e3) for name, seconds in taken.items()],
    )
    names = list(work)
    median = {name: median_ms(taken[name]) for name in names}
    report.add(
        "key of the side channel, one hand-off", median[names[1]], "ms", f"unkeyed {median[names[0]]:.3g} ms"
    )
    report.add("event log, one hand-off", median[names[3]], "ms", f"off {median[names[2]]:.2g} ms")
    report.add("digest of a prompt, both sides", median[names[4]], "ms")
    report.add(names[5], median[names[5]], "ms", f"{names[6]} {median[names[6]]:.3g} ms")


def ask(http: httpx.Client, fleet: TimedFleet, prompt: list[int], rng: random.Random) -> float:
    """Seconds of one request, both halves."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
        **fleet.legs.fields(rng),
    }
    began = time.perf_counter()
    decode = fleet.addresses["decode-0"]
    with http.stream("POST", f"{decode}/generate", json={**body, "stream": True}) as answer:
        http.post(f"{fleet.legs.prefill_url}/generate", json=body).raise_for_status()
        answer.raise_for_status()
        assert '"error"' not in answer.read().decode()
    return time.perf_counter() - began


def together(report: Report, quick: bool, directory: Path) -> None:
    sizes = QUICK_SIZES if quick else SIZES
    secret = directory / "secret"
    secret.write_bytes(SECRET)
    logs = directory / "logs"
    logs.mkdir()
    all_on = ("--disaggregation-trace", str(logs), "--disaggregation-secret-file", str(secret))
    plans = {
        "none of it": Plan("tiny", router="none", extra=("--disaggregation-verify", "off", *sizes)),
        "all of it": Plan("tiny", router="none", extra=("--disaggregation-verify", "all", *all_on, *sizes)),
    }
    rng, taken = random.Random(7), defaultdict(list)
    n = QUICK_REQUESTS if quick else REQUESTS
    with ExitStack() as held:
        http = held.enter_context(httpx.Client(trust_env=False, timeout=60.0))
        fleets = {name: held.enter_context(TimedFleet(plan)) for name, plan in plans.items()}
        for fleet in fleets.values():
            fleet.start()
        for i in range(n + WARM):
            prompt = [rng.randrange(3, 500) for _ in range(QUICK_PROMPT_TOKENS if quick else PROMPT_TOKENS)]
            for name in sorted(fleets, reverse=i % 2 == 0):
                seconds = ask(http, fleets[name], prompt, rng)
                if i >= WARM:
                    taken[name].append(seconds)
    report.table(
        f"milliseconds of a request with two output tokens, {n} of each",
        ("deployment", "p50", "fastest"),
        [(name, median_ms(seconds), min(seconds) * 1e3) for name, seconds in taken.items()],
    )
    lines = sum(len(file.read_bytes().splitlines()) for file in logs.glob("*.ndjson"))
    report.notes.append(f"{lines / (n + WARM):.1f} event lines for each request, P and D together")
    bare = median_ms(taken["none of it"])
    report.add(
        "a request with all of it / with none", median_ms(taken["all of it"]) / bare, "×", f"{bare:.3g} ms"
    )


def main() -> None:
    args = parse(__doc__)
    report = Report("overhead", args.quick)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        alone(report, QUICK_ROUNDS if args.quick else ROUNDS, directory)
        together(report, args.quick, directory)
    finish(report, args)


if __name__ == "__main__":
    main()
