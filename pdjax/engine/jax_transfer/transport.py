"""JaxTransferKVEngine: the ``Transport`` port over ``jax.experimental.transfer``.

One per process, on P and on D. It joins P's registrations and D's puller, each with one transfer server for each
peer; what the library does and why these rules hold is in the comments of those modules. Must never block, never
re-use a uuid and never touch the pools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Part
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Packed
from pdjax.engine.jax_transfer import addresses
from pdjax.engine.jax_transfer.ports_guard import PortRange
from pdjax.engine.jax_transfer.puller import Puller
from pdjax.engine.jax_transfer.registrations import Registrations
from pdjax.engine.jax_transfer.servers import ServerPool
from pdjax.engine.kernels.checksum import VERIFY_MODES, Verify
from pdjax.engine.ports import Transport, TransportEvent


class JaxTransferKVEngine(Transport):
    """Moves packed arrays between the default devices of two processes.

    host: numeric ip to listen on; advertise: numeric ip that peers dial, needed when host is a wildcard.
    port_base: P's servers listen on the pairs (port_base + 2i, port_base + 2i + 1), i < settings.max_peers; None lets
    the kernel choose. D never has fixed ports. verify: which parts D compares with their checksum.
    Raises ConfigError for a host, a port range or a verify that cannot work.
    """

    def __init__(
        self,
        settings: PDSettings,
        *,
        host: str = "127.0.0.1",
        advertise: str | None = None,
        port_base: int | None = None,
        verify: Verify = "all",
        device: jax.Device | None = None,
    ) -> None:
        if verify not in VERIFY_MODES:
            raise ConfigError(f"verify {verify!r} must be one of {', '.join(VERIFY_MODES)}")
        where = addresses.host_address(host, advertise)
        device = device or jax.local_devices()[0]
        self._range = None if port_base is None else PortRange(where, port_base, settings.max_peers)
        self._registrations = Registrations(
            ServerPool(where, settings.max_peers, device, self._range),
            life_s=settings.withdrawn_life_s,
            max_seen=settings.max_tombstones,
        )
        self._puller = Puller(ServerPool(where, settings.max_peers, device), device, verify)
        self._closed = False

    def start(self, sink: Callable[[TransportEvent], None]) -> None:
        """sink: called from the polling thread, or from the thread in ``drop_peer`` or ``close``; it must not block."""
        self._puller.start(sink)

    def offer(self, peer: str, uuid: int, packed: Packed) -> None:
        """P: register. Raises ValueError for a uuid seen before or arrays unlike their parts, PDError at max_peers."""
        self._registrations.offer(peer, uuid, packed)

    def address_for(self, peer: str) -> str:
        """P: "ip:port" to put into the manifest. Raises PDError at max_peers."""
        return self._registrations.address_for(peer)

    def withdraw(self, peer: str, uuid: int, life_s: float) -> None:
        """P: from now on every new pull of uuid fails on every part, for life_s; one in flight ends right."""
        self._registrations.withdraw(peer, uuid, life_s)

    def pull(self, peer: str, address: str, uuid: int, parts: Sequence[Part]) -> int:
        """D: start a pull. What is wrong with the peer's address or parts comes as errors of PullDone."""
        return self._puller.pull(peer, address, uuid, parts)

    def abandon(self, pull_id: int) -> None:
        """D: exactly one event ends each pull: PullSettled, unless its PullDone was sent before this call."""
        self._puller.abandon(pull_id)

    def drop_peer(self, peer: str) -> None:
        """Both sides: withdraw, end its pulls (PullDone with errors, PullSettled if abandoned), drop its servers."""
        self._registrations.drop_peer(peer)
        self._puller.drop_peer(peer)

    def tick(self) -> None:
        """Call every 0.1 to 1 s: the library looks at its timeouts only when something happens (facts/transfer rule 5)."""
        self._registrations.tick()
        self._puller.reap()

    def close(self, wait_s: float) -> None:
        """Withdraw all, wait at most wait_s for D's pulls in flight, stop the thread, drop arrays, connections, servers.

        No event follows the return. P cannot see when its bytes in flight are read. End the process with ``leave``.
        """
        if self._closed:
            return
        self._closed = True
        self._registrations.close()
        self._puller.close(wait_s)
        self._registrations.dispose()

    def counters(self) -> dict[str, int]:
        """Counts and gauges of both halves, for metrics and tests."""
        skipped = self._range.skipped if self._range is not None else 0
        return {
            **dataclasses.asdict(self._registrations.counters),
            **dataclasses.asdict(self._puller.counters),
            "port_pairs_skipped": skipped,
        }
