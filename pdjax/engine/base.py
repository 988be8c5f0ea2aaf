"""The 4-tuple of RFC-2 §5.1: manager, sender, receiver, bootstrap server, as a scheduler sees them.

The scheduler thread calls these and nothing here ever blocks: a call runs the protocol's table under the
manager's lock and leaves the port work to the driver thread. Must never import JAX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import KVArgs, Part
from pdjax.core.wire import FirstToken as FirstToken


@dataclass(frozen=True)
class Leg:
    """One half of a request as the HTTP layer claims it (both roles)."""

    room: int
    rid: str
    digest: str
    n_prompt: int
    bootstrap_host: str
    bootstrap_port: int | None


@dataclass(frozen=True)
class Packed:
    """Private packed arrays of one hand-off (protocol §6): parts state them, arrays are in the same order."""

    parts: tuple[Part, ...]
    arrays: Sequence[Any]


@dataclass(frozen=True)
class KVReady:
    """D: P has registered the KV; the room joins the page queue (FIFO by the order of these events)."""

    room: int
    n_tokens: int
    n_pages: int
    first: FirstToken


@dataclass(frozen=True)
class KVLanded:
    """D: every part is here and verified. Scatter into the pages of ``token``, then ``receiver.commit()``."""

    room: int
    token: int
    packed: Packed


@dataclass(frozen=True)
class KVEnded:
    """The room has failed: stop its work, free its pages, answer its client with ``status`` if still open."""

    room: int
    status: int
    reason: str
    message: str


@dataclass(frozen=True)
class KVReleased:
    """P: bytes of budget came back; waiting rooms may be admitted now (V11: no lost wake-up)."""


@dataclass(frozen=True)
class KVWanted:
    """P, gated: a D has said hello to this room, which may ask for budget now."""

    room: int


KVEvent = KVReady | KVLanded | KVEnded | KVReleased | KVWanted


class BaseKVSender(ABC):
    """P's half of one room."""

    room: int

    @abstractmethod
    def wanted(self) -> bool:
        """The prompt may be prefilled as far as D is concerned. False, gated: KVWanted follows, or KVEnded."""

    @abstractmethod
    def admit(self, n_bytes: int) -> bool:
        """Reserve n_bytes of the unpulled budget before prefill (S17). False: not now, or the room has ended."""

    @abstractmethod
    def send(self, kv_indices: Sequence[int], first: FirstToken) -> bool:
        """Gather these pages (on the calling scheduler thread) and offer them. The pages are free on return.

        False: the room ended meanwhile, nothing was offered.
        """

    @abstractmethod
    def poll(self) -> KVPoll: ...

    @abstractmethod
    def abort(self, reason: str = "client_abort") -> None:
        """End the room from this side. A room that has ended already is left as it is."""

    @abstractmethod
    def failure_exception(self) -> Exception | None: ...


class BaseKVReceiver(ABC):
    """D's half of one room."""

    room: int
    token: int  # the attempt: owns the pages

    @abstractmethod
    def receive(self, kv_indices: Sequence[int]) -> bool:
        """Start the pull into temporary buffers, for pages owned under ``token``. False: not now, or ended."""

    @abstractmethod
    def commit(self) -> bool:
        """The landed parts are scattered: Success, P is told. False: the room ended before."""

    @abstractmethod
    def poll(self) -> KVPoll: ...

    @abstractmethod
    def abort(self, reason: str = "client_abort") -> None: ...

    @abstractmethod
    def failure_exception(self) -> Exception | None: ...


class BaseKVManager(ABC):
    """One per process. ``register_runner`` is explicit: the pool holds no reference back (RFC-2 §5.1)."""

    def __init__(self, args: KVArgs, bootstrap_addr: str) -> None:
        self.args = args
        self.bootstrap_addr = bootstrap_addr

    @abstractmethod
    def register_runner(self, runner: Any) -> None:
        """The object with ``gather(pages, slot) -> Packed``, called by ``send`` on the scheduler thread."""

    @abstractmethod
    def claim(self, leg: Leg) -> None:
        """Take a room at intake, from any thread. Raises PDError with status 400 (duplicate, bad) or 503."""

    @abstractmethod
    def create_sender(self, room: int) -> BaseKVSender:
        """P: the sender of a claimed room."""

    @abstractmethod
    def create_receiver(self, room: int, bootstrap_addr: str) -> BaseKVReceiver:
        """D: the receiver of a claimed room."""

    @abstractmethod
    def live_rooms(self, rid: str | None) -> dict[int, KVPoll]:
        """Rooms of requests with exactly this rid, or all, that have not ended here. From any thread."""

    def note(self, event: str, room: int | None = None, **fields: Any) -> None:
        """A line of the event log from the scheduler thread. Without a log: nothing."""
        return None

    @abstractmethod
    def take_events(self) -> list[KVEvent]:
        """What happened since the last call, in order; for the scheduler thread only."""


class BaseKVBootstrapServer(ABC):
    """The HTTP registry where P and D meet (RFC-2 §5.3)."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def poll(self) -> KVPoll:
        """WaitingForInput while it serves, Failed when it has died, Bootstrapping before."""
