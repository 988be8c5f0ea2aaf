"""``make tpu``: run the hardware suite where there is a TPU; elsewhere say what it would do and what is known without one."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tpu_hardware
from tpu_suite import CHECKS, PEER_VARIABLE, not_run

from pdjax.core.errors import ConfigError
from pdjax.engine.jax_transfer.addresses import split
from pdjax.model.fetch import fetch_smollm2


def check_before(folder: Path, peer: str) -> None:
    """What would spoil a run of hours at its end. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{folder}: no report can be written there: {error.strerror}") from None
    try:
        if peer:
            split(peer)
    except ValueError as error:
        raise ConfigError(f"{PEER_VARIABLE}: {error}") from None


def main(folder: Path) -> int:
    """The exit code. The reports go into folder."""
    try:
        check_before(folder, os.environ.get(PEER_VARIABLE, ""))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found, why = tpu_hardware.tpu_of_this_machine()
    if found is None:
        report = not_run(why)
        paths = report.write(folder)
        print(report.to_markdown())
        print(f"Written to {paths[0]} and {paths[1].name}.")
        return 0
    print(f"{found.chips} × {found.kind}: {len(CHECKS)} checks, the model of the last one first")
    fetch_smollm2(progress=print)
    # As Ctrl-C: a suite that just ended would leave its children, and they the chips, to nobody.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tests = Path(__file__).parent / "test_tpu_hardware.py"
    return int(pytest.main(["-m", "tpu", "-v", f"--basetemp={folder / 'runs'}", str(tests)]))


if __name__ == "__main__":
    sys.exit(main(Path.cwd() / "tpu-report"))
