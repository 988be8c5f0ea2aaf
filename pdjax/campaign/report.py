"""docs/faults.md from what the campaigns found: each part is kept between two marks and replaced as a whole.

Must never write a figure that was not measured in the run that writes it, nor keep silent about what that run left out.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from pdjax.campaign import states
from pdjax.campaign.aborts import ALL, Abort, goes_on, name_of
from pdjax.campaign.files import Campaign
from pdjax.campaign.matrix import FAULTS, Cell, all_cells
from pdjax.campaign.neighbours import Neighbours
from pdjax.campaign.rounds import Round
from pdjax.campaign.soak import Soak

PAGE = Path("docs") / "faults.md"
GIT_S = 10.0
MARKS = re.compile(r"<!-- (\w+): written by .*? -->\n.*?<!-- end -->\n", re.S)


def part(name: str, lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    return (
        f"<!-- {name}: written by `python -m pdjax.campaign {name} --write` -->\n\n{text}\n\n<!-- end -->\n"
    )


def check(page: Path, name: str) -> None:
    """Raises OSError or ValueError where the page has no place for that part: before an hour is spent on it."""
    if name not in [match[1] for match in MARKS.finditer(page.read_text())]:
        raise ValueError(f"{page}: has no part {name}")


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace that part of the page."""
    text = page.read_text()

    page.write_text(MARKS.sub(lambda found: part(name, lines) if found[1] == name else found[0], text))


def machine() -> str:
    """What ran, and where: cores and load decide what its times are worth."""
    where = f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.0f} over the last quarter of an hour"
    return f"version {version()}, {where}"


