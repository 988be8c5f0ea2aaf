"""KV from P's pages to D's pages, the whole protocol included, beside a bare pull, one TCP stream and a memcpy.

Two processes, the shapes of facts/throughput (30 layers × [pages, 16, 384] float32, random page ids). Each round takes
every way once, in a new order; figures are ratios to the bare pull of the same round's 30 arrays. Our clock starts
when P's pool holds the KV and stops when D's pool holds it; the bare pull has neither gather nor scatter. Core time
is that of both processes together: it says what a way costs where other work waits for the cores, and a busy machine
disturbs it less.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_common import Report, finish, parse
from bench_half import HOST, KV_WIDTH, LAYERS, PAGE_BYTES, PAGE_SIZE, WAIT_S, Half, make_runner
from jax.experimental import transfer

from pdjax.core.pools import plan_parts
from pdjax.core.wire import FirstToken
from pdjax.engine.base import KVLanded, KVReady, KVReleased
from pdjax.engine.bootstrap.server import HTTPBootstrapServer
from pdjax.engine.jax_transfer.process import leave, prepare_process
from pdjax.engine.jax_transfer.servers import PARALLEL_COPIES, TRANSFER_SIZE
from pdjax.engine.kernels.checksum import checksum

SIZES = {1: 60, 16: 40, 64: 25, 256: 12}  # pages: rounds
QUICK = {1: 2, 3: 2}
GOALS = {1: 1.0, 64: 1.4, 256: 1.4}
FLOOR = 1.6
VERIFIES = ("off", "all")
WARM_ROUNDS = 2
PREFILL_S = 0.005  # between D's hello and the end of the prefill P's driver has long answered


def server_of(client: Any) -> Any:
    """A transfer server like those of the engine."""
    return transfer.start_transfer_server(
        client,
        f"{HOST}:0",
        [f"{HOST}:0"],
        max_num_parallel_copies=PARALLEL_COPIES,
        transfer_size=TRANSFER_SIZE,
    )


def random_pages(n: int, num_pages: int, rng: random.Random) -> list[int]:
    return rng.sample(range(1, num_pages), n)


# ---------------------------------------------------------------------- P


class Prefill:
    """The child process: does what D asks for over the pipe, one thing at a time."""

    def __init__(self, pipe: Connection, bootstrap_port: int, num_pages: int) -> None:
        self.pipe = pipe
        self.rng = random.Random(1)
        self.num_pages = num_pages
        self.halves = {
            v: Half("prefill", f"p-{v}", bootstrap_port, make_runner(num_pages, v), v) for v in VERIFIES
        }
        for half in self.halves.values():
            half.fill(list(range(1, num_pages)), seed=2)
        self.server = server_of(jax.devices()[0].client)
        self.arrays: list[jax.Array] = []
        self.listener = socket.create_server((HOST, 0))
        self.stream: socket.socket | None = None
        self.bytes = b""

    def run(self) -> None:
        self.pipe.send({"server": self.server.address(), "tcp": self.listener.getsockname()[1]})
        self.stream, _ = self.listener.accept()
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            name, *args = self.pipe.recv()
            if name == "leave":
                break
            getattr(self, name)(*args)
        for half in self.halves.values():
            half.stop()
        leave(0)

    def size(self, n_pages: int) -> None:
        """What the bare pull and the stream will send: as many bytes as n_pages pages."""
        values = np.random.default_rng(n_pages).standard_normal(
            (n_pages, PAGE_SIZE, KV_WIDTH), dtype=np.float32
        )
        self.arrays = [jnp.array(values + i) for i in range(LAYERS)]
        jax.block_until_ready(self.arrays)
        self.bytes = np.random.default_rng(3).bytes(n_pages * PAGE_BYTES)
        self.pipe.send("sized")

    def bare(self, uuid: int) -> None:
        self.server.await_pull(uuid, self.arrays)
        self.pipe.send("registered")

    def core_time(self) -> None:
        self.pipe.send(time.process_time())

    def tcp(self) -> None:
        assert self.stream is not None
        assert self.stream.recv(1) == b"g"
        self.stream.sendall(self.bytes)

    def move(self, verify: str, room: int, n_pages: int) -> None:
        """One hand-off, from the moment when D is bound and the pool holds the KV."""
        half = self.halves[verify]
        half.claim(room, n_pages)
        sender = half.manager.create_sender(room)
        assert sender.admit(n_pages * PAGE_BYTES)
        deadline = time.monotonic() + WAIT_S
        while not half.manager.sender.rooms[room].peer:
            assert time.monotonic() < deadline, "D never came"
            time.sleep(0.0005)
        time.sleep(PREFILL_S)
        pages = random_pages(n_pages, self.num_pages, self.rng)
        began = time.monotonic()
        assert sender.send(pages, FirstToken(1, 0.0))
        sent = time.monotonic()
        while not any(isinstance(event, KVReleased) for event in half.events()):
            pass
        sums = [checksum(a) for a in half.runner.gather(pages).arrays] if room % 8 == 0 else None
        self.pipe.send((began, sent, sums))


def prefill_main(pipe: Connection, bootstrap_port: int, num_pages: int) -> None:
    prepare_process()
    Prefill(pipe, bootstrap_port, num_pages).run()


# ---------------------------------------------------------------------- D


class Decode:
    """This process: asks, pulls and takes the time."""

    def __init__(self, pipe: Connection, bootstrap_port: int, num_pages: int) -> None:
        self.pipe = pipe
        self.rng = random.Random(2)
        self.num_pages = num_pages
        self.halves = {
            v: Half("decode", f"d-{v}", bootstrap_port, make_runner(num_pages, v), v) for v in VERIFIES
        }
        told = pipe.recv()
        self.server = server_of(jax.devices()[0].client)
        self.conn = self.server.connect(told["server"])
        self.stream = socket.create_connection((HOST, told["tcp"]))
        self.sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.next_id = 0
        self.phases: dict[str, list[float]] = defaultdict(list)

    def size(self, n_pages: int) -> None:
        self.n_pages, self.n_bytes = n_pages, n_pages * PAGE_BYTES
        self.pipe.send(("size", n_pages))
        assert self.pipe.recv() == "sized"
        self.spec = jax.ShapeDtypeStruct((n_pages, PAGE_SIZE, KV_WIDTH), jnp.float32, sharding=self.sharding)
        self.source = np.ones(self.n_bytes, np.uint8)
        self.target = np.zeros(self.n_bytes, np.uint8)
        self.phases.clear()

    def core_s(self) -> float:
        """Core time that both processes have used so far."""
        self.pipe.send(("core_time",))
        return float(self.pipe.recv()) + time.process_time()

    def bare(self) -> float:
        self.next_id += 1
        self.pipe.send(("bare", self.next_id))
        assert self.pipe.recv() == "registered"
        began = time.monotonic()
        for array in self.conn.pull(self.next_id, [self.spec] * LAYERS):
            array.block_until_ready()
        return time.monotonic() - began

    def tcp(self) -> float:
        self.pipe.send(("tcp",))
        view, got = memoryview(self.target), 0
        began = time.monotonic()
        self.stream.sendall(b"g")
        while got < self.n_bytes:
            got += self.stream.recv_into(view[got:])
        return time.monotonic() - began

    def memcpy(self) -> float:
        began = time.monotonic()
        np.copyto(self.target, self.source)
        return time.monotonic() - began

    def move(self, verify: str) -> float:
        """One hand-off; the seconds from P's pool to D's."""
        half = self.halves[verify]
        self.next_id += 1
        room = self.next_id
        self.pipe.send(("move", verify, room, self.n_pages))
        half.claim(room, self.n_pages)
        receiver = half.manager.create_receiver(room, f"{HOST}:{half.bootstrap_port}")
        pages = random_pages(self.n_pages, self.num_pages, self.rng)
        at: dict[str, float] = {}
        while "ended" not in at:
            for event in half.events():
                if isinstance(event, KVReady):
                    at["ready"] = time.monotonic()
                    assert receiver.receive(pages)
                elif isinstance(event, KVLanded):
                    at["landed"] = time.monotonic()
                    half.runner.scatter(pages, event.packed)
                    jax.block_until_ready(half.runner._kv)
                    at["ended"] = time.monotonic()
                    assert receiver.commit()
                else:
                    raise RuntimeError(f"the hand-off ended: {event}")
                del event
        half.await_free()
        began, sent, sums = self.pipe.recv()
        if sums is not None:
            mine = [checksum(a) for a in half.runner.gather(pages).arrays]
            assert mine == sums, "D's pages do not hold what P's pages hold"
        self.note(verify, began, sent, at)
        return at["ended"] - began

    def note(self, verify: str, began: float, sent: float, at: dict[str, float]) -> None:
        for name, seconds in (
            ("send() on P", sent - began),
            ("until ready on D", at["ready"] - began),
            ("pull and verify", at["landed"] - at["ready"]),
            ("scatter", at["ended"] - at["landed"]),
        ):
            self.phases[f"{verify}: {name}"].append(seconds)

    def stop(self) -> None:
        for half in self.halves.values():
            half.stop()


@dataclass
class Taken:
    """Seconds of each repetition of one way: by the clock, and of both processes' cores."""

    wall: list[float] = field(default_factory=list)
    core: list[float] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return statistics.median(self.wall)

    @property
    def core_s(self) -> float:
        return statistics.median(self.core)


