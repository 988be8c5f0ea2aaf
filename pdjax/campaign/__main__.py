"""``python -m pdjax.campaign``: faults on real processes (make faults, make soak). Exit 0: as promised, 1: not, 2: a wrong call."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pdjax.campaign.files import run_files

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Hurt real processes and check what follows."
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@app.callback()
def root() -> None:
    pass


@app.command()
def files(
    paths: Annotated[list[Path], typer.Argument(help="scenario files, or directories of them")],
) -> None:
    """Replay scenario files on real processes and compare each with the simulator."""
    found = [f for path in paths for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    with tempfile.TemporaryDirectory(prefix="pdjax-") as directory:
        campaign = asyncio.run(run_files(found, Path(directory), say))
    for name, reasons in campaign.left_out.items():
        say(f"cannot: {name}: {'; '.join(reasons)}")
    wrong = [report for report in campaign.reports if not report.ok]
    say(
        f"{len(campaign.reports)} files on {campaign.fleets} fleets in {campaign.seconds:.0f} s, "
        f"{len(wrong)} differ, {len(campaign.left_out)} cannot be run"
    )
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    app()
