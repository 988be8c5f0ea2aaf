"""The suite: which checks there are, and how each runs in processes of its own.

This process never touches a device, so that every check gets its chips for itself, and one that kills its process costs
the suite only that check. Must never report a check as passed that did not say so itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu_hardware import Hardware, lifeline, worker_command
from tpu_report import Figure, Outcome, Report
from tpu_sizes import BY_NAME, Sizes

CHECK_TIMEOUT_S = 1800.0  # of one check in its process, compiles included
START_TIMEOUT_S = 300.0
PEER_VARIABLE = "PDJAX_TPU_PEER"
# libtpu gives a process the chips that it is shown, when it is also told that it is alone (TPU_VISIBLE_CHIPS is not enough).
ALONE = {
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Check:
    """chips: that it needs on this host. peer: needs the other end on another host, at PDJAX_TPU_PEER."""

    name: str
    what: str
    chips: int = 1
    peer: bool = False


PAGES = (
    Check("pages-exact", "gather and scatter of every dtype, page size and plan, bit for bit against numpy"),
    Check("pages-rate", "the engine's gather and scatter beside XLA's own and the roofline"),
    Check("depth-sweep", "the Pallas kernels with fewer and more layers in flight"),
    Check("staging-rate", "packed KV into slots of pinned host memory: bytes, memory kind, rate"),
)
TRANSFER = Check(
    "transfer",
    "jax.experimental.transfer between two processes of this host, each with a chip of its own",
    chips=2,
)
HOSTS = Check("transfer-hosts", "the same between this host and another one", peer=True)
SERVING = Check(
    "serving",
    "1P1D on split chips, staged and not: the tokens of one server, every slot back, traces that conform",
    chips=2,
)
CHECKS = (*PAGES, TRANSFER, HOSTS, SERVING)

# What is known without a TPU, for the report of a machine that has none.
WITHOUT_A_TPU = (
    "Compiled only, by the real TPU compiler for v5e, v5p, v6e and tpu7x (tests named aot): the page kernels, the copy into"
    " host slots, the model's prefill and decode steps.",
    "Interpreted only, on a CPU with race detection (tests/engine/test_kernels_pallas.py): the page kernels.",
    "Run on CPU: everything else, the harness of this suite included (tests/tpu/test_tpu_harness.py).",
)


class CheckFailed(AssertionError):
    """A check's process did not say that it passed. The text is the end of what it said instead."""


