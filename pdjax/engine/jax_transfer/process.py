"""What a process that runs transfer servers does at its start and at its end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn

SWITCH_INTERVAL_S = 5e-4


def prepare_process() -> None:
    """Call once, before the engine starts.

    Another Python thread that is busy costs 2 to 5 ms of each hand-off until the interpreter switches threads more
    often; then 0.5 to 1 ms (facts/peer-servers §6).
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def leave(code: int) -> NoReturn:
    """End the process now, after the logs and standard streams are flushed. Call ``close`` of the transport first.

    The interpreter's own teardown is skipped: with a transfer in flight it has ended in SIGSEGV, and a thread of
    any library can hold it for ever (facts/transfer row 16, facts/peer-servers §9).
    """
    with contextlib.suppress(OSError, ValueError):  # a handler whose stream is gone must not keep us here
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
