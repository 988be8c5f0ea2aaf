"""What a manager and a scheduler need from the world, as protocols.

Real parts and simulated ones implement the same protocol and pass the same contract tests (design §3): no fake
behaves better than the real part. Must never import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pdjax.core.budget import Slot
from pdjax.core.pools import Part, PoolTransferSpec
from pdjax.engine.base import Packed

# ---------------------------------------------------------------- transport


@dataclass(frozen=True)
class PullDone:
    """A pull that was not abandoned has ended. errors[i] is None when part i is here, verified, right."""

    pull_id: int
    arrays: Sequence[Any]
    errors: tuple[str | None, ...]
    seconds: float


@dataclass(frozen=True)
class PullSettled:
    """An abandoned pull can touch P's bytes no more (it completed, failed, or its peer was dropped)."""

    pull_id: int


TransportEvent = PullDone | PullSettled


class Transport(Protocol):
    """Moves packed arrays. ``peer`` is an opaque key that names one life of one peer: ``instance_id:epoch``.

    No method blocks. Events go to the sink given to ``start``, from any thread.
    """

    def start(self, sink: Callable[[TransportEvent], None]) -> None: ...

    def offer(self, peer: str, uuid: int, packed: Packed) -> None:
        """P: register the arrays under uuid on that peer's own server. A uuid seen before raises ValueError."""

    def address_for(self, peer: str) -> str:
        """P: "ip:port" of that peer's server, started if need be."""

    def withdraw(self, peer: str, uuid: int, life_s: float) -> None:
        """P: fence the uuid: a pull in flight ends right, a later one fails on every part. Repeatable."""

    def pull(self, peer: str, address: str, uuid: int, parts: Sequence[Part]) -> int:
        """D: start pulling into temporary buffers; the returned id is in the event that ends it."""

    def abandon(self, pull_id: int) -> None:
        """D: lose interest. PullSettled follows when the pull is quiescent; PullDone does not."""

    def drop_peer(self, peer: str) -> None:
        """Give up that peer's server, connection and abandoned pulls (which settle now)."""

    def tick(self) -> None:
        """Make the transport's own lazy timeouts fire (facts/transfer, rule 5)."""

    def close(self, wait_s: float) -> None:
        """Withdraw everything, wait at most wait_s for bytes in flight, stop."""


# ---------------------------------------------------------------- side channel


@dataclass(frozen=True)
class FrameIn:
    address: str
    frame: bytes


@dataclass(frozen=True)
class Refused:
    """Nobody listens at that address (seen by the socket monitor; sends report nothing)."""

    address: str


ChannelEvent = FrameIn | Refused


class SideChannel(Protocol):
    """Datagram-like frames between P and D. On D an address is P's "ip:port".

    On P it names one connection and says nothing of who is behind it: a D that connects again has another.
    """

    @property
    def address(self) -> str | None:
        """What to advertise; None on D."""

    def send(self, address: str, frame: bytes) -> bool:
        """Never blocks. False: the queue was full or the address is gone, and the frame is dropped."""

    def receive(self) -> list[ChannelEvent]:
        """Whatever has arrived, without waiting."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrived, ``wake`` was called, or the time is over. Driver thread only."""

    def wake(self) -> None:
        """End a wait, from any thread."""

    def forget(self, address: str) -> None:
        """Close the connection to that address."""

    def close(self) -> None: ...


# ---------------------------------------------------------------- registry


@dataclass(frozen=True)
class Entry:
    """One registered instance as D sees it."""

    instance_id: str
    epoch: int
    zmq_addr: str
    serving_url: str


@dataclass(frozen=True)
class LookupDone:
    """The answer to ``lookup(tag, …)``. error is None when the registry answered, even with no entry.

    rejected: instance_id → why it is not compatible, for the message that a client or operator reads.
    """

    tag: int
    entries: tuple[Entry, ...]
    rejected: Mapping[str, str]
    error: str | None


