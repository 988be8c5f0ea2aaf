"""Some worlds whose D computes lost requests itself, drawn over a trace that is drawn already.

Its random numbers are its own, so that a seed's requests and faults stay what they are. Must never change an outcome
that a trace states: a lost request is answered right or not at all.
"""

from __future__ import annotations

import random
from typing import Any


def recompute_lost_ones(trace: dict[str, Any], seed: int) -> None:
    """In one world of three D recomputes; few may wait for it, or many, and decoding leaves it much time or little."""
    rng = random.Random(f"recompute {seed}")
    if rng.random() >= 1 / 3:
        return
    flags = trace["world"]["flags"]
    flags["disaggregation-on-failure"] = "recompute"
    flags["disaggregation-max-recompute"] = rng.choice([1, 2, 64])
    flags["disaggregation-recompute-every"] = rng.choice([1, 2, 4])
    if "chunked-prefill-size" not in flags and rng.random() < 0.5:
        flags["chunked-prefill-size"] = rng.choice([2, 8])
