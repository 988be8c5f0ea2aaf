"""``make tpu``: run the hardware suite where there is a TPU; elsewhere say what it would do and what is known without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tpu_hardware
from tpu_suite import CHECKS, not_run

from pdjax.model.fetch import fetch_smollm2


def main(folder: Path) -> int:
    """The exit code. The reports go into folder."""
    found, why = tpu_hardware.tpu_of_this_machine()
    if found is None:
        report = not_run(why)
        paths = report.write(folder)
        print(report.to_markdown())
        print(f"Written to {paths[0]} and {paths[1].name}.")
        return 0
    print(f"{found.chips} × {found.kind}: {len(CHECKS)} checks, the model of the last one first")
    fetch_smollm2(progress=print)
    tests = Path(__file__).parent / "test_tpu_hardware.py"
    return int(pytest.main(["-m", "tpu", "-v", f"--basetemp={folder / 'runs'}", str(tests)]))


if __name__ == "__main__":
    sys.exit(main(Path.cwd() / "tpu-report"))
