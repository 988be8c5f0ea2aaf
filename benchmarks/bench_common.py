"""What every benchmark shares: its command line, its figures as a table and as JSON, and the machine they are of.

A figure stands beside its baseline of the same run, because absolute times of a shared machine move by a factor of
two. Must never import JAX: the client and the registry are measured without it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdjax.core.errors import ConfigError
from pdjax.model.fetch import resolve_model

PACKAGES = ("jax", "jaxlib", "numpy", "pyzmq", "uvicorn", "sglang-router")


@dataclass
class Figure:
    """One line of a benchmark. goal is met when value is at most goal; None: stated only."""

    name: str
    value: float
    unit: str
    baseline: str = ""
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.value <= self.goal


@dataclass
class Report:
    """All figures of one benchmark. tables: (title, header, rows of text) printed before the figures."""

    benchmark: str
    quick: bool
    figures: list[Figure] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str, baseline: str = "", goal: float | None = None) -> None:
        self.figures.append(Figure(name, value, unit, baseline, goal))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.tables.append((title, list(header), [[_text(cell) for cell in row] for row in rows]))

    def to_json(self) -> dict[str, object]:
        return {
            "benchmark": self.benchmark,
            "quick": self.quick,
            "machine": machine(),
            "figures": [{**asdict(figure), "met": figure.met} for figure in self.figures],
            "tables": [
                {"title": title, "header": header, "rows": rows} for title, header, rows in self.tables
            ],
            "notes": self.notes,
        }

    def show(self) -> None:
        console = Console(width=None if sys.stdout.isatty() else 120)
        for title, header, rows in self.tables:
            console.print(make_table(title, header, rows))
        console.print(
            make_table(
                f"{self.benchmark}: figures",
                ("figure", "value", "baseline", "goal", ""),
                [
                    [f.name, f"{_text(f.value)} {f.unit}", f.baseline, _goal(f), _verdict(f)]
                    for f in self.figures
                ],
            )
        )
        for note in self.notes:
            console.print(note)


def make_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if type(cell) is int else str(cell)


def _goal(figure: Figure) -> str:
    return "" if figure.goal is None else f"≤ {_text(figure.goal)}"


def _verdict(figure: Figure) -> str:
    return {None: "", True: "met", False: "MISSED"}[figure.met]


def machine() -> dict[str, object]:
    """Date, size and versions: what a figure means nothing without."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def model_name(quick: bool) -> str:
    """SmolLM2 where it was fetched, else the tiny model."""
    if quick:
        return "tiny"
    try:
        resolve_model("smollm2")
    except ConfigError:
        return "tiny"
    return "smollm2"


def parse(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """--quick and --json, the same for every benchmark. From here on SIGTERM ends it like an error: what it started ends too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args(argv)


def finish(report: Report, args: argparse.Namespace) -> None:
    """Print the report, and write it where --json says."""
    report.show()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3
