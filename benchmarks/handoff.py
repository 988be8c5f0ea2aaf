"""Hand-off latency of a one-page request between real processes, beside a ZMQ round trip and a TCP one.

P and D serve the tiny model; the client posts both halves itself. The clock starts when P has registered the KV and
stops when D begins its first decode step with it; both moments come from the processes' event logs, whose clock is
the machine's. Between two requests a message of 4 KB goes to another process and back over ZMQ and over TCP.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import socket
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import zmq
from bench_common import Report, finish, median_ms, parse
from bench_fleet import QUICK_SIZES, TimedFleet

from pdjax.bench.measures import percentile
from pdjax.serve.local import Plan

REQUESTS, QUICK_REQUESTS, WARM = 200, 5, 5
PROMPT_TOKENS = 12  # one page of 16
GOAL_MS = 10.0
SIZES = ("--num-pages", "256", "--context-length", "512")
MESSAGE_BYTES = 4096
HOST = "127.0.0.1"
GAP_S = 0.02  # the done of one request and its answer must not meet the next one


def echo(pipe: Connection) -> None:
    """The other process of both round trips."""
    replier = zmq.Context.instance().socket(zmq.REP)
    port = replier.bind_to_random_port(f"tcp://{HOST}")
    listener = socket.create_server((HOST, 0))
    pipe.send((port, listener.getsockname()[1]))
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    poller = zmq.Poller()
    poller.register(replier, zmq.POLLIN)
    poller.register(stream, zmq.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready is replier:
                replier.send(replier.recv())
                continue
            data = stream.recv(MESSAGE_BYTES)
            if not data:
                return
            stream.sendall(data)


class RoundTrips:
    """To a process of its own and back."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=echo, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # so that a child that dies is noticed
        zmq_port, tcp_port = ours.recv()
        self.requester = zmq.Context.instance().socket(zmq.REQ)
        self.requester.connect(f"tcp://{HOST}:{zmq_port}")
        self.stream = socket.create_connection((HOST, tcp_port))
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.message = b"x" * MESSAGE_BYTES

    def zmq(self) -> float:
        began = time.perf_counter()
        self.requester.send(self.message)
        self.requester.recv()
        return time.perf_counter() - began

    def tcp(self) -> float:
        began = time.perf_counter()
        self.stream.sendall(self.message)
        got = 0
        while got < MESSAGE_BYTES:
            got += len(self.stream.recv(MESSAGE_BYTES))
        return time.perf_counter() - began

    def close(self) -> None:
        self.stream.close()
        self.requester.close(0)
        self.process.join(5)


def moments(logs: Path) -> dict[int, dict[str, float]]:
    """room → seconds of each moment of its hand-off, from the event logs of both sides."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    names = {
        ("prefill", "registered"): "registered",
        ("decode", "pull_started"): "pull started",
        ("decode", "landed"): "landed",
        ("decode", "scattered"): "scattered",
        ("decode", "first_token"): "decode begins",
    }
    for file in logs.glob("*.ndjson"):
        for line in file.read_bytes().splitlines():
            event = json.loads(line)
            role = event["node"].partition("-")[0]
            name = names.get((role, event["event"]))
            if name is not None:
                found[int(event["room"])][name] = event["t"] / 1e3  # milliseconds in the log
    return {room: at for room, at in found.items() if "decode begins" in at and "registered" in at}


def ask(http: httpx.Client, fleet: TimedFleet, rng: random.Random) -> int:
    """One request, both halves; its room."""
    fields = fleet.legs.fields(rng)
    body = {
        "input_ids": [rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)],
        "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
        **fields,
    }
    with http.stream(
        "POST", f"{fleet.addresses['decode-0']}/generate", json={**body, "stream": True}
    ) as decode:
        prefill = http.post(f"{fleet.legs.prefill_url}/generate", json=body)
        prefill.raise_for_status()
        decode.raise_for_status()
        assert '"error"' not in decode.read().decode()
    return int(fields["bootstrap_room"])


def main() -> None:
    args = parse(__doc__)
    n = QUICK_REQUESTS if args.quick else REQUESTS
    trips, rng = RoundTrips(), random.Random(4)
    taken: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory)
        sizes = QUICK_SIZES if args.quick else SIZES
        extra = ("--disaggregation-trace", directory, *sizes)
        with (
            TimedFleet(Plan("tiny", router="none", extra=extra)) as fleet,
            httpx.Client(trust_env=False) as http,
        ):
            fleet.start()
            rooms = []
            for _ in range(n + WARM):
                rooms.append(ask(http, fleet, rng))
                taken["ZMQ round trip"].append(trips.zmq())
                taken["TCP round trip"].append(trips.tcp())
                time.sleep(GAP_S)
        at = moments(logs)
    trips.close()
    for room in rooms[WARM:]:
        told = at[room]
        names = list(told)
        for name in ("pull started", "landed", "scattered", "decode begins"):
            assert name in names, f"the log of room {room} lacks {name}"
        taken["hand-off"].append(told["decode begins"] - told["registered"])
        taken["registered → pull started"].append(told["pull started"] - told["registered"])
        taken["pull started → landed"].append(told["landed"] - told["pull started"])
        taken["landed → scattered"].append(told["scattered"] - told["landed"])
        taken["scattered → decode begins"].append(told["decode begins"] - told["scattered"])
    report = Report("handoff", args.quick)
    report.table(
        f"milliseconds, {n} one-page requests of the tiny model",
        ("what", "p50", "p99", "fastest"),
        [(name, median_ms(s), percentile(sorted(s), 99) * 1e3, min(s) * 1e3) for name, s in taken.items()],
    )
    trip_ms = median_ms(taken["ZMQ round trip"])
    p50_ms = median_ms(taken["hand-off"])
    report.add("hand-off of one page, p50", p50_ms, "ms", f"ZMQ round trip {trip_ms:.3g} ms", GOAL_MS)
    report.add("the same in ZMQ round trips", p50_ms / trip_ms, "×")
    finish(report, args)


if __name__ == "__main__":
    main()
