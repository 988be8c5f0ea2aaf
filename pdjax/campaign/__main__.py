"""``python -m pdjax.campaign``: faults on real processes (make faults, make soak).

Exit 0: as promised, 1: not, 2: a wrong call. Must never write a page but with --write.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer

from pdjax.campaign import report
from pdjax.campaign.aborts import ALL, name_of, run_aborts
from pdjax.campaign.files import names_of, run_files
from pdjax.campaign.fleet import DOWN, failure, to_its_end
from pdjax.campaign.matrix import all_cells, run_matrix
from pdjax.campaign.neighbours import run_neighbours
from pdjax.campaign.rounds import REQUESTS, ROUNDS, run_rounds
from pdjax.campaign.soak import run_soak
from pdjax.core.errors import ConfigError, plain
from pdjax.sim.command import run

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Hurt real processes and check what follows.",
    pretty_exceptions_enable=False,
)  # fmt: skip
TRACES = (
    Path("tests") / "traces"
)  # of which the page says what runs; there is a page only at the root of the project
Write = Annotated[bool, typer.Option("--write", help=f"write the result into {report.PAGE}")]
T = TypeVar("T")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(name: str, write: bool, campaign: Callable[[Path], Coroutine[Any, Any, T]]) -> T:
    if write:
        try:
            report.check(report.PAGE, name)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{error}: run it at the root of the project") from None
    with tempfile.TemporaryDirectory(prefix="pdjax-") as directory:  # short: there are sockets in it
        try:
            return to_its_end(campaign(Path(directory)))
        except DOWN as error:
            say(failure(error))
            raise typer.Exit(1) from None


def _finish(name: str, lines: Sequence[str], write: bool, n_wrong: int) -> None:
    if write:
        report.put(report.PAGE, name, lines)
    raise typer.Exit(1 if n_wrong else 0)


class Judged(Protocol):
    """One result of a campaign. wrong: [] is as promised."""

    wrong: list[str]


J = TypeVar("J", bound=Judged)


def _judged(
    name: str,
    write: bool,
    campaign: Callable[[Path], Coroutine[Any, Any, list[J]]],
    lines: Callable[[list[J]], list[str]],
) -> None:
    """A campaign of many results, to its end."""
    found = _run(name, write, campaign)
    _finish(name, lines(found), write, sum(bool(one.wrong) for one in found))


def _chosen(cells: Mapping[str, T], beginnings: Sequence[str] | None) -> list[T]:
    """The cells whose names begin so; all without a beginning."""
    chosen = [cell for name, cell in cells.items() if not beginnings or name.startswith(tuple(beginnings))]
    if not chosen:
        raise typer.BadParameter(plain(f"there is no such cell: {', '.join(beginnings or ())}"))
    return chosen


def _files_at(path: Path) -> list[Path]:
    try:
        return sorted(path.glob("*.json")) if path.is_dir() else [path]
    except OSError as error:
        raise typer.BadParameter(plain(f"{path}: {error.strerror}")) from None


@app.command()
def files(
    paths: Annotated[list[Path], typer.Argument(help="scenario files, or directories of them")],
    write: Write = False,
) -> None:
    """Replay scenario files on real processes and compare each with the simulator."""
    found = [file for path in paths for file in _files_at(path)]
    whole = names_of(sorted(TRACES.glob("*.json"))) if write else []
    if not found:
        raise typer.BadParameter(f"there is no *.json in {', '.join(map(str, paths))}")
    try:
        campaign = _run("files", write, lambda directory: run_files(found, directory, say))
    except ConfigError as error:
        say(str(error))
        raise typer.Exit(2) from None
    for name, reasons in campaign.left_out.items():
        say(f"cannot: {name}: {'; '.join(reasons)}")
    wrong = sum(not one.ok for one in campaign.reports)
    say(f"{len(campaign.reports)} files, {wrong} differ, {len(campaign.left_out)} cannot be run")
    _finish("files", report.of_files(campaign, whole), write, wrong)


@app.command()
def matrix(
    cells: Annotated[
        list[str] | None, typer.Argument(help="such as p0-kill-pulling or d0-stop; all without one")
    ] = None,
    write: Write = False,
) -> None:
    """Kill, stop and restart each process in each state of a request."""
    chosen = _chosen({"-".join(cell): cell for cell in all_cells()}, cells)
    _judged("matrix", write, lambda directory: run_matrix(chosen, directory, say), report.of_matrix)


@app.command()
def aborts(
    cells: Annotated[
        list[str] | None, typer.Argument(help="such as budget or 'queued, abort at D'; all without one")
    ] = None,
    write: Write = False,
) -> None:
    """Abort a request in each queue and state, on either side."""
    chosen = _chosen({name_of(*cell): cell for cell in ALL}, cells)
    _judged("aborts", write, lambda directory: run_aborts(chosen, directory, say), report.of_aborts)


@app.command()
def rounds(
    requests: Annotated[int, typer.Option(help="of each round")] = REQUESTS,
    seed: Annotated[int, typer.Option(help="of prompts and faults")] = 1,
    write: Write = False,
) -> None:
    """Many requests, some of them hurt: the others are right, and the processes do not grow."""
    _judged(
        "rounds",
        write,
        lambda directory: run_rounds(directory, say, rounds=ROUNDS, requests=requests, seed=seed),
        report.of_rounds,
    )


@app.command()
def neighbours(write: Write = False) -> None:
    """Stop one of two instances of a role under load: the others must not notice."""
    _judged("neighbours", write, lambda directory: run_neighbours(directory, say), report.of_neighbours)


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(help="how long faults are made, at least")] = 600.0,
    seed: Annotated[int, typer.Option(help="of requests and faults")] = 1,
    write: Write = False,
) -> None:
    """Full load under random faults."""
    found = _run("soak", write, lambda directory: run_soak(directory, say, seconds, seed))
    _finish("soak", report.of_soak(found), write, len(found.wrong))


if __name__ == "__main__":
    sys.exit(run(app, "python -m pdjax.campaign"))
