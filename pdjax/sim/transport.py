"""The simulated transport: as the real one was measured to behave, which is worse than one would wish.

A pull may come before its registration, consumes it, fails part by part, hangs on what was never registered, ends
right when it is withdrawn in flight, and outlives the interest of both sides (facts/transfer, facts/peer-servers).
Must never import JAX, read real time or draw at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash

from pdjax.core.pools import Part, misstated
from pdjax.engine.base import Packed
from pdjax.engine.ports import PullDone, PullSettled, TransportEvent
from pdjax.sim.net import SimNet, _is_address

Verify = Literal["off", "sampled", "all"]
SAMPLE_EVERY = 8  # as the real transport samples
PENDING = "pending"


@dataclass
class Offer:
    """One uuid in a native table: the arrays that are left (None: consumed), or withdrawn (no arrays at all)."""

    arrays: list[Any]
    until: float
    withdrawn: bool = False

    @property
    def holds_bytes(self) -> bool:
        return any(a is not None for a in self.arrays)


@dataclass
class SimServer:
    """One P-side transfer server, for one life of one D. dead: its process has ended."""

    owner: SimTransport
    peer: str
    address: str
    offers: dict[int, Offer] = field(default_factory=dict)
    parked: dict[int, list[Pull]] = field(default_factory=dict)
    pulls: dict[tuple[str, int], Pull] = field(default_factory=dict)
    open: bool = True
    dead: bool = False


@dataclass
class Pull:
    """One pull of D's. errors[i]: pending, None (here and right) or why not. rule: what a fault does to it."""

    owner: SimTransport
    pull_id: int
    peer: str
    uuid: int
    parts: tuple[Part, ...]
    started: float
    server: SimServer | None
    arrays: list[Any]
    errors: list[str | None]
    missing: int
    abandoned: bool = False
    served: bool = False
    rule: Any = None
    hung: bool = False

    @property
    def held_bytes(self) -> int:
        """P's bytes that are still under way for this pull."""
        if not self.served:
            return 0
        return sum(p.nbytes for p, e in zip(self.parts, self.errors, strict=True) if e == PENDING)


def malformed(part: Part) -> str | None:
    """Why this part cannot be pulled at all, or None."""
    try:
        itemsize = np.dtype(part.dtype).itemsize
    except TypeError:
        return f"dtype {part.dtype!r} is unknown"
    return misstated(part, itemsize)


def differs(part: Part, array: np.ndarray[Any, Any]) -> str | None:
    """How an array differs from its part in shape, dtype or size."""
    if array.shape != tuple(part.shape) or array.dtype != part.dtype or array.nbytes != part.nbytes:
        return f"part is {array.dtype}{list(array.shape)}, stated {part.dtype}{list(part.shape)}"
    return None


