"""Fixed port pairs for P's transfer servers, taken by one process at a time.

Two transfer servers on one port are no error to the kernel: it spreads new connections over both, and pulls go to
the wrong process (facts/transfer row 15). A probe alone loses a race (8 of 60 ports shared, facts/peer-servers §10);
a probe under a lock lost none of 60. The lock is an abstract unix socket: it needs no file and dies with the process.
Must never hand out a pair without holding both locks.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from pdjax.core.errors import ConfigError
from pdjax.engine.jax_transfer.addresses import HostAddress


@dataclass
class PortPair:
    """Control port and bulk port of one server, locked until ``release``."""

    index: int
    control: int
    bulk: int
    locks: list[socket.socket]

    def release(self) -> None:
        for lock in self.locks:
            lock.close()
        self.locks.clear()


class PortRange:
    """The pairs (base + 2i, base + 2i + 1) for i in [0, n_pairs): what a firewall opens on P, and nothing on D."""

    def __init__(self, host: HostAddress, base: int, n_pairs: int) -> None:
        if base < 1024 or base + 2 * n_pairs > 65536:
            raise ConfigError(
                f"port_base {base} with {n_pairs} peers needs ports {base} to {base + 2 * n_pairs - 1}: "
                "choose a base from 1024 up that keeps them below 65536"
            )
        self._ips = {host.bind, host.advertise}
        self._base = base
        self._n_pairs = n_pairs
        self._used: set[int] = set()
        self.skipped = 0  # pairs that somebody else held when they were tried

    def take(self) -> PortPair | None:
        """The lowest pair that nobody holds, or None."""
        for i in range(self._n_pairs):
            if i in self._used:
                continue
            pair = self._try(i)
            if pair is not None:
                self._used.add(i)
                return pair
            self.skipped += 1
        return None

    def give_back(self, pair: PortPair) -> None:
        pair.release()
        self._used.discard(pair.index)

    def _try(self, i: int) -> PortPair | None:
        pair = PortPair(i, self._base + 2 * i, self._base + 2 * i + 1, [])
        for port in (pair.control, pair.bulk):
            lock = _lock(port)
            if lock is not None:
                pair.locks.append(lock)
            if lock is None or not all(_free(ip, port) for ip in self._ips):
                pair.release()
                return None
        return pair


def _lock(port: int) -> socket.socket | None:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0pdjax-transfer-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


def _free(ip: str, port: int) -> bool:
    """Whether nobody listens. SO_REUSEADDR: connections that linger from an earlier server do not count."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
            probe.listen()
        except OSError:
            return False
    return True
