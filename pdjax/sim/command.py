"""``sim replay`` and ``sim import``: run a trace file and show it, make one of a recorded run. Must never decide anything that run_trace has not."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from pdjax.core.errors import plain
from pdjax.sim.importer import import_logs
from pdjax.sim.replay import NoEndError, Result, run_trace
from pdjax.sim.runlog import NoRun
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import dumps, load, parse
from pdjax.sim.trace_types import Trace

AS_EXPECTED, DIFFERS, WRONG, DIVERGED = 0, 1, 2, 3
INTERRUPTED = 130
ENGINES = ("sim", "jax")
SERVING_NEEDS = ("jax", "zmq", "httpx", "fastapi")  # of what real processes import, and no simulation


# typer has a click of its own and does not export this class of it
UsageError: Any = typer.BadParameter.__mro__[1]


def run(app: typer.Typer, name: str) -> int:
    """The exit code of this process's command line; a wrong call is one line and 2."""
    try:
        code = app(prog_name=name, standalone_mode=False)
    except UsageError as error:
        if not sys.argv[1:]:
            error.show()  # help
            return WRONG
        return wrong(f"{name}: {error.format_message()}").exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def wrong(text: str) -> typer.Exit:
    """Exit 2 with one line."""
    typer.echo(plain(text), err=True)
    return typer.Exit(WRONG)


def endless(file: Path | str, error: NoEndError) -> typer.Exit:
    """Exit 1 with one line: the file is right, and its world does not come to an end."""
    typer.echo(plain(f"{file}: {error}"), err=True)
    return typer.Exit(DIFFERS)


def write(path: Path, text: str) -> None:
    """A whole file or none, also when two runs write the same one at once. Exit 2 where it cannot be written."""
    try:
        if path.exists() and not path.is_file():  # a pipe, a device: there is nothing to replace
            path.write_text(text, encoding="utf-8")
            return
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise wrong(f"{path}: {error.strerror}") from None


def exit_code(result: Result) -> int:
    if result.differs_at is not None:
        return DIVERGED
    return AS_EXPECTED if result.ok else DIFFERS


def report(result: Result) -> dict[str, Any]:
    """What --json prints."""
    return {
        "name": result.trace.name,
        "exit": exit_code(result),
        "outcomes": {
            rid: {"outcome": o.outcome, "reason": o.reason, "status": o.status, "ms": round(o.ms, 3), "tokens": list(o.tokens)}
            for rid, o in result.outcomes.items()
        },
        "violations": [
            {"property": v.property, "sentence": v.sentence, "text": v.text, "t": v.t, "row": v.row}
            for v in result.violations
        ],
        "differs": result.mismatches,
        "unfired": result.unfired,
        "skipped": result.skipped,
        "idle_rules": result.idle_rules,
        "graveyard": result.graveyard,
        "quiet_ms": result.quiet_ms,
        "events": result.events,
        "digest": result.digest,
        "diverged": divergence(result),
        "choices": result.choices,
    }  # fmt: skip


def divergence(result: Result) -> str | None:
    """Which line of the log is the first that differs from the recorded run."""
    at = result.differs_at
    if at is None:
        return None
    if at >= len(result.log_lines):
        there = "the recorded run went on"
    else:
        there = result.log_lines[at].decode().strip()
    return (
        f"diverged at event {at + 1} of {len(result.log_lines)}: {there}: this file, or the core, has changed "
        "since this was recorded"
    )


def replay(
    file: Annotated[Path, typer.Argument(help="a trace file (docs/simulation.md)")],
    engine: Annotated[
        str, typer.Option(help="sim: the simulated world; jax: real processes on this machine")
    ] = "sim",
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of the ladder")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="write a space-time picture")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="write a Chrome trace, for ui.perfetto.dev")] = None,
    log: Annotated[Path | None, typer.Option(help="write the event log (NDJSON)")] = None,
    pin: Annotated[
        Path | None, typer.Option(help="write the trace again with this run's choices and digest")
    ] = None,
    mutant: Annotated[
        str, typer.Option(help="make the protocol wrong in this way first: a name of docs/mutation.md")
    ] = "",
) -> None:
    """Run a scenario and show what happened. A file with a way through the model is replayed in the model.

    Exit 0: as the file expects. 1: a property broke or an outcome differs. 2: the file or the call is wrong.
    3: not the run that was recorded.
    """
    if engine not in ENGINES:
        raise wrong(f"--engine {engine}: choose one of {', '.join(ENGINES)}")
    try:
        trace = load(file)
        if engine == "jax":
            only_sim = {"--svg": svg, "--perfetto": perfetto, "--pin": pin, "--mutant": mutant}
            raise typer.Exit(_replay_on_processes(file, trace, as_json, log, only_sim))
        with _wrong_on_purpose(mutant):
            if "model" in trace.raw:
                raise typer.Exit(_replay_in_model(trace, as_json))
            result = run_trace(trace, conformance=not mutant)
    except TraceError as error:
        raise wrong(f"{file}: {error}") from None
    except NoEndError as error:
        raise endless(file, error) from None
    for path, content in outputs(result, trace, svg=svg, perfetto=perfetto, log=log, pin=pin).items():
        write(path, content)
    if as_json:
        typer.echo(json.dumps(report(result)))
    else:
        from rich.console import Console

        from pdjax.sim.view.ladder import show

        show(result, Console())
        if result.differs_at is not None:
            typer.echo(divergence(result))
    raise typer.Exit(exit_code(result))