class SimTransport:
    """A Transport between SimTransports of one net. name: this process, "node@epoch"."""

    # Expiry is looked at when a pull comes; the tick only lets go of memory, so a simulated driver need not turn for it.
    tick_s = 10.0

    def __init__(
        self, net: SimNet, name: str, *, verify: Verify = "all", offer_life_s: float = float("inf")
    ) -> None:
        self.net, self.name, self.verify, self._offer_life_s = net, name, verify, offer_life_s
        self.node = name.partition("@")[0]
        self.pulls: dict[int, Pull] = {}
        self.open = True
        self._sink: Callable[[TransportEvent], None] = lambda event: None
        self._next_id = 1
        self._seen: dict[int, str] = {}
        self._servers: dict[str, SimServer] = {}
        self._connected: dict[str, SimServer] = {}

    def start(self, sink: Callable[[TransportEvent], None]) -> None:
        self._sink = sink

    # ---------------------------------------------------------------- P

    def _server(self, peer: str) -> SimServer:
        server = self._servers.get(peer)
        if server is None:
            address = f"{self.net.ip_of(self.node)}:{self.net.new_port()}"
            server = self._servers[peer] = self.net.servers[address] = SimServer(self, peer, address)
        return server

    def offer(self, peer: str, uuid: int, packed: Packed) -> None:
        if not 0 < uuid < 1 << 64:
            raise ValueError(f"uuid {uuid} must be in 1 … 2^64-1")
        if not packed.parts or len(packed.parts) != len(packed.arrays):
            raise ValueError(f"{len(packed.parts)} parts for {len(packed.arrays)} arrays")
        for i, (part, array) in enumerate(zip(packed.parts, packed.arrays, strict=True)):
            if (why := malformed(part) or differs(part, array)) is not None:
                raise ValueError(f"part {i}: {why}")
        if uuid in self._seen:
            raise ValueError(f"uuid {uuid} was registered before")
        self._seen[uuid] = peer
        server = self._server(peer)
        server.offers[uuid] = Offer(list(packed.arrays), self.net.clock() + self._offer_life_s)
        self._match(server, uuid)

    def address_for(self, peer: str) -> str:
        return self._server(peer).address

    def withdraw(self, peer: str, uuid: int, life_s: float) -> None:
        server = self._servers.get(peer)
        if server is None or self._seen.get(uuid) != peer:
            return
        server.offers[uuid] = Offer([], self.net.clock() + life_s, withdrawn=True)
        self._match(server, uuid)

    def _match(self, server: SimServer, uuid: int) -> None:
        for pull in server.parked.pop(uuid, []):
            self._serve(server, pull)

    def _serve(self, server: SimServer, pull: Pull) -> None:
        """A pull meets the table: each array is consumed once, a withdrawn uuid fails every part."""
        offer = server.offers.get(pull.uuid)
        if (
            offer is None
            or offer.until <= self.net.clock()
            or (not offer.withdrawn and not offer.holds_bytes)
        ):
            server.parked.setdefault(pull.uuid, []).append(pull)
            return
        pull.served = True
        at = 0.0
        for i, part in enumerate(pull.parts):
            if i >= len(offer.arrays):
                self._later(pull, i, None, f"Buffer id: {i} out of range {len(offer.arrays)}", 0.0)
                continue
            array, offer.arrays[i] = offer.arrays[i], None
            if array is None:
                self._later(pull, i, None, f"Buffer id: {i} has already been fetched", 0.0)
                continue
            at += (part.page_stop - part.page) * self.net.page_s
            self._send_part(pull, i, array, at)

    def _send_part(self, pull: Pull, i: int, array: Any, at: float) -> None:
        net = self.net
        if net.on_part is not None:
            fate = net.on_part(pull.uuid, pull.parts[i])
            if isinstance(fate, float | int):
                self._later(pull, i, array, None, fate)
            elif fate is not None:
                self._later(pull, i, None, fate, 0.0)
            return
        if pull.rule is not None:
            array, error, extra = pull.rule(i, array)
            if extra is None:
                pull.hung = True
                return
            self._later(pull, i, array, error, at + extra)
            return
        self._later(pull, i, array, None, at)

    def _later(self, pull: Pull, i: int, array: Any, error: str | None, delay_s: float) -> None:
        name = ("land", pull.owner.node, self.node, pull.pull_id, i)
        owner = pull.owner
        self.net.after(
            self.net.link_s + delay_s,
            lambda: self.net.when_open(
                owner.node, self.node, lambda: owner._landed(pull, i, array, error), name
            ),
            name,
        )

    def unpulled(self) -> int:
        """Registrations that still hold bytes (for checks)."""
        return sum(o.holds_bytes for s in self._servers.values() for o in s.offers.values())

    def flying_bytes(self) -> int:
        """Bytes of this process that a pull still holds, withdrawn or not."""
        return sum(pull.held_bytes for server in self._servers.values() for pull in server.pulls.values())

    # ---------------------------------------------------------------- D

    def pull(self, peer: str, address: str, uuid: int, parts: Sequence[Part]) -> int:
        if not parts:
            raise ValueError("a pull needs at least one part")
        pull_id, self._next_id = self._next_id, self._next_id + 1
        n, server = len(parts), self.net.servers.get(address)
        pull = Pull(
            self, pull_id, peer, uuid, tuple(parts), self.net.clock(), server, [None] * n, [PENDING] * n, n
        )
        self.pulls[pull_id] = pull
        wrong = [malformed(part) for part in parts]
        if any(wrong):
            errors = [why or "not pulled: another part of the manifest is malformed" for why in wrong]
        elif not _is_address(address):
            errors = [f"address {address!r} must be ip:port"] * n
        else:
            errors = []
        if errors:
            self.net.after(0.0, lambda: self._fail(pull, errors), ("land", self.node, "", pull_id, 0))
            return pull_id
        if server is not None:
            server.pulls[self.name, pull_id] = pull
            if self.net.part_rules is not None:
                pull.rule = self.net.part_rules(pull, uuid)
            name = ("pull", self.node, server.owner.node, pull_id)
            self.net.after(
                self.net.link_s,
                lambda: self.net.when_open(self.node, server.owner.node, lambda: self._connect(pull), name),
                name,
            )
        return pull_id

    def _connect(self, pull: Pull) -> None:
        """At P's door. Nobody there: the connect is tried for ever; a connection that broke stays broken."""
        server = pull.server
        assert server is not None
        if pull.pull_id not in self.pulls:
            return
        if server.open:
            self._connected[pull.peer] = server
            server.owner._serve(server, pull)
        elif server.dead and self._connected.get(pull.peer) is server:
            self._fail(pull, ["Connection closed"] * len(pull.parts))

    def _fail(self, pull: Pull, errors: Sequence[str]) -> None:
        for i, error in enumerate(errors):
            self._part_ended(pull, i, None, error)

    def _landed(self, pull: Pull, i: int, array: Any, error: str | None) -> None:
        if pull.errors[i] != PENDING:
            return
        part = pull.parts[i]
        if error is None:
            error = differs(part, array)
        if error is None and part.checksum and self._is_checked(pull.pull_id, i):
            found = xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).data)
            if found != part.checksum:
                error = f"checksum is {found:016x}, stated {part.checksum:016x}"
        # A wire copies: what lands is D's own, whatever P writes into its slot from now on.
        self._part_ended(pull, i, None if error else array.copy(), error)

    def _is_checked(self, pull_id: int, i: int) -> bool:
        return self.verify == "all" or (self.verify == "sampled" and (pull_id + i) % SAMPLE_EVERY == 0)

    def _part_ended(self, pull: Pull, i: int, array: Any, error: str | None) -> None:
        if pull.errors[i] != PENDING:
            return
        pull.arrays[i], pull.errors[i] = array, error
        pull.missing -= 1
        if pull.missing or self.pulls.pop(pull.pull_id, None) is None:
            return
        if pull.server is not None:
            pull.server.pulls.pop((self.name, pull.pull_id), None)
        if pull.abandoned:
            self._sink(PullSettled(pull.pull_id))
        else:
            seconds = self.net.clock() - pull.started
            self._sink(PullDone(pull.pull_id, tuple(pull.arrays), tuple(pull.errors), seconds))

    def abandon(self, pull_id: int) -> None:
        if pull_id in self.pulls:
            self.pulls[pull_id].abandoned = True

    # ---------------------------------------------------------------- both

    def drop_peer(self, peer: str) -> None:
        server = self._servers.pop(peer, None)
        if server is not None:
            for uuid in list(server.offers):  # withdrawn first: what waits there gets its error
                server.offers[uuid] = Offer([], float("inf"), withdrawn=True)
                self._match(server, uuid)
            server.open = False
            server.offers.clear()
        self._connected.pop(peer, None)
        for pull in [p for p in self.pulls.values() if p.peer == peer]:
            self._fail(pull, ["the peer was dropped"] * len(pull.parts))

    def tick(self) -> None:
        """The native table's lazy timeouts fire only when it is touched (facts/transfer rule 5)."""
        now = self.net.clock()
        for server in self._servers.values():
            for uuid in [u for u, o in server.offers.items() if o.until <= now]:
                del server.offers[uuid]

    def close(self, wait_s: float) -> None:
        """Also the death of the process: every pull from it fails at once, as its connections are reset."""
        if not self.open:
            return
        self.open = False
        for pull in list(self.pulls.values()):
            self._fail(pull, ["the transport was closed"] * len(pull.parts))
        for server in self._servers.values():
            server.open, server.dead = False, True
            server.offers.clear()
            for pull in list(server.pulls.values()):
                self._reset(pull)
        self._servers.clear()

    def _reset(self, pull: Pull) -> None:
        owner, name = pull.owner, ("reset", pull.owner.node, self.node, pull.pull_id)
        self.net.after(
            self.net.reset_s,
            lambda: self.net.when_open(
                owner.node,
                owner.node,
                lambda: owner._fail(pull, ["Connection closed"] * len(pull.parts)),
                name,
            ),
            name,
        )
