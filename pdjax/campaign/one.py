"""``sim replay --engine jax``: one file on a fleet of its own, and what is said of it.

Must never start anything for a file that processes cannot run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pdjax.campaign.express import cannot, make_models, plan_of
from pdjax.campaign.fleet import Fleet, to_its_end
from pdjax.campaign.logs import Logs
from pdjax.campaign.reference import Reference
from pdjax.campaign.replay import SLOWER, Report, replay
from pdjax.serve.children import ChildError
from pdjax.sim.trace_types import Trace

AS_IN_THE_SIMULATOR, DIFFERS, CANNOT = 0, 1, 2


async def on_its_own(trace: Trace, directory: Path) -> tuple[Report, list[bytes]]:
    """(report, event log of all processes) of one file on processes that nothing else has used."""
    make_models(directory)
    plan = plan_of(trace, SLOWER, directory)
    async with Reference() as reference, Fleet(plan, directory / "fleet") as fleet:
        logs = Logs(fleet)
        report = await replay(trace, fleet, logs, reference)
        return report, logs.lines


def told(report: Report) -> list[str]:
    """What a person reads."""
    lines = [f"{rid}: {seen}" for rid, seen in report.outcomes.items()]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"differs: {what}" for what in report.differs]
    lines += [f"finding: {what}" for what in report.findings]
    lines.append(f"free again {report.free_s:.1f} s after the last outcome; {report.seconds:.0f} s in all")
    return lines


def as_object(report: Report) -> dict[str, Any]:
    """What --json prints."""
    return {**asdict(report), "exit": AS_IN_THE_SIMULATOR if report.ok else DIFFERS}


def replay_file(file: Path, trace: Trace, *, as_json: bool, log: Path | None) -> int:
    """Run the file and print what was seen; the exit code: 0 as in the simulator, 1 not, 2 it cannot be run."""
    reasons = cannot(trace)
    if reasons:
        for reason in reasons:
            print(f"{file}: real processes cannot do this: {reason}", file=sys.stderr)
        return CANNOT
    with tempfile.TemporaryDirectory(prefix="pdjax-") as directory:
        try:
            report, lines = to_its_end(on_its_own(trace, Path(directory)))
        except ChildError as error:
            print(f"{file}: {error}", file=sys.stderr)
            return CANNOT
    if log is not None:
        log.write_bytes(b"\n".join(lines) + b"\n")
    print(json.dumps(as_object(report)) if as_json else "\n".join(told(report)))
    return AS_IN_THE_SIMULATOR if report.ok else DIFFERS
