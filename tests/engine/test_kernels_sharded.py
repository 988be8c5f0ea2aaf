"""Pools that are spread over devices along the heads: each device moves its own shard."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sharded_moves.py"
# The interpreter of kernels needs a thread for each of its devices: with one for each of two cores it waits for ever
# (facts/kernels §1). The number comes from NPROC.
ENVIRONMENT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "16", "JAX_PLATFORMS": "cpu"}


@pytest.mark.timeout(300)  # 10 s of a core, which others may want, too
def test_a_pool_over_four_devices_arrives_bit_for_bit() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ways = ("pallas eager", "pallas on_wait", "xla")
    assert done.stdout.split("\n")[:-1] == [
        f"right: {way} {tail}" for way in ways for tail in ("flat", "heads")
    ]
