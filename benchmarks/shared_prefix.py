"""Time to first token of a prompt whose first 1,000 tokens were served before, beside the same on an empty prefix cache.

SmolLM2 where it was fetched (`pdjax fetch smollm2`), else the tiny model. Scheduler and model alone, in this process: what
HTTP and a hand-off add is the same in both cases (serving.py and handoff.py have it). Cold and warm prompts take turns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict

from bench_common import Report, finish, model_name, parse

from pdjax.model.fetch import resolve_model
from pdjax.model.runner import JaxRunner
from pdjax.model.settings import RunnerSettings
from pdjax.sched.factory import make_scheduler
from pdjax.sched.request import Output, Request, SamplingParams
from pdjax.sched.scheduler import SchedulerConfig

SHARED, QUICK_SHARED, OWN = 1000, 40, 24  # tokens
ROUNDS, QUICK_ROUNDS = 9, 2
PAGE_TOKENS, CHUNK_TOKENS = 16, 512
COLD, WARM = "nothing cached", "shared tokens cached"


class Server:
    """One scheduler and its model. Prompts are the shared tokens and some that no other prompt has."""

    def __init__(self, model: str, n_shared: int, seed: int = 1) -> None:
        context = n_shared + OWN + PAGE_TOKENS
        settings = RunnerSettings(
            num_pages=2 * context // PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            max_batch=1,
            chunk_tokens=min(CHUNK_TOKENS, context),
            context_tokens=context,
        )
        runner = JaxRunner.from_directory(resolve_model(model), settings)
        config = SchedulerConfig(context, chunked_prefill_size=runner.buckets.chunk_tokens)
        self.scheduler = make_scheduler("null", config, runner, time.perf_counter)
        self.rng = random.Random(seed)
        self.shared = self._tokens(n_shared)

    def _tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(3, 500) for _ in range(n)]

    def _run(self) -> None:
        while self.scheduler.step():
            pass

    def flush(self) -> None:
        told: list[bool] = []
        self.scheduler.flush_cache(0.0, told.append)
        self._run()
        assert told == [True], "no request is here"

    def first_token_s(self, n_cached: int) -> float:
        """Serve a prompt that finds n_cached tokens; seconds to its first token."""
        outputs: list[Output] = []
        request = Request("r", [*self.shared, *self._tokens(OWN)], SamplingParams(1), outputs.append)
        self.scheduler.submit(request)
        self._run()
        assert outputs and outputs[-1].failure is None, outputs
        assert request.cached_tokens == n_cached, f"{request.cached_tokens} tokens were cached"
        times = request.times
        assert times.first_token is not None
        return times.first_token - times.arrived


def measure(server: Server, rounds: int) -> dict[str, list[float]]:
    """Cold or warm → seconds. The first round compiles and is not counted."""
    taken: dict[str, list[float]] = defaultdict(list)
    whole_pages = len(server.shared) // PAGE_TOKENS * PAGE_TOKENS
    for i in range(rounds + 1):
        server.flush()
        for how, n_cached in ((COLD, 0), (WARM, whole_pages)):
            seconds = server.first_token_s(n_cached)
            if i:
                taken[how].append(seconds)
    return taken


def main() -> None:
    args = parse(__doc__)
    model, n_shared = model_name(args.quick), QUICK_SHARED if args.quick else SHARED
    taken = measure(Server(model, n_shared), QUICK_ROUNDS if args.quick else ROUNDS)
    report = Report("shared_prefix", args.quick)
    report.table(
        f"{model}: TTFT of {n_shared:,} shared and {OWN} own tokens, ms",
        ("prefix cache", "prompts", "median", "fastest", "slowest"),
        [(how, len(s), statistics.median(s) * 1e3, min(s) * 1e3, max(s) * 1e3) for how, s in taken.items()],
    )
    cold, warm = (statistics.median(taken[how]) for how in (COLD, WARM))
    beside = f"cold {cold * 1e3:.4g} ms, warm {warm * 1e3:.4g} ms"
    report.add(f"TTFT of {n_shared:,} shared tokens, warm / cold", warm / cold, "×", beside)
    finish(report, args)


if __name__ == "__main__":
    main()
