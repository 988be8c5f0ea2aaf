"""P's half of the transport: what is registered under which uuid, for which peer, until when.

The native server answers nothing about its table, silently replaces a uuid that is registered twice and keeps its own
reference to every array (facts/transfer rows 5, 7), so the truth is kept here. One lock is held over register,
withdraw and tick (facts/peer-servers §12.2). Must never delete a registered array: a D that is pulling it would be
wedged (facts/transfer row 7).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pdjax.engine.base import Packed
from pdjax.engine.jax_transfer import verify
from pdjax.engine.jax_transfer.servers import ServerPool

TICK_UUID = 0  # never minted for a room: the protocol's 0 says "no uuid"
TICK_LIFE_S = 1.0


@dataclass
class RegistrationCounters:
    """registered_bytes: offered and not withdrawn, expired or dropped; D's done is not known here."""

    registered: int = 0
    withdrawn: int = 0
    expired: int = 0
    ticks: int = 0
    registered_bytes: int = 0
    serving_peers: int = 0


@dataclass
class _Entry:
    """One uuid in a native table. nbytes is 0 once it is withdrawn. deadline: monotonic seconds."""

    peer: str
    nbytes: int
    deadline: float
    withdrawn: bool = False


class Registrations:
    """offer, withdraw and tick on the per-peer servers of ``pool``.

    life_s: after this an offer that nobody ended expires in the native table too. max_seen: uuids remembered, oldest
    forgotten first, so that a second offer of one is refused.
    """

    def __init__(
        self, pool: ServerPool, life_s: float, max_seen: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = RegistrationCounters()
        self._pool = pool
        self._life_s = life_s
        self._max_seen = max_seen
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._by_peer: dict[str, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._closed = False

    def address_for(self, peer: str) -> str:
        """ "ip:port" of that peer's server. Raises PDError at the limit of peers."""
        with self._lock:
            self._check_open()
            address = self._pool.get(peer).address
            self.counters.serving_peers = len(self._pool)
            return address

    def offer(self, peer: str, uuid: int, packed: Packed) -> None:
        """Register packed for that peer. Raises ValueError for a uuid seen before or arrays unlike their parts."""
        uuid = int(uuid)
        if not 0 < uuid < 1 << 64:
            raise ValueError(f"uuid {uuid} must be in 1 … 2^64-1")
        why = verify.mismatch(packed.parts, packed.arrays)
        if why is not None:
            raise ValueError(f"offer of uuid {uuid}: {why}")
        with self._lock:
            self._check_open()
            # The native table would silently replace the first (facts/transfer rule 4).
            if uuid in self._seen:
                raise ValueError(f"uuid {uuid} was offered before: mint a fresh one for every room")
            server = self._pool.get(peer).server
            self.counters.serving_peers = len(self._pool)
            self._remember(uuid)
            server.await_pull(uuid, list(packed.arrays), timeout=_wall(self._life_s))
            nbytes = sum(part.nbytes for part in packed.parts)
            self._put(uuid, _Entry(peer, nbytes, self._clock() + self._life_s))
            self.counters.registered += 1
            self.counters.registered_bytes += nbytes

    def withdraw(self, peer: str, uuid: int, life_s: float) -> None:
        """Replace the registration by an empty list for life_s; nothing happens for a uuid never offered to peer."""
        with self._lock:
            server = self._pool.find(peer)
            entry = self._entries.get(uuid)
            if server is None or uuid not in self._seen or (entry is not None and entry.peer != peer):
                return
            # An empty list and no tombstone array: it is never consumed, answers a pull of any number of parts
            # with an error on each, and matches no part's size (facts/peer-servers §0.1, §5).
            server.server.await_pull(uuid, [], timeout=_wall(life_s))
            if entry is not None:
                self.counters.registered_bytes -= entry.nbytes
            self.counters.withdrawn += entry is not None and not entry.withdrawn
            self._put(uuid, _Entry(peer, 0, self._clock() + life_s, withdrawn=True))

    def drop_peer(self, peer: str) -> None:
        """Withdraw everything of that peer and dispose of its server."""
        with self._lock:
            self._withdraw_all(peer)
            for uuid in self._by_peer.pop(peer, set()):
                self.counters.registered_bytes -= self._entries.pop(uuid).nbytes
            self._pool.drop(peer)
            self.counters.serving_peers = len(self._pool)

    def tick(self) -> None:
        """Touch every native table so that its due timeouts fire, and forget what they ended: 1 to 3 us a server."""
        with self._lock:
            for server in self._pool.all():
                server.server.await_pull(TICK_UUID, [], timeout=_wall(TICK_LIFE_S))
                self.counters.ticks += 1
            self._forget_due()
            self._pool.reap()

    def close(self) -> None:
        """Withdraw everything and refuse offers; ``dispose`` ends the servers."""
        with self._lock:
            self._closed = True
            for server in self._pool.all():
                self._withdraw_all(server.peer)

    def dispose(self) -> None:
        """Drop every server; waits at most 0.1 s for the youngest."""
        with self._lock:
            self._entries.clear()
            self._by_peer.clear()
            self._deadlines.clear()
            self.counters.registered_bytes = 0
            self._pool.close()
            self.counters.serving_peers = 0

    # ------------------------------------------------------------------ under the lock

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the transport is closed")

    def _remember(self, uuid: int) -> None:
        self._seen[uuid] = None
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)

    def _put(self, uuid: int, entry: _Entry) -> None:
        """One heap item a uuid, however often a peer has it withdrawn: ``_forget_due`` puts a later deadline back."""
        if uuid not in self._entries:
            heapq.heappush(self._deadlines, (entry.deadline, uuid))
        self._entries[uuid] = entry
        self._by_peer.setdefault(entry.peer, set()).add(uuid)

    def _withdraw_all(self, peer: str) -> None:
        server = self._pool.find(peer)
        if server is None:
            return
        for uuid in self._by_peer.get(peer, ()):
            entry = self._entries[uuid]
            if not entry.withdrawn:
                server.server.await_pull(uuid, [], timeout=_wall(self._life_s))
                self.counters.registered_bytes -= entry.nbytes
                self.counters.withdrawn += 1
                entry.nbytes, entry.withdrawn = 0, True

    def _forget_due(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            uuid = heapq.heappop(self._deadlines)[1]
            entry = self._entries.get(uuid)
            if entry is None:  # its peer was dropped
                continue
            if entry.deadline > now:
                heapq.heappush(self._deadlines, (entry.deadline, uuid))
                continue
            del self._entries[uuid]
            self._by_peer[entry.peer].discard(uuid)
            self.counters.registered_bytes -= entry.nbytes
            self.counters.expired += not entry.withdrawn


def _wall(life_s: float) -> datetime:
    """The native table compares with the wall clock; the table above is the one that decides."""
    return datetime.now(UTC) + timedelta(seconds=life_s)
