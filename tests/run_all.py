"""Every test, in parts that run two at a time: `make test`. Arguments go to each pytest.

Must never leave a test out: what belongs to no named part is a part of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
AT_ONCE = 2  # as many as our CI has cores
SAY_S = 60.0
LOOK_S = 0.2
END_S = 60.0  # for the processes of a part that is told to end
NOTHING_COLLECTED = 5  # pytest's exit code; that of a part when the arguments choose tests of another
# The longest first, so that the last ones end together. The first mostly waits for its processes. The others are apart
# from each other because what JAX has compiled by then is gigabytes that every garbage collection walks over.
PARTS: list[tuple[str, ...]] = [
    ("e2e", "benchmarks"),
    ("model", "sched"),
    (),  # all that the others do not name
    ("sim",),
    ("serve",),
    ("engine",),
]


@dataclass
class Part:
    """One pytest. log: what it prints, shown when it has ended."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float


def arguments(part: tuple[str, ...]) -> list[str]:
    if part:
        return [str(TESTS / name) for name in part]
    return [str(TESTS), *(f"--ignore={TESTS / name}" for named in PARTS for name in named)]


def begin(part: tuple[str, ...], given: list[str], directory: Path) -> Part:
    name = " and ".join(f"tests/{each}" for each in part) or "tests, the others"
    log = directory / f"{'-'.join(part) or 'others'}.log"
    command = [sys.executable, "-m", "pytest", *given, *arguments(part)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=TESTS.parent)
    return Part(name, process, log, time.monotonic())


def show(part: Part) -> None:
    """What it printed."""
    took_s = time.monotonic() - part.began_s
    print(f"== {part.name}: ended after {took_s:.0f} s, exit code {part.process.returncode}", flush=True)
    sys.stdout.buffer.write(part.log.read_bytes())
    sys.stdout.flush()


def stop(parts: list[Part], *, told: bool) -> None:
    """End them as Ctrl-C does, after which pytest ends what its tests have started. told: the terminal has done so."""
    for part in parts:
        if not told:
            part.process.send_signal(signal.SIGINT)
    for part in parts:
        try:
            part.process.wait(END_S)
        except subprocess.TimeoutExpired:
            part.process.kill()
            part.process.wait()
        with contextlib.suppress(BrokenPipeError):
            show(part)


def run(given: list[str], directory: Path) -> dict[str, int]:
    """The exit code of each part."""
    waiting, running, codes = list(PARTS), list[Part](), dict[str, int]()
    say_at_s = time.monotonic() + SAY_S
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(begin(waiting.pop(0), given, directory))
                print(f"== {running[-1].name}: begun", flush=True)
            time.sleep(LOOK_S)
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                codes[part.name] = part.process.returncode
                show(part)
            if time.monotonic() >= say_at_s:
                say_at_s += SAY_S
                print(f"== still running: {', '.join(part.name for part in running)}", flush=True)
    except BaseException as error:
        stop(running, told=isinstance(error, KeyboardInterrupt))
        raise
    return codes


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # A script's background job ignores it, and so would every pytest of ours, which is ended by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pdjax-tests-") as directory:
        try:
            codes = run(sys.argv[1:], Path(directory))
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except BrokenPipeError:  # whoever reads this has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    if set(codes.values()) == {NOTHING_COLLECTED}:
        return NOTHING_COLLECTED
    failed = [name for name, code in codes.items() if code not in (0, NOTHING_COLLECTED)]
    if failed:
        print(f"== failed (their output is above): {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
