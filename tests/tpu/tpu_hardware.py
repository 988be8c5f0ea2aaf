"""Which device a process has, what its memory could do at best, and whether this machine has a TPU at all.

Must never load the TPU's library in the process that asks: whoever loads it owns the chips until it ends.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# GB/s of HBM of one chip, by the kind that JAX tells (facts/kernels §3). Reading and writing both count.
HBM_GB_S = {
    "TPU v5 lite": 819.0,
    "TPU v5e": 819.0,
    "TPU v5": 2765.0,
    "TPU v5p": 2765.0,
    "TPU v6 lite": 1640.0,
    "TPU v6e": 1640.0,
    "TPU7x": 7400.0,
}
DISCOVERY_TIMEOUT_S = (
    180.0  # the TPU's library looks for its chips and, outside a cloud, for a metadata server
)
DEVICE_NODES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
PACKAGES = ("pdjax", "jax", "jaxlib", "libtpu", "numpy")
WORKER = Path(__file__).parent / "tpu_worker.py"


@dataclass(frozen=True)
class Hardware:
    """platform and kind as JAX tells them; chips: devices that one process sees when it is given all."""

    platform: str
    kind: str
    chips: int
    versions: Mapping[str, str]

    @property
    def is_tpu(self) -> bool:
        return self.platform == "tpu"

    @property
    def hbm_gb_s(self) -> float | None:
        """None for a kind that has no roofline here."""
        return HBM_GB_S.get(self.kind) if self.is_tpu else None

    @property
    def sentence(self) -> str:
        """What every report begins with."""
        if self.is_tpu:
            return f"Ran on TPU hardware: {self.chips} × {self.kind}."
        return (
            f"Ran on {self.platform.upper()}, not on TPU hardware: this shows that the harness works. "
            "Its figures say nothing about a TPU."
        )


def worker_command(*options: str) -> list[str]:
    """The command of a worker of this process; its stdin is a ``lifeline``."""
    return [sys.executable, str(WORKER), "--end-with-stdin", *options]


@contextmanager
def lifeline() -> Iterator[int]:
    """A worker's stdin. Only this process holds its other end: whatever ends it, SIGKILL too, closes that and so ends the worker."""
    given, held = os.pipe()
    try:
        yield given
    finally:
        os.close(given)
        os.close(held)


def of_this_process() -> Hardware:
    """The devices of the calling process; loads the backend."""
    import jax

    found = jax.devices()
    versions = {name: _version(name) for name in PACKAGES}
    versions["python"] = platform.python_version()
    versions["runtime"] = " ".join(found[0].client.platform_version.split())
    return Hardware(found[0].platform, found[0].device_kind, len(found), versions)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_nodes() -> list[str]:
    """What the kernel shows of TPU chips. Without any, the TPU's library need not be asked."""
    return sorted(path for pattern in DEVICE_NODES for path in glob.glob(pattern))


def tpu_of_this_machine(timeout_s: float = DISCOVERY_TIMEOUT_S) -> tuple[Hardware | None, str]:
    """(the TPU, "") or (None, why there is none to run on). A child process looks."""
    nodes = device_nodes()
    if not nodes:
        return None, f"no TPU on this machine: {' and '.join(DEVICE_NODES)} match nothing"
    environ = {**os.environ, "JAX_PLATFORMS": "tpu"}
    try:
        with lifeline() as stdin:
            done = subprocess.run(
                worker_command("--describe"),
                env=environ,
                stdin=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
    except subprocess.TimeoutExpired:
        return None, f"{', '.join(nodes)} are there, but JAX found no TPU within {timeout_s:g} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"{', '.join(nodes)} are there, but JAX finds no TPU: {last}"
    return Hardware(**json.loads(done.stdout.splitlines()[-1])), ""


def describe() -> str:
    """This process's hardware as one line of JSON."""
    return json.dumps(dataclasses.asdict(of_this_process()))
