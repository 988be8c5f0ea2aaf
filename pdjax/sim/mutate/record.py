"""What the last campaign gave, as it is kept: record.json beside this module. Must never be edited by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pdjax.sim.mutate.campaign import Verdict
from pdjax.sim.mutate.mistakes import mistakes
from pdjax.sim.mutate.rows import row_mutants
from pdjax.sim.trace_file import dumps

RECORD = Path(__file__).with_name("record.json")
FOLDER = Path("tests") / "mutants"


def placed(verdict: Verdict) -> str:
    """Where the file of a noticed mutant is, or will be."""
    return (FOLDER / f"{verdict.made['name']}.json").as_posix() if verdict.made is not None else verdict.path


def write_file(verdict: Verdict) -> str:
    """Write the trace that a mutant has given."""
    path = placed(verdict)
    if verdict.made is not None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(dumps(verdict.made), encoding="utf-8")
    return path


def record(verdicts: list[Verdict], cpu_s: float, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """A campaign as it is kept: who noticed what where, and what survived how. before: what it was the rest of."""
    killed = dict(before["killed"]) if before is not None else {}
    survived = {}
    for v in verdicts:
        if v.killed:
            killed[v.name] = [v.by, placed(v)]
        else:
            survived[v.name] = {k: x for k, x in asdict(v).items() if k in ("runs", "met", "same", "differ")}
    order = [m.name for m in [*mistakes(), *row_mutants()]]
    spent_s = round(cpu_s + (before["cpu_s"] if before is not None else 0.0))
    in_order = {name: killed[name] for name in order if name in killed}
    return {"cpu_s": spent_s, "killed": in_order, "survived": survived}


def write(kept: dict[str, Any]) -> None:
    """Keep it, and drop the files that no mutant needs any more."""
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    needed = {path for _, path in kept["killed"].values()}
    for path in FOLDER.glob("*.json"):
        if path.as_posix() not in needed:
            path.unlink()


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found