def _replay_on_processes(
    file: Path, trace: Trace, as_json: bool, log: Path | None, only_sim: Mapping[str, object]
) -> int:
    """The same file on real processes; the exit code."""
    given = [flag for flag, value in only_sim.items() if value]
    if given:
        raise wrong(f"{', '.join(given)}: with --engine sim only")
    for name in SERVING_NEEDS:
        if not _is_installed(name):
            raise wrong(f"--engine jax: {name} is not installed here; install pdjax with its dependencies")
    from pdjax.campaign.one import replay_file

    return replay_file(file, trace, as_json=as_json, log=log)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _wrong_on_purpose(mutant: str) -> AbstractContextManager[None]:
    from pdjax.sim.mutate import all_mutants

    if not mutant:
        return nullcontext()
    found = next((m for m in all_mutants() if m.name == mutant), None)
    if found is None:
        names = [m.name for m in all_mutants()]
        near = difflib.get_close_matches(mutant, names, 3) or [n for n in names if mutant.startswith(f"{n}:")]
        meant = f"; near it: {', '.join(map(repr, near))}" if near else ""
        raise wrong(f"{mutant!r}: there is no such mutant; docs/mutation.md names them{meant}")
    return found.patch()


def _replay_in_model(trace: Trace, as_json: bool) -> int:
    """Make the file's moves; the exit code."""
    from pdjax.sim.explore.saved import walk

    try:
        found = walk(trace.raw["model"])
    except ValueError as error:
        raise TraceError("model", str(error)) from None
    code = AS_EXPECTED if set(found.broken) == set(trace.violations) else DIFFERS
    if as_json:
        violations = [{"property": v.rule, "text": v.text} for v in found.breaches]
        typer.echo(
            json.dumps({"name": trace.name, "exit": code, "violations": violations, "moves": found.taken})
        )
    else:
        typer.echo(f"{trace.name}: {trace.why}\n{found.told()}")
    return code


def outputs(
    result: Result,
    trace: Trace,
    *,
    svg: Path | None,
    perfetto: Path | None,
    log: Path | None,
    pin: Path | None,
) -> dict[Path, str]:
    """The files that the call asks for."""
    out: dict[Path, str] = {}
    if svg is not None:
        from pdjax.sim.view.svg import svg as draw

        out[svg] = draw(result)
    if perfetto is not None:
        from pdjax.sim.view.perfetto import perfetto as chrome

        out[perfetto] = chrome(result)
    if log is not None:
        out[log] = b"".join(result.log_lines).decode()
    if pin is not None:
        out[pin] = dumps({**trace.raw, "choices": result.choices, "digest": result.digest})
    return out


def import_(
    files: Annotated[
        list[Path], typer.Argument(help="event logs of real processes (--disaggregation-trace)")
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="the trace file to write")],
) -> None:
    """Make a trace of a recorded run: its requests, rooms, and the faults that its logs show.

    Exit 0: written, and it replays. 2: the logs are not whole, or nothing was posted in them.
    """
    data: list[bytes] = []
    for file in files:
        try:
            data += file.read_bytes().splitlines()
        except OSError as error:
            raise wrong(f"{file}: {error.strerror}") from None
    try:
        raw, remarks = import_logs(data, source=", ".join(file.name for file in files))
        parse(raw)
    except (NoRun, TraceError) as error:
        raise wrong(str(error)) from None
    write(out, dumps(raw))
    for remark in remarks:
        typer.echo(remark, err=True)
    typer.echo(f"{out}: {len(raw['steps'])} steps; sim replay {out} runs it")
