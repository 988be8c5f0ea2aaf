"""Simulated ports of a manager under virtual time: side channel, transport, registry client (design §1.3).

The transport behaves as the real one was measured to: a pull may come before its registration, consumes it, fails
part by part, hangs on what was never registered, and ends right when it is withdrawn in flight. Must never import
JAX, read real time or draw at random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from pdjax.core.pools import Part
from pdjax.engine.base import Packed
from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.ports import (
    ChannelEvent,
    Entry,
    FrameIn,
    LookupDone,
    PullDone,
    PullSettled,
    Refused,
    TransportEvent,
)
from pdjax.sim.ports import VirtualClock


class SimNet:
    """Virtual time and everything under way in it."""

    def __init__(self, link_s: float = 0.0002) -> None:
        self.clock = VirtualClock()
        self.link_s = link_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = 0
        self.listening: dict[str, SimChannel] = {}
        self.servers: dict[tuple[str, str], SimServer] = {}
        self.registry: Registry | None = None
        # (from, to, frame) → copies to deliver with their extra delays; the default delivers one at once.
        self.on_frame: Callable[[str, str, bytes], Sequence[float]] = lambda src, dst, frame: (0.0,)
        # (uuid, part) → seconds the part takes, an error text, or None: it never settles.
        self.on_part: Callable[[int, Part], float | str | None] = lambda uuid, part: 0.0001

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (self.clock() + delay_s, self._seq, action))

    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run_due(self) -> bool:
        """Perform what is due now; False: nothing was."""
        worked = False
        while self._heap and self._heap[0][0] <= self.clock():
            heapq.heappop(self._heap)[2]()
            worked = True
        return worked


class SimChannel:
    """A SideChannel. listen: P's address; None on D, whose frames arrive at P under ``name``."""

    def __init__(self, net: SimNet, name: str, listen: str | None) -> None:
        self.net, self.name, self._listen = net, name, listen
        self._inbox: list[ChannelEvent] = []
        self.open = True
        net.listening[listen or name] = self

    @property
    def address(self) -> str | None:
        return self._listen

    def send(self, address: str, frame: bytes) -> bool:
        if not self.open:
            return False
        for delay in self.net.on_frame(self._listen or self.name, address, frame):
            self.net.after(self.net.link_s + delay, lambda: self._arrive(address, frame))
        return True

    def _arrive(self, address: str, frame: bytes) -> None:
        there = self.net.listening.get(address)
        if there is not None and there.open:
            there._inbox.append(FrameIn(self._listen or self.name, frame))
        elif self._listen is None and self.open:
            self._inbox.append(Refused(address))

    def receive(self) -> list[ChannelEvent]:
        got, self._inbox = self._inbox, []
        return got

    def wait(self, timeout_s: float) -> None:
        raise RuntimeError("a simulated driver is pumped, it never waits")

    def wake(self) -> None:
        pass

    def forget(self, address: str) -> None:
        pass

    def close(self) -> None:
        self.open = False


@dataclass
class SimServer:
    """One P-side transfer server, for one life of one D."""

    offers: dict[int, list[Any] | None] = field(
        default_factory=dict
    )  # uuid → arrays by part (None once taken); None: withdrawn
    parked: dict[int, list[_Pull]] = field(default_factory=dict)
    open: bool = True


@dataclass
class _Pull:
    pull_id: int
    peer: str
    uuid: int
    parts: tuple[Part, ...]
    started: float
    server: SimServer | None
    arrays: list[Any] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    missing: int = 0
    abandoned: bool = False


