"""How much is tried: little in `make test`, as much as ``FUZZ_EXAMPLES`` says in `make fuzz-inputs`."""

import os
import tracemalloc
from contextlib import contextmanager

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def tries(few):
    """few: examples in `make test`, always the same ones, so that a slow machine finds nothing new on its own."""
    return settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def no_growth(limit_bytes):
    """What is allocated inside and kept is at most so much."""
    tracemalloc.start()
    try:
        yield
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= limit_bytes and most <= 16 * limit_bytes, (kept, most)
