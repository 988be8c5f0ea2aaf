"""What a run of the suite found: every figure beside its roofline, as JSON and as Markdown.

Must never leave out where it ran, or a check that did not run.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu_hardware import Hardware

NAME = "tpu-report"


@dataclass(frozen=True)
class Figure:
    """One measured number. best: what the hardware allows in the same unit, where that is known."""

    check: str
    name: str
    value: float
    unit: str
    best: float | None = None

    @property
    def fraction(self) -> float | None:
        return None if not self.best else self.value / self.best


@dataclass(frozen=True)
class Outcome:
    """status: passed, failed or not run. detail: why, where it is not passed."""

    check: str
    what: str
    status: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """hardware None: nothing ran, and ``headline`` says why."""

    hardware: Hardware | None
    headline: str
    outcomes: list[Outcome] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    began: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))

    @property
    def ok(self) -> bool:
        return all(outcome.status != "failed" for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        return {
            "headline": self.headline,
            "on_tpu": self.hardware is not None and self.hardware.is_tpu,
            "began": self.began,
            "hardware": None if self.hardware is None else dataclasses.asdict(self.hardware),
            "hbm_gb_s": None if self.hardware is None else self.hardware.hbm_gb_s,
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
            "figures": [{**dataclasses.asdict(f), "fraction": f.fraction} for f in self.figures],
            "remarks": self.remarks,
        }

    def to_markdown(self) -> str:
        lines = ["# TPU suite", "", f"**{self.headline}**", "", f"Began {self.began}."]
        if self.hardware is not None:
            lines += ["", "| package | version |", "|---|---|"]
            lines += [f"| {name} | {version} |" for name, version in self.hardware.versions.items()]
        lines += ["", "| check | result | seconds | what |", "|---|---|---|---|"]
        for one in self.outcomes:
            result = f"{one.status}: {one.detail}" if one.detail else one.status
            lines.append(f"| {one.check} | {_cell(result)} | {one.seconds:.1f} | {_cell(one.what)} |")
        if self.figures:
            lines += ["", "| check | figure | value | best possible | fraction |", "|---|---|---|---|---|"]
        for figure in self.figures:
            best = "–" if figure.best is None else f"{figure.best:.4g} {figure.unit}"
            part = "–" if figure.fraction is None else f"{figure.fraction:.2f}"
            value = f"{figure.value:.4g} {figure.unit}"
            lines.append(f"| {figure.check} | {_cell(figure.name)} | {value} | {best} | {part} |")
        if self.remarks:
            lines += ["", *(f"- {remark}" for remark in self.remarks)]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Both files; they replace those of an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / f"{NAME}.json", folder / f"{NAME}.md"
        paths[0].write_text(json.dumps(self.to_json(), indent=1) + "\n")
        paths[1].write_text(self.to_markdown())
        return paths


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