class SimTransport:
    """A Transport between SimTransports of one net. name: this process, in the addresses of its servers."""

    def __init__(self, net: SimNet, name: str) -> None:
        self.net, self.name = net, name
        self._sink: Callable[[TransportEvent], None] = lambda event: None
        self._pulls: dict[int, _Pull] = {}
        self._next_id = 1
        self._seen: dict[int, str] = {}
        self.open = True

    def start(self, sink: Callable[[TransportEvent], None]) -> None:
        self._sink = sink

    # ---------------------------------------------------------------- P

    def _server(self, peer: str) -> SimServer:
        return self.net.servers.setdefault((self.name, peer), SimServer())

    def offer(self, peer: str, uuid: int, packed: Packed) -> None:
        if uuid in self._seen:
            raise ValueError(f"uuid {uuid} was registered before")
        for part, array in zip(packed.parts, packed.arrays, strict=True):
            if tuple(array.shape) != tuple(part.shape) or array.nbytes != part.nbytes:
                raise ValueError(f"part {part.chunk} is not what its array is")
        self._seen[uuid] = peer
        server = self._server(peer)
        server.offers[uuid] = list(packed.arrays)
        self._match(server, uuid)

    def _match(self, server: SimServer, uuid: int) -> None:
        for pull in server.parked.pop(uuid, []):
            self._serve(server, pull)

    def _serve(self, server: SimServer, pull: _Pull) -> None:
        """A pull meets a registration: each part is consumed once, a withdrawn one fails every part."""
        offer = server.offers.get(pull.uuid, False)
        if offer is False or (offer is not None and all(a is None for a in offer)):
            server.parked.setdefault(pull.uuid, []).append(pull)
            return
        for i, part in enumerate(pull.parts):
            if offer is None or i >= len(offer):
                self._part_ended(pull, i, None, f"Buffer id: {i} out of range 0")
                continue
            array, offer[i] = offer[i], None
            if array is None:
                self._part_ended(pull, i, None, f"Buffer id: {i} has already been fetched")
                continue
            fate = self.net.on_part(pull.uuid, part)
            if isinstance(fate, str):
                self._part_ended(pull, i, None, fate)
            elif fate is not None:
                self.net.after(fate, lambda i=i, a=array: self._landed(pull, i, a))  # type: ignore[misc]

    def address_for(self, peer: str) -> str:
        self._server(peer)
        return f"{self.name}|{peer}"

    def withdraw(self, peer: str, uuid: int, life_s: float) -> None:
        server = self._server(self._seen.get(uuid, peer))
        server.offers[uuid] = None
        self._match(server, uuid)

    # ---------------------------------------------------------------- D

    def pull(self, peer: str, address: str, uuid: int, parts: Sequence[Part]) -> int:
        pull_id, self._next_id = self._next_id, self._next_id + 1
        name, _, key = address.partition("|")
        server = self.net.servers.get((name, key))
        pull = _Pull(
            pull_id,
            peer,
            uuid,
            tuple(parts),
            self.net.clock(),
            server,
            [None] * len(parts),
            ["pending"] * len(parts),
            len(parts),
        )
        self._pulls[pull_id] = pull
        self.net.after(self.net.link_s, lambda: self._connect(pull))
        return pull_id

    def _connect(self, pull: _Pull) -> None:
        if pull.pull_id not in self._pulls:
            return
        if pull.server is None or not pull.server.open:
            for i in range(len(pull.parts)):
                self._part_ended(pull, i, None, "Connection closed")
        else:
            self._serve(pull.server, pull)

    def _landed(self, pull: _Pull, i: int, array: np.ndarray[Any, Any]) -> None:
        part = pull.parts[i]
        error = None
        if tuple(array.shape) != tuple(part.shape) or array.nbytes != part.nbytes:
            error = "shape or size differ from the manifest"
        elif part.checksum and xxhash.xxh3_64_intdigest(np.ascontiguousarray(array)) != part.checksum:
            error = "checksum differs from the manifest"
        self._part_ended(pull, i, array, error)

    def _part_ended(self, pull: _Pull, i: int, array: Any, error: str | None) -> None:
        if pull.errors[i] != "pending":
            return
        pull.arrays[i], pull.errors[i] = array, error
        pull.missing -= 1
        if pull.missing or self._pulls.pop(pull.pull_id, None) is None:
            return
        if pull.abandoned:
            self._sink(PullSettled(pull.pull_id))
        else:
            self._sink(
                PullDone(
                    pull.pull_id, tuple(pull.arrays), tuple(pull.errors), self.net.clock() - pull.started
                )
            )

    def abandon(self, pull_id: int) -> None:
        if pull_id in self._pulls:
            self._pulls[pull_id].abandoned = True

    def drop_peer(self, peer: str) -> None:
        server = self.net.servers.pop((self.name, peer), None)
        if server is not None:
            server.open = False
            server.offers.clear()
        for pull in [p for p in self._pulls.values() if p.peer == peer]:
            for i in range(len(pull.parts)):
                self._part_ended(pull, i, None, "the peer was dropped")

    def tick(self) -> None:
        pass

    def close(self, wait_s: float) -> None:
        self.open = False
        for name, peer in [k for k in self.net.servers if k[0] == self.name]:
            del self.net.servers[name, peer]

    def unpulled(self) -> int:
        """Registrations that still hold bytes (for checks)."""
        return sum(
            o is not None and any(a is not None for a in o)
            for (name, _), s in self.net.servers.items()
            if name == self.name
            for o in s.offers.values()
        )


class SimRegistryClient:
    """A RegistryClient over the registry object itself, one link away."""

    def __init__(self, net: SimNet, fingerprint: str) -> None:
        self.net, self._fingerprint = net, fingerprint
        self._sink: Callable[[LookupDone], None] = lambda done: None

    def start(self, sink: Callable[[LookupDone], None]) -> None:
        self._sink = sink

    def announce(self, registration: Mapping[str, Any]) -> None:
        if self.net.registry is not None:
            self.net.registry.register(registration, self.net.clock())

    def lookup(self, tag: int, host: str, port: int | None) -> None:
        self.net.after(2 * self.net.link_s, lambda: self._sink(self._answer(tag)))

    def _answer(self, tag: int) -> LookupDone:
        if self.net.registry is None:
            return LookupDone(tag, (), {}, "the registry does not answer")
        listed = self.net.registry.list("prefill", self.net.clock(), self._fingerprint)
        entries = tuple(
            Entry(s.seat.key.instance_id, s.seat.epoch, s.seat.zmq_addr, s.seat.serving_url)
            for s in listed
            if s.reason is None
        )
        return LookupDone(tag, entries, {s.seat.key.instance_id: s.reason for s in listed if s.reason}, None)

    def close(self) -> None:
        pass
