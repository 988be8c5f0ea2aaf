"""What a call costs, as a number that does not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def opcodes(call: Callable[[], object]) -> int:
    """Python bytecodes that ``call`` executes: a scan in a loop or a comprehension shows, its time does not matter."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