class RegistryClient(Protocol):
    """Talks to the bootstrap server in the background; answers go to the sink, from any thread."""

    def start(self, sink: Callable[[LookupDone], None]) -> None: ...

    def announce(self, registration: Mapping[str, Any]) -> None:
        """Register and keep alive until ``leave`` or ``close`` (which takes the entry out)."""

    def lookup(self, tag: int, host: str, port: int | None) -> None:
        """Prefill instances at the registry (host, port); None as port: the configured one."""

    def drain(self) -> None:
        """Tell it that this instance takes nothing new. Who looks for the P of a room still finds it."""

    def leave(self) -> None:
        """Out of the registry, for good. Look-ups go on. Repeatable."""

    def close(self) -> None: ...


Clock = Callable[[], float]  # monotonic seconds of this process; never compared with another's (S15)

# ---------------------------------------------------------------- runner


@dataclass(frozen=True, eq=False)
class Edits:
    """Changes of single logits before the draw: v becomes (v / scale if v > 0 else v · scale) + add.

    ids: int32 [k], distinct. scale, add: float32 [k]; add may be -inf, which forbids the token.
    """

    ids: np.ndarray
    scale: np.ndarray
    add: np.ndarray


@dataclass(frozen=True)
class SampleSpec:
    """What decides one sampled token. The key of the random draw is (seed, position) only, so that P, D and a
    server without PD draw the same token wherever the step happens to run.

    Order: edits, allowed, temperature; then top_k, top_p and min_p each set a least probability, and the highest of
    the three counts. top_k 0: all tokens. allowed: bit i % 32 of word i // 32 is set where token i may be drawn,
    uint32 [ceil(vocab_size / 32)]. n_top: how many of the likeliest tokens the answer lists (at most
    core.wire.MAX_TOP_LOGPROBS).
    """

    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n_top: int = 0
    edits: Edits | None = None
    allowed: np.ndarray | None = None

    @property
    def plain(self) -> bool:
        """The draw is over the model's own distribution: nothing is edited, forbidden or cut off."""
        cut = self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
        return not cut and self.edits is None and self.allowed is None


NO_SLOT = -1  # of a launch whose sampled token no later one needs from the device


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens at positions [start, start + len(tokens)); pages: the request's whole page table so far.

    slot: where the runner keeps the sampled token for the request's next row (NO_SLOT: nowhere).
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: SampleSpec | None  # None: not the last chunk, nothing is sampled
    slot: int = NO_SLOT


@dataclass(frozen=True)
class DecodeRow:
    """One running request: its newest token, that token's position, its page table.

    token None: the one that an earlier launch put into the slot; the host may not have read it yet (RFC-2 §5.4).
    """

    token: int | None
    position: int
    pages: Sequence[int]
    sample: SampleSpec
    slot: int = NO_SLOT


@dataclass(frozen=True)
class Sampled:
    """A token and its log-probability by the model itself: at temperature 1, before edits and masks.

    top: the likeliest (token, log-probability) pairs at its position, best first, as many as n_top asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Launched = Any  # names a launch to the runner that made it; nobody else looks inside


class Runner(Protocol):
    """The model on a device. Owns the pools; called by the scheduler thread alone.

    prefill and decode launch, collect waits. Launches, gathers and scatters take effect in the order of the calls,
    whatever has been collected by then. Slots are 0 … max_batch - 1.
    """

    page_size: int
    num_pages: int  # including the reserved page 0
    max_batch: int  # rows of the largest decode bucket
    pools: Sequence[PoolTransferSpec]

    def prefill(self, chunk: PrefillChunk) -> Launched | None:
        """None when the chunk samples nothing: then there is nothing to collect."""

    def decode(self, rows: Sequence[DecodeRow]) -> Launched: ...

    def collect(self, launched: Launched) -> Sequence[Sampled]:
        """Wait for a launch: what each of its rows sampled. Once for each, in the order of the launches."""

    def score(self, first: int, tokens: Sequence[int], n_top: int) -> Sequence[Sampled]:
        """Of the latest prefill call: each given token as if it had been sampled after the chunk's token first, first + 1, …"""

    def gather(self, pages: Sequence[int], slot: Slot | None = None) -> Packed:
        """Copy these pages into private packed arrays, with checksums as configured.

        slot: a reserved one of exactly their bytes: the arrays lie in its host memory, what was there before is
        overwritten, and nothing of the copy stays on the device.
        """

    def scatter(self, pages: Sequence[int], packed: Packed) -> None:
        """Write packed arrays into these pages, all layers."""
