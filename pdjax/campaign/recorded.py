"""What real processes did, as a scenario in the simulator: there every property of the protocol watches it.

The event logs of one file are cut out of those of their fleet, imported, and replayed. Must never change what a line says but its
number and, of the first line of a life, its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdjax.core.log_lines import Life, Line
from pdjax.sim.importer import import_logs
from pdjax.sim.replay import NoEndError, run_trace
from pdjax.sim.runlog import NoRun
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import parse


def cut_out(lines: Sequence[Line], before: int) -> list[bytes]:
    """The lines after that one as a whole log: each life that is in them begins with its own first line."""
    first = {line.life: line.raw for line in lines if line.event == "started"}
    numbers: dict[Life, int] = {}
    out: list[bytes] = []

    def put(life: Life, raw: Mapping[str, Any]) -> None:
        number = numbers[life] = numbers.get(life, -1) + 1
        out.append(msgspec.json.encode({**raw, "n": number}))

    for line in lines:
        if line.number <= before:
            continue
        if line.life not in numbers and line.event != "started":
            put(line.life, {**first[line.life], "t": line.raw["t"]})
        put(line.life, line.raw)
    return out


def broken_properties(lines: Sequence[Line], before: int) -> list[str]:
    """Properties that the recorded run breaks in the simulator; none also when nothing of a request was logged."""
    try:
        result = run_trace(parse(import_logs(cut_out(lines, before))[0]))
    except NoRun:
        return []  # every leg was refused before the protocol saw it
    except (TraceError, NoEndError) as error:
        return [f"the recorded run is no scenario: {error}"]
    return [f"{v.property} in the recorded run: {v.text}" for v in result.violations]
