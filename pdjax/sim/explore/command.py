"""``sim check`` and ``sim diagram``. Exit codes: 0 as expected, 1 a property broke or a size differs, 2 a wrong call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdjax.core import transitions as t
from pdjax.sim import docs as pages
from pdjax.sim import trace_file
from pdjax.sim.command import wrong
from pdjax.sim.explore import diagrams, props, scenario, story
from pdjax.sim.explore.config import ASSUMPTIONS
from pdjax.sim.explore.menu import SEARCHES, Search
from pdjax.sim.explore.search import explore


def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="which searches (default: all that are not deep)")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="the large ones, too")] = False,
    listing: Annotated[bool, typer.Option("--list", help="what there is, and what is checked")] = False,
    max_states: Annotated[
        int, typer.Option(help="stop a search that is larger (and say so)", min=1)
    ] = 2_000_000,
    trace: Annotated[
        Path | None,
        typer.Option(help="write the first counterexample as a trace file, as far as one can say it"),
    ] = None,
    drop: Annotated[
        str, typer.Option(help="do without this timer assumption, to see the counterexample")
    ] = "",
) -> None:
    """Search every state of small worlds around the real core for a broken property."""
    if listing:
        _list()
        return
    unknown = [n for n in names or () if n not in SEARCHES]
    if unknown or (drop and drop not in ASSUMPTIONS):
        known = ", ".join(SEARCHES if unknown else ASSUMPTIONS)
        raise wrong(f"{(unknown or [drop])[0]}: there is {known}")
    chosen = [s for s in SEARCHES.values() if s.name in names] if names else list(SEARCHES.values())
    failed = False
    for search in chosen:
        if names or deep or not search.deep:
            failed |= not _run(search, max_states, drop, None if failed else trace)
    raise typer.Exit(1 if failed else 0)


def _run(search: Search, max_states: int, drop: str, trace: Path | None) -> bool:
    config = search.config
    config = config.but(max_states=max_states, assume=tuple(a for a in config.assume if a != drop))
    report = explore(config)
    typer.echo(story.summary(report))
    assert report.world is not None
    found = report.violations + report.deadlocks
    if trace is not None and found:
        try:
            trace_file.save(trace, scenario.trace(found[0], config))
        except OSError as error:
            raise wrong(f"{trace}: {error.strerror}") from None
    for violation in found:
        typer.echo(story.tell(violation, report.world))
    if report.ok and not drop and (report.states, report.edges) != search.pinned:
        typer.echo(
            f"  not the pinned size {search.pinned}: the table or the model has changed (explore/menu.py)"
        )
        return False
    return report.ok


def _list() -> None:
    for s in SEARCHES.values():
        states, edges = s.pinned
        deep = "deep  " if s.deep else ""
        typer.echo(f"{s.name:20} {states:>8} states {edges:>9} edges  {deep}{s.about}")
    typer.echo("\nProperties:")
    for name, text in props.PROPERTIES.items():
        typer.echo(f"  {name:4} {text}")
    typer.echo("Not expressible here:")
    for name, text in props.NOT_HERE.items():
        typer.echo(f"  {name:4} {text}")
    typer.echo("Assumed of timers:")
    for name, text in ASSUMPTIONS.items():
        typer.echo(f"  {name:10} {text}")


def diagram(
    role: Annotated[str, typer.Argument(help="sender or receiver")] = t.SENDER,
    form: Annotated[str, typer.Option("--format", help="mermaid, dot or md")] = "mermaid",
) -> None:
    """The states of one side, as mermaid text, a dot graph, or a Markdown table."""
    if role not in pages.SIDES:
        raise wrong(f"{role}: choose sender or receiver")
    make = {"mermaid": pages.diagram, "dot": diagrams.dot, "md": diagrams.markdown}.get(form)
    if make is None:
        raise wrong(f"{form}: choose mermaid, dot or md")
    typer.echo(make(role))