@dataclass
class Suite:
    """One run on one kind of hardware. folder: for event logs; peer: "ip:port" or ""."""

    hardware: Hardware
    sizes_name: str
    folder: Path
    peer: str = ""
    report: Report = field(init=False)
    said: list[str] = field(default_factory=list)  # by the servers of the whole 1P1D

    def __post_init__(self) -> None:
        self.report = Report(self.hardware, self.hardware.sentence)

    @property
    def sizes(self) -> Sizes:
        return BY_NAME[self.sizes_name]

    def lacks(self, check: Check) -> str:
        """Why the check cannot run here, "" if it can."""
        if check.peer and not self.peer:
            return (
                f"needs {PEER_VARIABLE}=ip:port, where `tpu_worker.py --offer ip:port` runs on another host"
            )
        if self.hardware.is_tpu and self.hardware.chips < check.chips:
            return f"needs {check.chips} chips, this host has {self.hardware.chips}"
        return ""

    def run(self, check: Check) -> Outcome:
        """Run one check; its outcome and figures are in the report."""
        why = self.lacks(check)
        began = time.monotonic()
        status, detail = "not run" if why else "passed", why
        if not why:
            try:
                self._how(check)(check)
            except CheckFailed as failed:
                status, detail = "failed", str(failed)
        outcome = Outcome(check.name, check.what, status, detail, time.monotonic() - began)
        self.report.outcomes.append(outcome)
        return outcome

    def _how(self, check: Check) -> Callable[[Check], None]:
        if check is SERVING:
            from tpu_serving import serve

            return lambda one: serve(self)
        return {TRANSFER.name: self._transfer, HOSTS.name: self._hosts}.get(check.name, self._in_worker)

    def _in_worker(self, check: Check) -> None:
        self._work(check.name, check.name, self.environ("0"))

    def _transfer(self, check: Check) -> None:
        with self.offering(self.environ("0")) as address:
            self._work(check.name, "transfer", self.environ("1"), "--peer", address)

    def _hosts(self, check: Check) -> None:
        self._work(check.name, "transfer", self.environ("0"), "--peer", self.peer)

    def environ(self, chips: str) -> dict[str, str]:
        """Of a process that owns these chips."""
        if not self.hardware.is_tpu:
            return {**os.environ, "JAX_PLATFORMS": "cpu"}
        shown = {"JAX_PLATFORMS": "tpu,cpu", "TPU_VISIBLE_CHIPS": chips}
        return {**os.environ, **ALONE, **shown}

    def figure(self, check: str, name: str, value: float, unit: str) -> None:
        self.report.figures.append(Figure(check, name, value, unit))

    def _work(self, as_check: str, name: str, environ: Mapping[str, str], *options: str) -> None:
        """One check in a worker. Its figures are in the report, however it ends. Raises CheckFailed."""
        command = worker_command("--check", name, "--sizes", self.sizes_name, *options)
        try:
            with lifeline() as stdin:
                done = subprocess.run(
                    command, env=dict(environ), stdin=stdin, capture_output=True, timeout=CHECK_TIMEOUT_S
                )
        except subprocess.TimeoutExpired as late:
            self._take_figures(as_check, late.stdout or b"")
            raise CheckFailed(f"did not end within {CHECK_TIMEOUT_S:g} s") from None
        if not self._take_figures(as_check, done.stdout):
            said = last_line(done.stderr.decode(errors="replace").splitlines())
            raise CheckFailed(f"exit code {done.returncode}: {said}")

    def _take_figures(self, as_check: str, stdout: bytes) -> bool:
        """Whether the worker said that its check passed."""
        passed = False
        for kind, what in told(stdout.decode(errors="replace").splitlines()):
            if kind == "figure":
                self.report.figures.append(Figure(**{**what, "check": as_check}))
            passed |= kind == "passed"
        return passed

    @contextmanager
    def offering(self, environ: Mapping[str, str]) -> Iterator[str]:
        """A process that offers KV on this host; its address."""
        command = worker_command("--offer", "127.0.0.1:0")
        # Into a file: of a pipe that nobody reads, a talkative process would wait for ever.
        with (
            tempfile.TemporaryFile("w+") as said,
            lifeline() as stdin,
            subprocess.Popen(
                command, env=dict(environ), stdin=stdin, stdout=subprocess.PIPE, stderr=said, text=True
            ) as process,
        ):
            assert process.stdout is not None
            # One that never gets its device must not hold the suite up.
            alarm = threading.Timer(START_TIMEOUT_S, process.kill)
            alarm.start()
            try:
                address = next((what for kind, what in told(process.stdout) if kind == "listens"), "")
                if not address:
                    process.wait()
                    said.seek(0)
                    raise CheckFailed(f"the offering process: {last_line(said.readlines())}")
                alarm.cancel()
                yield address
            finally:
                alarm.cancel()
                process.kill()


def told(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(kind, what) of what a worker said. A library may print there, too, and a process may end in the middle of a line."""
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            yield from said.items()


def last_line(lines: Sequence[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else "it said nothing"


def not_run(why: str) -> Report:
    """The report of a machine without a TPU: what would run, and what is known without one."""
    report = Report(None, f"Nothing was run: {why}")
    report.outcomes = [Outcome(check.name, check.what, "not run", "no TPU") for check in CHECKS]
    report.remarks = list(WITHOUT_A_TPU)
    return report