def measure(decode: Decode, n_pages: int, rounds: int) -> dict[str, Taken]:
    """Way → what it took, interleaved."""
    ways: dict[str, Callable[[], float]] = {
        "bare pull": decode.bare,
        "pdjax, checksums off": lambda: decode.move("off"),
        "pdjax, checksums on": lambda: decode.move("all"),
        "one TCP stream": decode.tcp,
        "memcpy": decode.memcpy,
    }
    decode.size(n_pages)
    taken = {name: Taken() for name in ways}
    for i in range(rounds + WARM_ROUNDS):
        names = list(ways)
        decode.rng.shuffle(names)
        for name in names:
            before = decode.core_s()
            seconds = ways[name]()
            if i >= WARM_ROUNDS:
                taken[name].wall.append(seconds)
                taken[name].core.append(decode.core_s() - before)
    for name in decode.phases:
        decode.phases[name] = decode.phases[name][WARM_ROUNDS:]
    return taken


def summarise(report: Report, decode: Decode, n_pages: int, taken: dict[str, Taken]) -> None:
    bare = taken["bare pull"]
    size = f"{n_pages * PAGE_BYTES / 1e6:.1f} MB"
    report.table(
        f"{size}: {n_pages} pages, {len(bare.wall)} rounds",
        ("way", "median ms", "fastest", "slowest", "of bare pull", "core ms", "of bare pull"),
        [
            (
                name,
                *(s * 1e3 for s in (one.wall_s, min(one.wall), max(one.wall))),
                one.wall_s / bare.wall_s,
                one.core_s * 1e3,
                one.core_s / bare.core_s,
            )
            for name, one in taken.items()
        ],
    )
    rows = [(name, statistics.median(seconds) * 1e3) for name, seconds in decode.phases.items()]
    report.table(f"{size}: where it goes", ("phase", "median ms"), rows)
    for name, goal in (("off", GOALS.get(n_pages)), ("on", None)):
        ours = taken[f"pdjax, checksums {name}"]
        beside = f"bare pull {bare.wall_s * 1e3:.3g} ms, ours {ours.wall_s * 1e3:.3g} ms"
        report.add(
            f"pages to pages, {size}, checksums {name}",
            ours.wall_s / bare.wall_s,
            "× bare pull",
            beside,
            goal,
        )
        beside = f"bare pull {bare.core_s * 1e3:.3g} ms, ours {ours.core_s * 1e3:.3g} ms"
        report.add(
            f"core time of it, {size}, checksums {name}", ours.core_s / bare.core_s, "× bare pull", beside
        )


def main() -> None:
    args = parse(__doc__)
    sizes = QUICK if args.quick else SIZES
    prepare_process()
    num_pages = 2 * max(sizes) + 1
    registry = HTTPBootstrapServer(HOST, 0, 15.0)
    registry.start()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=prefill_main, args=(theirs, registry.port, num_pages), daemon=True)
    child.start()
    theirs.close()  # so that a child that dies is noticed
    decode = Decode(ours, registry.port, num_pages)
    report = Report("pages", args.quick)
    for n_pages, rounds in sizes.items():
        summarise(report, decode, n_pages, measure(decode, n_pages, rounds))
    report.notes.append(
        f"Goal for 47 MB and more: 1.4, floor {FLOOR}. P's parts: " + parts_text(decode, sizes)
    )
    ours.send(("leave",))
    decode.stop()
    child.join(10)
    registry.stop()
    finish(report, args)
    sys.stdout.flush()
    leave(0)


def parts_text(decode: Decode, sizes: dict[int, int]) -> str:
    pools = decode.halves["off"].runner.pools
    return ", ".join(f"{n} pages in {len(plan_parts(pools, n))}" for n in sizes)


if __name__ == "__main__":
    main()
