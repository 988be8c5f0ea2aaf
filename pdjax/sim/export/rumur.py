"""Runs a Murphi model with Rumur: generate C, compile, run, read the counts. Needs ``rumur`` and a C compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_COUNTS = re.compile(r"(\d+) states, (\d+) rules fired")


@dataclass(frozen=True)
class Counts:
    """What Rumur explored. error: "" or the first lines that it says about a broken property."""

    states: int
    rules_fired: int
    error: str


def missing() -> str:
    """What this machine lacks, "" when nothing."""
    lacking = [name for name in ("rumur", "gcc") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)} (apt-get install rumur gcc)" if lacking else ""


def run(model: str, folder: Path, timeout_s: float = 100.0) -> Counts:
    """Check the model in an empty folder. RuntimeError: the model does not compile."""
    source, code, binary = folder / "model.m", folder / "model.c", folder / "model"
    source.write_text(model)
    steps = [
        ["rumur", "--deadlock-detection", "off", "--output", str(code), str(source)],
        ["gcc", "-O1", "-std=c11", "-mcx16", "-o", str(binary), str(code), "-lpthread"],
    ]
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr[:2000]}")
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=timeout_s)
    found = _COUNTS.search(done.stdout)
    if found is None:
        raise RuntimeError(f"no counts: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    broken = "" if "No error found" in done.stdout else done.stdout[:4000]
    return Counts(int(found[1]), int(found[2]), broken)
