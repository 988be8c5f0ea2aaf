"""Figures of a run: percentiles, throughput, goodput, errors by kind. Pure: outcomes in, numbers out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pdjax.bench.client import Outcome
from pdjax.core.errors import ConfigError

PERCENTILES = (50, 90, 99)
# What a bound of --goodput speaks of: itl is the mean gap of a request's own tokens.
BOUNDED: dict[str, Callable[[Outcome], float]] = {
    "ttft": lambda outcome: outcome.ttft_s,
    "itl": lambda outcome: outcome.itl_s,
    "e2e": lambda outcome: outcome.e2e_s,
}


def parse_bounds(texts: Iterable[str]) -> dict[str, float]:
    """{"ttft": milliseconds, …} of texts such as "ttft:200". Raises ConfigError."""
    bounds = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            bound_ms = float(number)
        except ValueError:
            bound_ms = math.nan
        if name not in BOUNDED or not bound_ms > 0:
            raise ConfigError(
                f"--goodput {text}: give {', '.join(BOUNDED)} with milliseconds, as in ttft:200 itl:50"
            )
        bounds[name] = bound_ms
    return bounds


def percentile(ordered: Sequence[float], p: float) -> float:
    """The smallest value that at least p percent of the values do not exceed. ordered: ascending, not empty."""
    return ordered[max(math.ceil(p / 100 * len(ordered)), 1) - 1]


def spread_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Mean, percentiles and maximum in milliseconds; empty for no values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {
        "mean": sum(ordered) / len(ordered) * 1e3,
        **{f"p{p}": percentile(ordered, p) * 1e3 for p in PERCENTILES},
        "max": ordered[-1] * 1e3,
    }


def summary(outcomes: Sequence[Outcome], duration_s: float, bounds: dict[str, float]) -> dict[str, Any]:
    """All figures as one JSON object. Latencies are those of the requests that succeeded."""
    good = [outcome for outcome in outcomes if not outcome.error]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    met = [o for o in good if all(BOUNDED[name](o) * 1e3 <= bound for name, bound in bounds.items())]
    return {
        "duration_s": duration_s,
        "requests": len(outcomes),
        "succeeded": len(good),
        "errors": dict(errors.most_common()),
        "requests_per_s": len(good) * per_s,
        "input_tokens_per_s": sum(o.n_prompt for o in good) * per_s,
        "output_tokens_per_s": sum(o.n_output for o in good) * per_s,
        "input_tokens": sum(o.n_prompt for o in good),
        "cached_tokens": sum(o.n_cached for o in good),
        "output_tokens": sum(o.n_output for o in good),
        "ttft_ms": spread_ms(o.ttft_s for o in good),
        "itl_ms": spread_ms(gap for o in good for gap in o.gaps_s),
        "e2e_ms": spread_ms(o.e2e_s for o in good),
        "sent_late_ms": spread_ms(o.late_s for o in outcomes),
        "goodput": {
            "bounds_ms": bounds,
            "requests_per_s": len(met) * per_s,
            "share": len(met) / len(outcomes) if outcomes else 0.0,
        }
        if bounds
        else None,
    }
