"""Many scenario files on real processes: those with the same plan share one fleet, one after the other.

Must never stop at a file that differs, nor leave one out without its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdjax.campaign.express import cannot, make_models, plan_of
from pdjax.campaign.fleet import FAILURES, Fleet, failure
from pdjax.campaign.logs import Logs
from pdjax.campaign.plans import FleetPlan
from pdjax.campaign.reference import Reference
from pdjax.campaign.replay import SLOWER, Report, fresh_rooms, replay
from pdjax.core.errors import ConfigError
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import load, parse
from pdjax.sim.trace_types import Trace

Say = Callable[[str], None]


@dataclass
class Campaign:
    """reports: of the files that ran. left_out: name → why real processes cannot run it."""

    reports: list[Report] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    fleets: int = 0


async def run_files(
    paths: Sequence[Path], directory: Path, say: Say = lambda text: None, slower: float = SLOWER
) -> Campaign:
    """Every file that can run, with its report; directory: empty, and with a short path (sockets are in it).

    Raises ConfigError for a file that is wrong, before anything starts.
    """
    campaign, began_s = Campaign(), time.monotonic()
    groups: dict[FleetPlan, list[Trace]] = {}
    traces = [_read(path) for path in paths]
    make_models(directory)
    for trace in traces:
        reasons = cannot(trace)
        if reasons:
            campaign.left_out[trace.name] = reasons
        else:
            groups.setdefault(plan_of(trace, slower, directory), []).append(trace)
    async with Reference() as reference:
        for number, (plan, traces) in enumerate(groups.items()):
            say(
                f"fleet {number + 1} of {len(groups)}: {', '.join(n.name for n in plan.nodes)}, {len(traces)} files"
            )
            await _run_group(campaign, plan, traces, reference, directory / str(number), say, slower)
    campaign.fleets = len(groups)
    campaign.seconds = time.monotonic() - began_s
    return campaign


def names_of(paths: Iterable[Path]) -> list[str]:
    """As reports call these files."""
    return [load(path).name for path in paths]


def _read(path: Path) -> Trace:
    try:
        return load(path)
    except TraceError as error:
        raise ConfigError(f"{path}: {error}") from None


async def _run_group(
    campaign: Campaign, plan: FleetPlan, traces: list[Trace], reference: Reference, directory: Path,
    say: Say, slower: float,
) -> None:  # fmt: skip
    """Files of one plan. After a failure of the fleet itself the rest goes on with a new one."""
    left = list(traces)
    lives = 0
    while left:
        lives += 1
        used: set[int] = set()
        try:
            async with Fleet(plan, directory / str(lives)) as fleet:
                logs = Logs(fleet)
                while left:
                    trace = parse(fresh_rooms(left[0].raw, used))
                    report = await replay(trace, fleet, logs, reference, slower)
                    left.pop(0)
                    campaign.reports.append(report)
                    say(_line(report))
                if ends := await fleet.end():
                    report.findings += ends
                    say(_line(report))
        except FAILURES as error:
            if left:
                campaign.reports.append(Report(left.pop(0).name))
            report = campaign.reports[-1]  # it fails at its end: that is the last file's
            report.findings.append(failure(error))
            say(_line(report))


def _line(report: Report) -> str:
    said = [*report.differs, *report.findings]
    verdict = "as in the simulator" if report.ok else "; ".join(said[:6])
    notes = f" ({'; '.join(report.notes)})" if report.notes else ""
    return f"{report.name}: {verdict}{notes}, {report.seconds:.1f} s"
