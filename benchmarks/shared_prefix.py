"""TTFT of a prompt whose first 1,000 tokens were served before, beside the same prompt on an empty prefix cache.

Cold and warm requests take turns, through the mini router to one pair and straight to a server without PD. A request
asks for one token, so its whole latency is its time to first token.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from functools import partial

import httpx
from bench_common import Report, finish, parse

from pdjax.serve.local import Fleet, Plan

SHARED, OWN = 1000, 24  # tokens
SIZES = ("--context-length", "1152", "--num-pages", "512")
ROUNDS, QUICK_ROUNDS = 9, 2
PAGE_TOKENS = 16  # the default of --page-size
FLUSH_WAIT_S = 60.0
WHERE = {"PD": ("router", "prefill-0"), "one server": ("plain-0", "plain-0")}


class Asker:
    """One client. Prompts are the shared tokens and some that no other prompt has."""

    def __init__(self, fleet: Fleet, seed: int = 1) -> None:
        self.urls = fleet.addresses
        self.http = httpx.Client(trust_env=False, timeout=600.0)
        self.rng = random.Random(seed)
        self.shared = self.tokens(SHARED)

    def tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(3, 500) for _ in range(n)]

    def flush(self, name: str) -> None:
        params = {"timeout": FLUSH_WAIT_S}
        self.http.post(f"{self.urls[name]}/flush_cache", params=params).raise_for_status()

    def ask(self, name: str) -> tuple[float, int]:
        """(seconds to the first token, prompt tokens from the cache)."""
        body = {
            "input_ids": [*self.shared, *self.tokens(OWN)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        began = time.perf_counter()
        answer = self.http.post(f"{self.urls[name]}/generate", json=body)
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        return seconds, answer.json()["meta_info"]["cached_tokens"]


def measure(asker: Asker, rounds: int) -> dict[tuple[str, str], list[float]]:
    """(where, cold or warm) → seconds."""
    taken: dict[tuple[str, str], list[float]] = {}
    whole_pages = SHARED // PAGE_TOKENS * PAGE_TOKENS
    for i in range(rounds + 1):  # the first is a warm-up
        for where, (front, computes) in WHERE.items():
            asker.flush(computes)
            for how, expected in (("cold", 0), ("warm", whole_pages)):
                seconds, cached = asker.ask(front)
                assert cached == expected, f"{where}, {how}: {cached} tokens were cached"
                if i:
                    taken.setdefault((where, how), []).append(seconds)
    return taken


def main() -> None:
    args = parse(__doc__)
    plan = Plan("tiny" if args.quick else "smollm2", plain=1, router="mini", extra=SIZES)
    with Fleet(plan, forward=partial(print, file=sys.stderr)) as fleet:
        fleet.start()
        taken = measure(Asker(fleet), QUICK_ROUNDS if args.quick else ROUNDS)
    report = Report("shared_prefix", args.quick)
    report.table(
        f"TTFT of {SHARED} shared and {OWN} own tokens, ms",
        ("where", "prefix", "median", "fastest", "slowest"),
        [(*key, statistics.median(s) * 1e3, min(s) * 1e3, max(s) * 1e3) for key, s in taken.items()],
    )
    for where in WHERE:
        cold, warm = (statistics.median(taken[where, how]) for how in ("cold", "warm"))
        report.add(
            f"{where}: TTFT, warm",
            warm / cold,
            "× cold",
            f"cold {cold * 1e3:.0f} ms, warm {warm * 1e3:.0f} ms",
        )
    finish(report, args)


if __name__ == "__main__":
    main()
