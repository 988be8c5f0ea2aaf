"""D's half of the transport: pulls, the one thread that watches them, and the graveyard.

``pull`` of the native library returns in under a millisecond, but its arrays become ready when they please, fail one
by one, and know no deadline (facts/transfer rules 1, 2). One thread polls them; it never waits inside the native
library, so it can always be stopped. A pull cannot be cancelled: an abandoned one stays here with its connection,
because dropping a connection in use once mixed up other pulls' bytes (facts/transfer row 8). Must never re-pull a
uuid and never poison a connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pdjax.core.errors import ConfigError, PDError
from pdjax.core.pools import Part
from pdjax.engine.jax_transfer import addresses, verify
from pdjax.engine.jax_transfer.servers import PeerServer, ServerPool
from pdjax.engine.kernels.checksum import Verify
from pdjax.engine.ports import PullDone, PullSettled, TransportEvent

log = logging.getLogger(__name__)

# Polling policy: 1 to 2 % of a core with a parked pull, about 0.9 ms of hand-off latency (facts/peer-servers §6).
POLL_MIN_S = 50e-6
POLL_MAX_S = 5e-3
POLL_GROWTH = 1.05
GRAVEYARD_POLL_S = 0.05
# While much is under way the next part cannot be here at once, and each look takes time from the threads that copy it:
# the thread sleeps a part of what the rest takes at the best rate seen. It costs at most that part of the transfer.
BEST_BYTES_S = 4e9
REST_SHARE = 1 / 4
SLICE_PARTS = 32  # settled in one turn of one pull: an error costs 15 us, a checksum of 1 MiB 0.1 ms
SLICE_BYTES = 32 << 20

# Errors of one part that leave the connection sound (facts/transfer rows 2, 5, 6, 7). After any other the connection
# is taken for dead: it fails every later pull at once (row 3), and a needless new one costs a millisecond.
_PART_ONLY = (
    "Buffer id",
    "already been fetched",
    "Pull expired",
    "PullTable",
    "Invalid slicing",
    "Async transfer object was deleted",
    "deleted or donated",
)


@dataclass
class PullCounters:
    """unverified_parts: that D would compare, had P stated checksums. graveyard_bytes: stated, not yet settled."""

    pulls: int = 0
    pulls_live: int = 0
    pulled_bytes: int = 0
    failed_parts: int = 0
    unverified_parts: int = 0
    abandoned: int = 0
    settled: int = 0
    graveyard: int = 0
    graveyard_bytes: int = 0
    reconnects: int = 0
    sink_errors: int = 0
    pulling_peers: int = 0


@dataclass(eq=False)
class _Link:
    """One connection. Referenced by every pull that uses it, so that it outlives them (facts/transfer rule 8)."""

    server: PeerServer
    address: str
    conn: Any
    broken: bool = False


@dataclass(eq=False)
class _Pull:
    """next: the first part that has not settled, rest_bytes: of it and all after it. checked: parts whose bytes are compared. ended: its event is decided and its arrays are gone from here."""

    id: int
    peer: str
    parts: tuple[Part, ...]
    nbytes: int
    started: float
    errors: list[str | None]
    checked: set[int]
    arrays: list[Any] = field(default_factory=list)
    link: _Link | None = None
    next: int = 0
    rest_bytes: int = 0
    abandoned: bool = False
    ended: bool = False

    def __post_init__(self) -> None:
        self.rest_bytes = self.nbytes


class Puller:
    """pull, abandon and drop_peer from any thread; events from the polling thread or from the dropping one."""

    def __init__(self, pool: ServerPool, device: jax.Device, check: Verify) -> None:
        self.counters = PullCounters()
        self._pool = pool
        self._device = device
        self._check = check
        self._sink: Callable[[TransportEvent], None] | None = None
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._table: dict[int, _Pull] = {}
        self._links: dict[str, _Link] = {}
        self._incoming: list[_Pull] = []
        self._watched: list[_Pull] = []  # of the polling thread alone, like _buried
        self._buried: list[_Pull] = []
        self._last_id = 0
        self._closed = False
        self._stop = False
        self._thread: threading.Thread | None = None

    def start(self, sink: Callable[[TransportEvent], None]) -> None:
        if self._thread is not None:
            raise RuntimeError("the transport is started already")
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="pdjax-transfer-poll", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from the driver

    def pull(self, peer: str, address: str, uuid: int, parts: Sequence[Part]) -> int:
        """Start one pull; whatever is wrong with what the peer stated is in the errors of its PullDone."""
        if not parts:
            raise ValueError("a pull needs at least one part")
        with self._lock:
            if self._closed or self._thread is None:
                raise RuntimeError("the transport is not started, or closed")
            self._last_id += 1
            nbytes = sum(part.nbytes for part in parts)
            checked = verify.to_check(parts, self._check, self._last_id)
            if self._check == "all" or (self._check == "sampled" and not checked):
                self.counters.unverified_parts += len(parts) - len(checked)
            pull = _Pull(
                self._last_id, peer, tuple(parts), nbytes, time.monotonic(), [None] * len(parts), checked
            )
            self._table[pull.id] = pull
            self._issue(pull, address, uuid)
            self._incoming.append(pull)
            self.counters.pulls += 1
            self.counters.pulls_live += 1
        self._wake.set()
        return pull.id

    def abandon(self, pull_id: int) -> None:
        """Bury the pull. One whose event was sent already is left as it is: each pull has exactly one event."""
        with self._lock:
            pull = self._table.get(pull_id)
            if pull is not None and not pull.abandoned:
                pull.abandoned = True
                self.counters.abandoned += 1
                self.counters.pulls_live -= 1
                self.counters.graveyard += 1
                self.counters.graveyard_bytes += pull.nbytes
        self._wake.set()

    def drop_peer(self, peer: str) -> None:
        """End all pulls of that peer now, and drop its connection and server with their arrays."""
        with self._lock:
            self._links.pop(peer, None)
            events = self._end_all(
                [p for p in self._table.values() if p.peer == peer], "the peer was dropped"
            )
            self._pool.drop(peer)
            self.counters.pulling_peers = len(self._pool)
        for event in events:
            self._emit(event)

    def reap(self) -> None:
        with self._lock:
            self._pool.reap()

    def close(self, wait_s: float) -> None:
        """Wait at most wait_s for what is in flight, stop the thread, then end the rest and drop all."""
        with self._lock:
            self._closed = True
            self._empty.wait_for(lambda: not self._table, timeout=wait_s)
            self._stop = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()  # it waits for nothing but its own event
        with self._lock:
            events = self._end_all(list(self._table.values()), "the transport was closed")
            self._incoming, self._watched, self._buried = [], [], []
            self._links.clear()
            self._pool.close()
            self.counters.pulling_peers = 0
        for event in events:
            self._emit(event)

    # ------------------------------------------------------------------ under the lock

    def _issue(self, pull: _Pull, address: str, uuid: int) -> None:
        """Ask for the parts, or fill in why they cannot be asked for; then the pull has no arrays to wait for."""
        whys = [verify.malformed(part) for part in pull.parts]
        try:
            if any(whys):
                raise ValueError("not pulled: another part of the manifest is malformed")
            link = self._link(pull.peer, address)
            specs = [verify.spec(part, self._device) for part in pull.parts]
            pull.arrays = list(link.conn.pull(int(uuid), specs))
            pull.link = link
        except (jax.errors.JaxRuntimeError, ValueError, TypeError, PDError, ConfigError) as e:
            pull.errors = [why or str(e) for why in whys]
            pull.next = len(pull.parts)

    def _link(self, peer: str, address: str) -> _Link:
        """The peer's connection; a new one after an error of the old or under a new address (facts/transfer rule 9)."""
        link = self._links.get(peer)
        if link is not None and not link.broken and link.address == address:
            return link
        addresses.split(address)  # a name would be resolved, and numeric ips are the rule
        server = self._pool.get(peer)
        self.counters.pulling_peers = len(self._pool)
        self.counters.reconnects += link is not None
        made = self._links[peer] = _Link(server, address, server.server.connect(address))
        return made

    def _end_all(self, pulls: Iterable[_Pull], why: str) -> list[TransportEvent]:
        events = []
        for pull in pulls:
            pull.errors = [error or why for error in pull.errors]
            events.append(self._end(pull))
        return events

    def _end(self, pull: _Pull) -> TransportEvent:
        """Take the pull out of the table and decide its one event."""
        del self._table[pull.id]
        pull.ended = True
        arrays = [a if error is None else None for a, error in zip(pull.arrays, pull.errors, strict=False)]
        pull.arrays, pull.link = [], None
        if not self._table:
            self._empty.notify_all()
        if pull.abandoned:
            self.counters.settled += 1
            self.counters.graveyard -= 1
            self.counters.graveyard_bytes -= pull.nbytes
            return PullSettled(pull.id)
        self.counters.pulls_live -= 1
        for part, error in zip(pull.parts, pull.errors, strict=True):
            self.counters.failed_parts += error is not None
            self.counters.pulled_bytes += part.nbytes if error is None else 0
        arrays += [None] * (len(pull.parts) - len(arrays))
        return PullDone(pull.id, arrays, tuple(pull.errors), time.monotonic() - pull.started)

    # ------------------------------------------------------------------ the polling thread

    def _run(self) -> None:
        interval = POLL_MIN_S
        graves_due = 0.0
        while True:
            if self._watched:
                woken = self._wake.wait(interval)
            else:
                woken = self._wake.wait(GRAVEYARD_POLL_S if self._buried else None)
            self._wake.clear()
            with self._lock:
                if self._stop:
                    return
                self._watched += self._incoming
                self._incoming = []
            progress = self._turn()
            if self._buried and time.monotonic() >= graves_due:
                graves_due = time.monotonic() + GRAVEYARD_POLL_S
                self._scan_graves()
            interval = POLL_MIN_S if progress or woken else min(interval * POLL_GROWTH, POLL_MAX_S)
            interval = max(interval, self._soonest_s())

    def _turn(self) -> bool:
        """One look at every pull that somebody waits for. True when any part settled."""
        progress = False
        for pull in self._watched:
            progress |= self._advance(pull)
        self._buried += [p for p in self._watched if p.abandoned and not p.ended]
        self._watched = [p for p in self._watched if not p.abandoned and not p.ended]
        return progress

    def _soonest_s(self) -> float:
        """How long the pull that has the least to come may be left alone; at most POLL_MAX_S."""
        rest = min((pull.rest_bytes for pull in self._watched), default=0)
        return min(rest / BEST_BYTES_S * REST_SHARE, POLL_MAX_S)

    def _scan_graves(self) -> None:
        for pull in self._buried:
            self._advance(pull)
        self._buried = [p for p in self._buried if not p.ended]

    def _advance(self, pull: _Pull) -> bool:
        """Settle the parts that are ready, in order and at most a slice; end the pull after its last."""
        arrays = pull.arrays  # a drop from another thread replaces this list, never empties it
        first = pull.next
        nbytes = 0
        while pull.next < len(pull.parts) and pull.next - first < SLICE_PARTS and nbytes < SLICE_BYTES:
            i = pull.next
            if pull.ended or not arrays[i].is_ready():
                break
            pull.errors[i] = self._settle(pull, i, arrays[i])
            if pull.abandoned:
                arrays[i] = None
            nbytes += pull.parts[i].nbytes
            pull.rest_bytes -= pull.parts[i].nbytes
            pull.next += 1
        if pull.next == len(pull.parts):
            self._finish(pull)
        return pull.next > first

    def _settle(self, pull: _Pull, i: int, array: Any) -> str | None:
        """Why part i, which is ready, is not right, or None. Ready is not success (facts/transfer rule 2)."""
        try:
            array.block_until_ready()  # ready: returns or raises at once
            part = pull.parts[i]
            if pull.abandoned:
                return None
            why = verify.wrong(part, array)
            return verify.differs(part, array) if why is None and i in pull.checked else why
        except jax.errors.JaxRuntimeError as e:
            text = str(e)
            if pull.link is not None and not any(mark in text for mark in _PART_ONLY):
                pull.link.broken = True
            return text
        except Exception as e:  # no peer's bytes may end the thread that serves all (S11)
            log.exception("settling part %d of pull %d from %s", i, pull.id, pull.peer)
            return f"{type(e).__name__}: {e}"

    def _finish(self, pull: _Pull) -> None:
        with self._lock:
            if pull.ended:
                return
            event = self._end(pull)
        self._emit(event)

    def _emit(self, event: TransportEvent) -> None:
        try:
            assert self._sink is not None
            self._sink(event)
        except Exception:
            self.counters.sink_errors += 1
            log.exception("the sink of transport events failed on pull %d", event.pull_id)
