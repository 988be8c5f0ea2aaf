"""How long a device call takes: warmed up, waited for, the median of several rounds. Must never time a compile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

WARM_ROUNDS = 2


def seconds_of(call: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a call whose result is waited for."""
    return seconds_from(lambda _: call(), None, rounds)


def seconds_from(call: Callable[[Any], Any], state: Any, rounds: int) -> float:
    """Median seconds of state = call(state): for calls that consume what they are given."""
    for _ in range(WARM_ROUNDS):
        state = jax.block_until_ready(call(state))
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        state = jax.block_until_ready(call(state))
        took.append(time.perf_counter() - began)
    return statistics.median(took)
