"""The ``sim`` command: the table as a page or a diagram, and recorded event logs against the table.

Exit codes: 0 as expected, 1 a property broke, 2 the call or a file is wrong, 3 a replay diverged. Must never touch a network.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdjax.core import conform
from pdjax.sim import campaigns, command
from pdjax.sim import docs as pages
from pdjax.sim.command import run, wrong
from pdjax.sim.explore import command as explore

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Check, show and document the hand-off protocol."
)

PAGE = Path("docs") / "protocol.md"

app.command("replay")(command.replay)
app.command("import")(command.import_)
for found in (campaigns.fuzz, campaigns.shrink, campaigns.explain, campaigns.mutate):
    app.command(found.__name__)(found)
app.command("check")(explore.check)
app.command("diagram")(explore.diagram)


@app.command("check-log")
def check_log(
    files: Annotated[
        list[Path], typer.Argument(help="event logs (--disaggregation-trace), one or more processes")
    ],
    complete: Annotated[
        bool, typer.Option(help="the processes were quiet at the end: nothing may be open")
    ] = False,
) -> None:
    """Are these runs that the table and the properties allow?"""
    lines: list[bytes] = []
    for file in files:
        try:
            lines += file.read_bytes().splitlines()
        except OSError as error:
            raise wrong(f"{file}: {error.strerror}") from None
    found = conform.check(lines, complete=complete)
    for finding in found:
        typer.echo(str(finding))
    typer.echo(f"{len(lines)} lines of {len(files)} files: {len(found)} findings")
    raise typer.Exit(2 if any(f.rule == "log" for f in found) else 1 if found else 0)


@app.command()
def docs(
    write: Annotated[bool, typer.Option("--write", help=f"write {PAGE} instead of printing it")] = False,
) -> None:
    """The protocol page, made from the table."""
    if not write:
        typer.echo(pages.protocol_page(), nl=False)
        return
    try:
        PAGE.write_text(pages.protocol_page())
    except OSError as error:
        raise wrong(f"{PAGE}: {error.strerror}: run it at the root of the project") from None


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode gets question marks, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(app, "sim"))
