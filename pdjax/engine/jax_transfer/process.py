"""What a process that runs transfer servers does at its start and at its end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from typing import NoReturn

SWITCH_INTERVAL_S = 5e-4

# Of glibc's mallopt (malloc.h). Packed parts and pulled arrays are allocated and freed for each hand-off; given back to
# the kernel, every page of them is faulted in and cleared anew (20,000 faults and a fifth of the time of a hand-off of
# 189 MB, docs/performance.md).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT_FREE_BYTES = 1 << 30  # at the top of the heap, for the next hand-off
MAPPED_FROM_BYTES = 32 << 20  # the largest that glibc takes; no part is above 16 MiB
ARENAS = 1  # heaps of other threads are unmapped as soon as they are empty, whatever the threshold


def prepare_process() -> None:
    """Call once, first: before the engine starts and threads allocate.

    Another Python thread that is busy costs 2 to 5 ms of each hand-off until the interpreter switches threads more
    often; then 0.5 to 1 ms (facts/peer-servers §6).
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Let malloc keep what a hand-off frees. False: this C library has no mallopt, or refuses; it only costs time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (M_ARENA_MAX, ARENAS),
        (M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (M_TRIM_THRESHOLD, KEPT_FREE_BYTES),
    )
    taken = [mallopt(name, value) for name, value in settings]
    return 0 not in taken


def leave(code: int) -> NoReturn:
    """End the process now, after the logs and standard streams are flushed. Call ``close`` of the transport first.

    The interpreter's own teardown is skipped: with a transfer in flight it has ended in SIGSEGV, and a thread of
    any library can hold it for ever (facts/transfer row 16, facts/peer-servers §9).
    """
    # A handler whose stream is gone must not keep us here, nor one that a signal met in the middle of a write.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)