def version() -> str:
    """The commit in which the page is, without one that of the package."""
    git = ["git", "-C", str(PAGE.parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=GIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return metadata.version("pdjax")


def of_files(campaign: Campaign, whole: Iterable[str]) -> list[str]:
    """whole: the names of all files, those that this run has left out among them."""
    reports = campaign.reports
    alike = sum(report.ok for report in reports)
    lines = [
        f"{len(reports)} files on {campaign.fleets} fleets in {campaign.seconds / 60:.0f} min ({machine()}): "
        f"{alike} as in the simulator, {len(reports) - alike} not. {len(campaign.left_out)} cannot be run.",
        "",
        *_head("file", "compared with the simulator", "s"),
    ]
    for r in sorted(reports, key=lambda report: report.name.lower()):
        said = "; ".join([*r.differs, *r.findings, *r.notes]) or "the same"
        lines.append(f"| {r.name} | {_short(said)} | {r.seconds:.1f} |")
    lines += ["", *_head("cannot be run", "why")]
    lines += [f"| {name} | {'; '.join(why)} |" for name, why in sorted(campaign.left_out.items())]
    looked_at = {report.name for report in reports} | campaign.left_out.keys()
    return lines + _not_here("files", whole, looked_at)


def _head(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _wrong(found: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Below a table: what is wrong with each of its results that has something."""
    return [f"- {name}: {'; '.join(wrong)}" for name, wrong in found if wrong]


def _not_here(what: str, whole: Iterable[str], here: Collection[str]) -> list[str]:
    """What a run of some of them did not look at: one paragraph, [] after a whole run."""
    whole = list(whole)
    left = [name for name in whole if name not in here]
    return ["", f"Not in this run: {len(left)} of {len(whole)} {what}: {'; '.join(left)}."] if left else []


def _short(text: str, most: int = 200) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= most else text[: most - 1] + "…"


def of_matrix(cells: Sequence[Cell]) -> list[str]:
    wrong = sum(bool(cell.wrong) for cell in cells)
    lines = [
        f"{len(cells)} cells ({machine()}): {len(cells) - wrong} as promised, {wrong} not. In each cell: the client's outcome and when "
        "it came (and when each side knew), in seconds after the fault.",
        "",
        *_head("", *states.STATES),
    ]
    found = {(cell.target, cell.fault, cell.state): cell for cell in cells}
    for target in dict.fromkeys(cell.target for cell in cells):
        for fault in FAULTS:
            row = [found.get((target, fault, state)) for state in states.STATES]
            lines.append(f"| {target} {fault} | {' | '.join(_cell(cell) for cell in row)} |")
    lines += _wrong((cell.name, cell.wrong) for cell in cells)
    return lines + _not_here(
        "cells", (Cell(*cell).name for cell in all_cells()), {cell.name for cell in cells}
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    known = ", ".join(f"{node} {seconds:.1f}" for node, seconds in sorted(cell.known_s.items()))
    mark = " **!**" if cell.wrong else ""
    return f"{cell.outcome} {cell.client_s:.1f}{f' ({known})' if known else ''}{mark}"


def of_aborts(aborts: Sequence[Abort]) -> list[str]:
    ways = list(dict.fromkeys(abort.way for abort in aborts))
    found = {(abort.state, abort.way): abort for abort in aborts}
    lines = [
        f"Seconds from the abort until both sides were free ({machine()}).",
        "",
        *_head("", *ways),
    ]
    for state in dict.fromkeys(abort.state for abort in aborts):
        row = [found.get((state, way)) for way in ways]
        shown = [_abort(one) for one in row]
        lines.append(f"| {state} | {' | '.join(shown)} |")
    lines += _wrong((name_of(one.state, one.way), one.wrong) for one in aborts)
    here = {name_of(*cell) for cell in found}
    return lines + _not_here("aborts", (name_of(*cell) for cell in ALL), here)


def _abort(one: Abort | None) -> str:
    if one is None:
        return ""
    said = "goes on" if goes_on(one.state, one.way) else f"{one.free_s:.2f}"
    return said + (" **!**" if one.wrong else "")


def of_rounds(rounds: Sequence[Round]) -> list[str]:
    lines = [
        f"({machine()})",
        "",
        *_head("round", "not hurt", "hurt", "P MiB", "D MiB", "live arrays P, D"),
    ]
    for number, one in enumerate(rounds, 1):
        fine = ", ".join(f"{n} {seen}" for seen, n in one.outcomes.most_common())
        hurt = ", ".join(f"{n} {seen}" for seen, n in one.hurt_outcomes.most_common())
        p, d = one.memory["p0"], one.memory["d0"]
        lines.append(
            f"| {number} | {fine} | {hurt} | {p.rss_bytes >> 20} | {d.rss_bytes >> 20} | {p.arrays}, {d.arrays} |"
        )
    return lines + _wrong((f"round {number}", one.wrong) for number, one in enumerate(rounds, 1))


def of_neighbours(found: Sequence[Neighbours]) -> list[str]:
    lines = [
        f"{len(found[0].idle_s)} requests in each column ({machine()}).",
        "",
        *_head("stopped", "p50 of the others while it is idle, ms", "while it is stopped, ms", "ratio"),
    ]
    for one in found:
        idle, stopped = (1000 * statistics.median(seconds) for seconds in (one.idle_s, one.stopped_s))
        lines.append(f"| {one.victim} | {idle:.0f} | {stopped:.0f} | {one.ratio:.2f} |")
    return lines + _wrong((one.victim, one.wrong) for one in found)


def of_soak(soak: Soak) -> list[str]:
    outcomes = ", ".join(f"{n} {seen}" for seen, n in soak.outcomes.most_common())
    faults = ", ".join(f"{n} × {what}" for what, n in sorted(soak.faults.items()))
    return [
        f"Seed {soak.seed}, {soak.seconds:g} s ({machine()}): {soak.requests} requests: {outcomes}.",
        f"Faults: {faults}; {soak.lives} lives of processes.",
        f"Right are {soak.right_share:.0%} of those that the router hands to a server and that neither leave nor abort. At the end more than at the start (threads, open files): "
        f"{', '.join(f'{name} {threads:+d}, {files:+d}' for name, (threads, files) in soak.more.items())}.",
        "",
        *([f"- {what}" for what in soak.wrong] or ["As promised."]),
    ]
