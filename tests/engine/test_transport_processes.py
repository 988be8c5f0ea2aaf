"""P and D as real processes: random KV over ZMQ and the transfer library, while processes die, stop and leave."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from contract.real_transport import free_base

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "contract" / "peer_process.py"
BOUND_S = 40.0
MIB = 1 << 20


class Process:
    """A peer process. ``expect`` returns the next line of that kind; other lines are kept."""

    def __init__(self, role: str, name: str, *port_base: str) -> None:
        self.name = name
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parents[3])}
        self._child = subprocess.Popen(
            [sys.executable, str(SCRIPT), role, name, *port_base],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._kept: list[dict] = []
        self._tags = itertools.count(1)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._child.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def expect(self, what: str, timeout_s: float = BOUND_S, **fields) -> dict:
        found = self.look(what, timeout_s, **fields)
        assert found is not None, f"{self.name}: no {what} {fields} in {timeout_s} s; kept {self._kept}"
        return found

    def look(self, what: str, timeout_s: float, **fields) -> dict | None:
        deadline = time.monotonic() + timeout_s
        while True:
            for line in self._kept:
                if line["what"] == what and fields.items() <= line.items():
                    self._kept.remove(line)
                    return line
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            assert line is not None, f"{self.name} ended early; kept {self._kept}"
            self._kept.append(line)

    def tell(self, cmd: str, **args) -> None:
        self._child.stdin.write(json.dumps({"cmd": cmd, **args}) + "\n")
        self._child.stdin.flush()

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def fetch(self, p: Process, n_parts: int, part_bytes: int, *, register: bool = True) -> int:
        tag = next(self._tags)
        self.tell(
            "fetch", address=p.address, peer=p.name, tag=tag, seed=tag, n_parts=n_parts, part_bytes=part_bytes,
            register=register,
        )  # fmt: skip
        return tag

    def fetch_right(self, p: Process, n_parts: int = 3, part_bytes: int = 98304) -> dict:
        tag = self.fetch(p, n_parts, part_bytes)
        done = self.expect("done", tag=tag)
        assert (done["good"], done["bad"], done["right"]) == (n_parts, 0, True), done
        return done

    def counters(self) -> dict:
        self.tell("counters")
        return self.expect("counters")

    def leave(self, code: int = 0) -> int:
        self.tell("leave", code=code)
        return self._child.wait(BOUND_S)

    def end(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait(BOUND_S)
        self._child.stdin.close()
        self._reader.join(BOUND_S)
        self._child.stdout.close()


@pytest.fixture
def start():
    """start("prefill", "p0:1") …: all started at once, ended with the test."""
    made: list[Process] = []

    def launch(*peers: tuple[str, ...]) -> list[Process]:
        new = [Process(*peer) for peer in peers]
        made.extend(new)
        for process in new:
            process.address = process.expect("up")["address"]
        return new

    yield launch
    for process in made:
        process.end()


def hold_mid_pull(d: Process, p: Process) -> int:
    """Stop P while D is pulling a lot from it; the tag of that pull, which has not ended."""
    for n_parts in (48, 96, 192):
        tag = d.fetch(p, n_parts, 4 * MIB)
        d.expect("pulling", tag=tag)
        p.signal(signal.SIGSTOP)
        if d.look("done", 0.5, tag=tag) is None:
            return tag
        p.signal(signal.SIGCONT)
    raise AssertionError("every pull was over before P could be stopped")


def test_random_kv_moves_and_a_killed_p_fails_its_pull_only(start):
    d, p0, p1 = start(("decode", "d0:1"), ("prefill", "p0:1"), ("prefill", "p1:1"))
    for n_parts, part_bytes in ((1, 1536), (30, 24576), (70, 1536), (12, 6 * MIB)):
        d.fetch_right(p0, n_parts, part_bytes)
    d.fetch_right(p1)
    tag = hold_mid_pull(d, p0)
    never = d.fetch(p1, 2, 1536, register=False)
    start_s = time.monotonic()
    p0.signal(signal.SIGKILL)
    done = d.expect("done", tag=tag)
    assert time.monotonic() - start_s < 10
    assert done["bad"] > 0
    assert done["right"], "parts that came before the kill must be right"
    d.expect("refused", address=p0.address)
    d.fetch_right(p1, 12, MIB)
    assert d.look("done", 0.0, tag=never) is None, "a pull from a living P is not touched"
    (again,) = start(("prefill", "p0:2"))
    d.tell("drop", peer="p0:1")
    d.expect("dropped")
    d.fetch_right(again)
    assert d.counters()["pulls_live"] == 1
    assert d.leave() == 0


def test_a_stopped_p_disturbs_no_other_p_and_dropping_it_settles_its_pulls(start):
    d, p0, p1 = start(("decode", "d0:1"), ("prefill", "p0:1"), ("prefill", "p1:1"))
    tag = hold_mid_pull(d, p0)
    for _ in range(5):
        d.fetch_right(p1, 8, MIB)
    d.tell("abandon", tag=tag)
    assert d.look("settled", 0.3, tag=tag) is None
    assert d.counters()["graveyard_bytes"] > 0
    d.tell("drop", peer="p0:1")
    assert d.expect("dropped")["ms"] < 2000
    d.expect("settled", tag=tag)
    assert d.counters()["graveyard_bytes"] == 0
    d.fetch_right(p1, 8, MIB)
    p0.signal(signal.SIGCONT)
    d.fetch_right(p0)  # a new connection and server to the same life
    assert d.leave() == 0
    assert p0.leave() == 0


def test_a_stopped_and_then_killed_d_disturbs_no_other_d(start):
    p, d0, d1 = start(("prefill", "p0:1"), ("decode", "d0:1"), ("decode", "d1:1"))
    d0.fetch_right(p)
    tag = d0.fetch(p, 48, 4 * MIB)
    d0.expect("pulling", tag=tag)
    d0.signal(signal.SIGSTOP)
    for _ in range(5):
        d1.fetch_right(p, 8, MIB)
    held = p.counters()
    assert held["serving_peers"] == 2
    assert held["registered_bytes"] >= 48 * 4 * MIB
    d0.signal(signal.SIGKILL)
    p.tell("drop", peer="d0:1")
    assert p.expect("dropped")["ms"] < 2000
    freed = p.counters()
    assert freed["serving_peers"] == 1
    assert held["registered_bytes"] - freed["registered_bytes"] >= 48 * 4 * MIB
    (reborn,) = start(("decode", "d0:2"))
    reborn.fetch_right(p, 8, MIB)
    d1.fetch_right(p, 8, MIB)
    assert p.leave() == 0


@pytest.mark.parametrize("first", ["p", "d"])
def test_both_sides_leave_with_their_code_while_pulls_are_in_flight(start, first):
    d, p = start(("decode", "d0:1"), ("prefill", "p0:1"))
    parked = d.fetch(p, 28, 1536, register=False)
    d.expect("pulling", tag=parked)
    buried = d.fetch(p, 28, 1536, register=False)
    d.expect("pulling", tag=buried)
    d.tell("abandon", tag=buried)
    for _ in range(3):
        d.expect("pulling", tag=d.fetch(p, 32, 2 * MIB))
    processes = {"p": p, "d": d}
    assert processes.pop(first).leave(0) == 0
    (second,) = processes.values()
    assert second.leave(7) == 7


def test_a_connection_that_broke_is_made_anew_for_the_next_pull(start):
    base = str(free_base(512))
    d, p = start(("decode", "d0:1"), ("prefill", "p0:1", base))
    d.fetch_right(p)
    parked = d.fetch(p, 2, 1536, register=False)
    d.expect("pulling", tag=parked)
    p.signal(signal.SIGKILL)
    done = d.expect("done", tag=parked)
    assert done["bad"] == 2
    (same,) = start(("prefill", "p0:1", base))  # the same ports: D's key and address for it do not change
    d.fetch_right(same)
    assert d.counters()["reconnects"] == 1
