"""Processes that share the work of a campaign. Must never outlive it: an interrupt is the parent's alone to answer."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool
from typing import Any


@contextmanager
def workers(jobs: int, begin: Callable[..., None], args: tuple[Any, ...] = ()) -> Iterator[Pool]:
    """A pool whose processes ignore Ctrl-C: the terminal sends it to all, and each would print a traceback.

    They inherit that at their start. The parent gets the KeyboardInterrupt and ends them.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pool = multiprocessing.get_context("spawn").Pool(jobs, begin, args)
    finally:
        signal.signal(signal.SIGINT, before)
    with pool:
        yield pool
