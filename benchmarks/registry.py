"""Look-ups and heartbeats a second with 10 and with 10,000 instances: the table alone, and over HTTP.

The table is the one that the server and the simulator run; over HTTP one client asks the real server, one request
after the other on one connection. Half of the instances are prefill, all are compatible, so a look-up lists 5,000.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import httpx
from bench_common import Report, finish, parse

from pdjax.core.pools import Fingerprint, KVArgs
from pdjax.engine.bootstrap.httpd import HttpThread, bind
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.bootstrap.registry import Registry, parse_key
from pdjax.engine.bootstrap.server import build_app

SIZES, QUICK = (10, 10_000), (4, 40)
ROUNDS, QUICK_ROUNDS = 5, 2
SLICE_S, QUICK_SLICE_S = 0.5, 0.02
TTL_S = 1e6
PRINTS = Fingerprint(1, "m", "w", "float32", 16, 30, 3, 64, "flat", "single", 4 << 20, 1, "0.10.2")
BEAT_S = 5.0  # the default heartbeat interval: what a deployment asks of its registry


def seats(n: int) -> list[dict[str, object]]:
    """Registrations of n instances, prefill and decode in turn."""
    out = []
    for i in range(n):
        role = ("prefill", "decode")[i % 2]
        args = KVArgs([], 16, PRINTS, f"{role}-{i}", f"http://10.0.{i // 250}.{i % 250}:30000")
        out.append(registration(args, role, 1000 + i, zmq_addr=f"10.0.{i // 250}.{i % 250}:40000"))
    return out


def filled(n: int) -> Registry:
    registry = Registry(TTL_S, max_entries=2 * n)
    for payload in seats(n):
        assert registry.register(payload, 0.0) == "new"
    return registry


def rate(call: Callable[[int], object], slice_s: float, start: int = 0) -> float:
    """Calls a second in one slice of time."""
    began, n = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < slice_s:
        call(start + n)
        n += 1
    return n / took


def table_calls(n: int) -> dict[str, Callable[[int], object]]:
    registry = filled(n)
    keys = [(parse_key(payload), int(str(payload["epoch"]))) for payload in seats(n)]

    def beat(i: int) -> None:
        key, epoch = keys[i % n]
        assert registry.heartbeat(key, epoch, 1.0)

    return {
        "look-up, table": lambda i: registry.route("prefill", 1.0, fingerprint=PRINTS.hash),
        "heartbeat, table": beat,
    }


def serve(pipe: Connection, n: int) -> None:
    """The process of a registry with n instances, until the parent closes its end."""
    server = HttpThread(build_app(filled(n)), bind("127.0.0.1", 0), "registry")
    server.start()
    pipe.send(server.url)
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.stop()


class Served:
    """The registry's server in a process of its own, and one client."""

    def __init__(self, n: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, n), daemon=True)
        self.process.start()
        theirs.close()
        self.http = httpx.Client(base_url=self.pipe.recv(), trust_env=False, timeout=60.0)
        names = ("role", "instance_id", "epoch")
        self.beats = [
            {**{name: payload[name] for name in names}, "fingerprint": PRINTS.hash} for payload in seats(n)
        ]

    def calls(self) -> dict[str, Callable[[int], object]]:
        return {"look-up, HTTP": self._look_up, "heartbeat, HTTP": self._beat}

    def _look_up(self, i: int) -> None:
        answer = self.http.get("/route", params={"role": "prefill", "fingerprint": PRINTS.hash})
        assert answer.status_code == 200

    def _beat(self, i: int) -> None:
        assert self.http.post("/heartbeat", json=self.beats[i % len(self.beats)]).status_code == 200

    def close(self) -> None:
        self.http.close()
        self.pipe.close()
        self.process.join(10)


def main() -> None:
    args = parse(__doc__)
    sizes = QUICK if args.quick else SIZES
    rounds, slice_s = (QUICK_ROUNDS, QUICK_SLICE_S) if args.quick else (ROUNDS, SLICE_S)
    served = {n: Served(n) for n in sizes}
    calls = {n: {**table_calls(n), **served[n].calls()} for n in sizes}
    rates: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for n in sizes:
            for name, call in calls[n].items():
                rates.setdefault((n, name), []).append(rate(call, slice_s))
    for one in served.values():
        one.close()
    report = Report("registry", args.quick)
    few, most = sizes
    names = list(calls[few])
    median = {key: statistics.median(values) for key, values in rates.items()}
    report.table(
        "calls a second, medians",
        ("what", *(f"{n:,} instances" for n in sizes)),
        [(name, *(median[n, name] for n in sizes)) for name in names],
    )
    for name in names:
        beside = f"{median[few, name]:,.0f}/s with {few}"
        report.add(f"{name}, {most:,} instances", median[most, name], "/s", beside)
    report.notes.append(
        f"{most:,} instances with the default interval send {most / BEAT_S:,.0f} heartbeats a second."
    )
    finish(report, args)


if __name__ == "__main__":
    main()
