"""What real processes did, as a scenario in the simulator: there every property of the protocol watches it.

The event logs of one file are cut out of those of their fleet, imported, and replayed. Must never change what a line says but its
number and, of the first line of a life, its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdjax.sim.importer import import_logs
from pdjax.sim.replay import NoEndError, run_trace
from pdjax.sim.runlog import NoRun
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import parse


def cut_out(lines: Sequence[bytes], before: int) -> list[bytes]:
    """The lines after that one as a whole log: each life that is in them begins with its own first line."""
    decoded: list[dict[str, Any]] = [msgspec.json.decode(line) for line in lines]
    first = {_life(line): line for line in decoded if line["event"] == "started"}
    numbers: dict[tuple[str, str], int] = {}
    out: list[bytes] = []

    def put(line: dict[str, Any]) -> None:
        number = numbers[_life(line)] = numbers.get(_life(line), -1) + 1
        out.append(msgspec.json.encode({**line, "n": number}))

    for line in decoded[before:]:
        if _life(line) not in numbers and line["event"] != "started":
            put({**first[_life(line)], "t": line["t"]})
        put(line)
    return out


def _life(line: dict[str, Any]) -> tuple[str, str]:
    return line["node"], line["epoch"]


def broken_properties(lines: Sequence[bytes], before: int) -> list[str]:
    """Properties that the recorded run breaks in the simulator; none also when nothing of a request was logged."""
    try:
        result = run_trace(parse(import_logs(cut_out(lines, before))[0]))
    except NoRun:
        return []  # every leg was refused before the protocol saw it
    except (TraceError, NoEndError) as error:
        return [f"the recorded run is no scenario: {error}"]
    return [f"{v.property} in the recorded run: {v.text}" for v in result.violations]
