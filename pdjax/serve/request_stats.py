"""What the requests of one server have cost their clients: latencies and tokens, counted as outputs pass.

Lives on the event loop, as the calls do; a scrape reads it there too. Must never keep anything of a single request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from pdjax.core.tally import Histogram
from pdjax.serve.phases import PHASES

# Bounds in seconds: fine where a server on one chip is, and up to the router's patience.
FIRST_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
    60.0,
    120.0,
    300.0,
)
BETWEEN_TOKENS_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.8, 1.6, 4.0),
)
WHOLE_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
PHASE_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
WINDOW_S = 10  # generated tokens of the last whole seconds make the throughput


class RequestStats:
    """clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_S)
        self.whole_s = Histogram(WHOLE_S)
        self.phase_s = {name: Histogram(PHASE_S) for name in PHASES}
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.finished = self.aborted = 0
        self.failures: Counter[str] = Counter()
        self._seconds = [(-1, 0)] * (WINDOW_S + 1)  # (second, its tokens), by the second's remainder

    def output(self, n_tokens: int, started: float, before: float | None) -> float:
        """n_tokens came now; ``started`` and ``before`` (the output before, None: this is the first) are of the
        same clock. Returns now."""
        now = self._clock()
        if not n_tokens:
            return now
        if before is None:
            self.first_token_s.add(now - started)
        else:
            gap_s = (now - before) / n_tokens
            for _ in range(n_tokens):
                self.between_tokens_s.add(gap_s)
        self.generated_tokens += n_tokens
        slot = int(now) % len(self._seconds)
        second, tokens = self._seconds[slot]
        self._seconds[slot] = (int(now), n_tokens + (tokens if second == int(now) else 0))
        return now

    def ended(
        self, whole_s: float, n_prompt: int, n_cached: int, phases: dict[str, float], aborted: bool
    ) -> None:
        """A request ended well. phases: as phase_seconds names them."""
        self.whole_s.add(whole_s)
        self.prompt_tokens += n_prompt
        self.cached_tokens += n_cached
        self.finished += 1
        self.aborted += aborted
        for name, histogram in self.phase_s.items():
            if (seconds := phases.get(f"{name}_s")) is not None:
                histogram.add(seconds)

    def failed(self, reason: str) -> None:
        self.failures[reason] += 1

    def tokens_per_s(self) -> float:
        """Of the last WINDOW_S whole seconds."""
        now = int(self._clock())
        return sum(tokens for second, tokens in self._seconds if now - WINDOW_S <= second < now) / WINDOW_S
