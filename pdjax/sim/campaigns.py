"""The commands that look for trouble: ``sim fuzz``, ``shrink``, ``explain``, ``mutate``.

Exit codes as everywhere in ``sim``: 0 as expected, 1 a property broke, 2 the call or a file is wrong. Must never hold
a rule of its own: what counts as a failure is in ``fuzz``, ``shrink`` and ``mutate``.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pdjax.sim import fuzz as fuzzing
from pdjax.sim import mutate as mutation
from pdjax.sim import shrink as shrinking
from pdjax.sim.command import endless, write, wrong
from pdjax.sim.draw import draw
from pdjax.sim.explain import explain as in_words
from pdjax.sim.explain import meaning
from pdjax.sim.mutate import page, record, survivors
from pdjax.sim.mutate.campaign import Library, campaign
from pdjax.sim.mutate.runs import baseline, random_worlds, recorded_traces
from pdjax.sim.properties import NOT_SHOWN, SENTENCES
from pdjax.sim.replay import NoEndError, run_trace
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import dumps, load

TRACES = Path("tests") / "traces"
SHOW_EVERY_S = 2.0
MAX_JOBS = 256  # processes, each with a Python of its own


def quiet() -> None:
    """Injected errors are part of the game: the servers' own log would only hide what matters."""
    logging.disable(logging.CRITICAL)


def can_hold_files(folder: Path) -> bool:
    """It is a folder that can be written to, or can be made."""
    at = os.path.abspath(folder)
    while not os.path.exists(at):
        at = os.path.dirname(at)
    return os.path.isdir(at) and os.access(at, os.W_OK | os.X_OK)


def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="how many worlds")] = 200,
    jobs: Annotated[int, typer.Option(min=1, max=MAX_JOBS, help="processes")] = 1,
    first: Annotated[int, typer.Option(min=0, help="the first seed")] = 0,
    save: Annotated[Path, typer.Option(help="where the first failure is written, shrunk")] = Path("found"),
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="do not stop at the first failure")
    ] = False,
    coverage: Annotated[bool, typer.Option(help="what was reached: moments, and rows that were not")] = False,
) -> None:
    """Random worlds with random faults, healed at the end. Every property is checked in each."""
    quiet()
    if not can_hold_files(save):  # said before an hour of worlds, not after it
        raise wrong(f"--save {save}: no folder that can be written to")
    shown, n_failed = time.monotonic(), 0

    def progress(report: fuzzing.Report) -> None:
        nonlocal shown, n_failed
        for found in report.failed[n_failed:]:
            n_failed += 1
            typer.echo(f"seed {found.seed}: {found.text}", err=True)
        if time.monotonic() - shown > SHOW_EVERY_S:
            shown = time.monotonic()
            typer.echo(
                f"{report.seeds} of {seeds} seeds, {report.rate:.1f}/s, {len(report.failed)} failed", err=True
            )

    report = fuzzing.campaign(seeds, first=first, jobs=jobs, keep_going=keep_going, progress=progress)
    typer.echo(fuzzing.summary(report, coverage=coverage))
    for found in report.failed[:1]:
        trace = draw(found.seed)
        small = shrinking.shrink(trace, signature=tuple(found.signature), limit_s=20.0)
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise wrong(f"--save {save}: {error.strerror}") from None
        path = save / f"{trace['name']}.json"
        write(path, dumps(small.trace))
        typer.echo(f"seed {found.seed}: {found.text}")
        typer.echo(f"{len(trace['steps'])} steps became {len(small.trace['steps'])}: sim replay {path}")
    raise typer.Exit(1 if report.failed else 0)


def shrink(
    file: Annotated[Path, typer.Argument(help="a trace that fails")],
    out: Annotated[
        Path | None, typer.Option(help="where to write it (default: over the file's name + .small)")
    ] = None,
    limit: Annotated[float, typer.Option(min=0.1, help="seconds")] = 5.0,
) -> None:
    """The same failure with fewer steps and plainer values."""
    quiet()
    try:
        trace = dict(load(file).raw)
    except TraceError as error:
        raise wrong(f"{file}: {error}") from None
    try:
        small = shrinking.shrink(trace, limit_s=limit)
    except ValueError as error:
        raise wrong(f"{file}: {error}") from None
    path = out or file.with_suffix(".small.json")
    write(path, dumps(small.trace))
    typer.echo(
        f"{small.signature[0]}: {len(trace['steps'])} steps became {len(small.trace['steps'])} "
        f"in {small.runs} runs: {path}"
    )


def explain(what: Annotated[str, typer.Argument(help="a trace file, or the name of a property")]) -> None:
    """What a violated property means, which row showed it, who owned what, and the steps."""
    quiet()
    if what in SENTENCES or what in NOT_SHOWN or not os.path.exists(what):  # which takes any text as a name
        try:
            typer.echo(meaning(what))
        except KeyError:
            raise wrong(f"{what} is no file, and no property (S1 to S18, V1 to V12)") from None
        return
    try:
        typer.echo(in_words(run_trace(load(Path(what)))), nl=False)
    except TraceError as error:
        raise wrong(f"{what}: {error}") from None
    except NoEndError as error:
        raise endless(what, error) from None


def mutate(
    jobs: Annotated[int, typer.Option(min=1, max=MAX_JOBS, help="processes")] = 1,
    every: Annotated[int, typer.Option(min=1, help="only each n-th row mutant")] = 1,
    seeds: Annotated[int, typer.Option(min=0, help="random worlds beside the recorded traces")] = 60,
    mistakes_only: Annotated[bool, typer.Option("--mistakes", help="only the written-out mistakes")] = False,
    again: Annotated[
        bool, typer.Option("--survivors", help="only what survived the last campaign; the rest of it stands")
    ] = False,
    keep: Annotated[
        bool,
        typer.Option("--write", help="keep a whole campaign: tests/mutants, the record, docs/mutation.md"),
    ] = False,
) -> None:
    """Make the protocol wrong on purpose, one way at a time: which property notices?"""
    quiet()
    if not TRACES.is_dir():
        raise wrong(f"{TRACES}: there is no such folder: run it at the root of the project")
    mutants = mutation.mistakes() + ([] if mistakes_only else mutation.row_mutants()[::every])
    if again:
        mutants = [m for m in mutants if m.name not in record.recorded()["killed"]]
    whole = keep and not mistakes_only and every == 1
    library = Library(baseline(recorded_traces(TRACES, record.FOLDER)), baseline(random_worlds(seeds)))
    verdicts = []
    for verdict in campaign(mutants, library, jobs):
        verdicts.append(verdict)
        if verdict.made is not None and whole:
            library.add(verdict.made["name"], record.write_file(verdict), verdict.made)
        if not verdict.killed:
            typer.echo(
                f"survives: {verdict.name} (its row is met in {verdict.runs} runs, {verdict.met} searches)"
            )
        elif sys.stderr.isatty():
            typer.echo(f"{len(verdicts)} of {len(mutants)}", err=True)
    typer.echo(f"{sum(v.killed for v in verdicts)} of {len(verdicts)} mutants noticed by a property")
    if whole:
        kept = record.record(verdicts, sum(os.times()[:4]), record.recorded() if again else None)
        record.write(kept)
        write(page.PAGE, page.page(kept))
    unargued = [v.name for v in verdicts if not v.killed and not survivors.argument(v.name)]
    for name in unargued:
        typer.echo(f"not argued: {name}")
    raise typer.Exit(1 if unargued else 0)
