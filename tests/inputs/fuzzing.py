"""How much is tried: little in `make test`, as much as ``FUZZ_EXAMPLES`` says in `make fuzz-inputs`."""

import gc
import os
import tracemalloc
from contextlib import contextmanager

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pdjax.core.errors import MAX_LINE_CHARS

MAX_ERROR_CHARS = 10 * MAX_LINE_CHARS + 2  # what cannot be printed is written out in at most ten
SIZES = st.sampled_from([0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
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
def no_growth(kept_bytes, most_bytes=None):
    """What is allocated inside: at most ``kept_bytes`` are kept, and ``most_bytes`` (16 times as much) held at a time."""
    tracemalloc.start()
    try:
        yield
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= kept_bytes and most <= (most_bytes or 16 * kept_bytes), (kept, most)


def keeps_nothing(read, inputs, times=20, kept_bytes=128 << 10):
    """Each input again and again: what one reading kept, of a cache or a log, would come to more than that."""
    for one in inputs:
        read(one)
    with no_growth(kept_bytes, 1 << 30):
        for _ in range(times):
            for one in inputs:
                read(one)
        gc.collect()  # an error and its frames may hold each other


def one_line(error):
    assert str(error) and str(error).isprintable() and len(str(error)) <= MAX_ERROR_CHARS
