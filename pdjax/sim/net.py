"""What lies between simulated processes: links, partitions, stopped processes, and the side channel over them.

The channel behaves as ZMQ was measured to: a frame waits for a connect, a refused one is reported once for each send,
the death of a connected peer is seen without a send, frames of one sender keep their order. Must never import JAX,
read real time, or decode a frame (faults do).
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pdjax.core.pools import Part
from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.ports import ChannelEvent, FrameIn, Refused
from pdjax.faults.frames import Copy
from pdjax.sim.loop import GAP_S, Loop, Name

if TYPE_CHECKING:
    from pdjax.sim.transport import SimServer

QUEUE_FRAMES = 64  # of a D to a P that is not there, as the real channel has it
RECONNECT_S = 0.05

REGISTRY = "b0"


class SimNet(Loop):
    """Virtual time and everything under way in it.

    Names of processes are "node@epoch"; what stands before the @ is the node that is stopped or cut off.
    """

    def __init__(
        self, link_s: float = 0.0002, *, jitter_s: float = 0.0, seed: int = 0, choices: Iterable[Name] = ()
    ) -> None:
        super().__init__(seed, choices)
        self.link_s, self.jitter_s = link_s, jitter_s
        self.channels: dict[str, SimChannel] = {}  # P's address or D's identity → who listens there
        self.servers: dict[str, SimServer] = {}  # "ip:port" of a transfer server
        self.registry: Registry | None = None  # None: the registry's process is dead
        self.on_member: Callable[[str, str], None] = lambda event, instance: None
        self.page_s = 0.0001  # one page of one part through the transport
        self.reset_s = link_s  # until a pull whose peer has died is seen to have failed
        # (from, to, frame) → copies to deliver with their extra delays; for tests that need no rules.
        self.on_frame: Callable[[str, str, bytes], Sequence[float]] | None = None
        # (uuid, part) → seconds the part takes, an error text, or None: it never settles.
        self.on_part: Callable[[int, Part], float | str | None] | None = None
        # The same two for rules that name nodes; set by a world with faults.
        self.frame_rules: Callable[[str, str, bytes], list[Copy]] | None = None
        self.frame_name: Callable[[str, str, bytes], Name] = lambda src, dst, frame: ("deliver", src, dst)
        self.part_rules: Callable[[Any, int], Any] | None = None
        self._frozen_until: dict[str, float] = {}
        self._cut_until: dict[tuple[str, str], float] = {}
        self._last_on_link: dict[tuple[str, str], float] = {}
        self._ips: dict[str, str] = {}
        self._ports = 20000

    # ---------------------------------------------------------------- names

    def ip_of(self, node: str) -> str:
        """A numeric address for a node, the same for all its lives."""
        if node not in self._ips:
            n = len(self._ips) + 1
            self._ips[node] = f"10.0.{n >> 8}.{n & 255}"
        return self._ips[node]

    def new_port(self) -> int:
        self._ports += 1
        return 20000 + self._ports % 40000

    # ---------------------------------------------------------------- stopped and cut off

    def freeze(self, node: str, for_s: float) -> None:
        """The process is stopped and continued: SIGSTOP, a long pause of the machine."""
        self._frozen_until[node] = max(self._frozen_until.get(node, 0.0), self.clock() + for_s)

    def thaw(self, node: str) -> None:
        self._frozen_until.pop(node, None)

    def frozen(self, node: str) -> float:
        """Until when the node is stopped; 0: it runs."""
        if not self._frozen_until:
            return 0.0
        until = self._frozen_until.get(node, 0.0)
        return until if until > self.clock.now_s else 0.0

    def cut(self, a: str, b: str, for_s: float) -> None:
        """Nothing passes between a and b, silently."""
        key = (a, b) if a < b else (b, a)
        self._cut_until[key] = max(self._cut_until.get(key, 0.0), self.clock() + for_s)

    def is_cut(self, a: str, b: str) -> float:
        """Until when; 0: they reach each other."""
        if not self._cut_until:
            return 0.0
        until = self._cut_until.get((a, b) if a < b else (b, a), 0.0)
        return until if until > self.clock() else 0.0

    def heal(self) -> None:
        """Every stopped process goes on and every cut is over."""
        self._frozen_until.clear()
        self._cut_until.clear()

    def blocked(self, a: str, b: str) -> float:
        """Until when no byte can pass between a and b, for any reason; 0: it can."""
        if not self._frozen_until and not self._cut_until:
            return 0.0
        return max(self.frozen(a), self.frozen(b), self.is_cut(a, b))

    def when_open(self, a: str, b: str, action: Callable[[], None], name: Name) -> None:
        """Perform now, or as soon as bytes pass between a and b (TCP repeats what was lost)."""
        until = self.blocked(a, b)
        if until:
            self.at(until + GAP_S, lambda: self.when_open(a, b, action, name), name)
        else:
            action()

    # ---------------------------------------------------------------- links

    def delay(self) -> float:
        return self.link_s + (self.rng.random() * self.jitter_s if self.jitter_s else 0.0)

    def post(self, src: str, dst: str, action: Callable[[], None], name: Name) -> None:
        """One trip from src to dst; what goes the same way keeps its order."""
        link = (src, dst)
        at = max(self.clock.now_s + self.delay(), self._last_on_link.get(link, 0.0) + GAP_S)
        self._last_on_link[link] = at
        self.at(at, action, name)


@dataclass
class _Conn:
    """D's connection to one P address. waiting: frames for a P that is not there."""

    waiting: deque[bytes] = field(default_factory=deque)
    up: bool = False
    refusal_due: bool = False


class SimChannel:
    """A SideChannel. listen: P's address; None on D, whose frames arrive at P under ``name``."""

    def __init__(
        self, net: SimNet, name: str, listen: str | None, *, max_frame_bytes: int = 1 << 20,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.net, self.name, self._listen = net, name, listen
        self.node = name.partition("@")[0]
        self.max_frame_bytes = max_frame_bytes
        self.on_wake = on_wake
        self.open = True
        self._inbox: list[ChannelEvent] = []
        self._conns: dict[str, _Conn] = {}  # D
        self._known: dict[str, SimChannel] = {}  # P: who is connected
        net.channels[listen or name] = self
        if listen is not None:
            for channel in list(net.channels.values()):
                if channel._listen is None and listen in channel._conns:
                    event = ("connect", channel.node, self.node)
                    net.after(RECONNECT_S, partial(channel._flush, listen), event)

    @property
    def address(self) -> str | None:
        return self._listen

    # ---------------------------------------------------------------- sending

    def send(self, address: str, frame: bytes) -> bool:
        if not self.open or len(frame) > self.max_frame_bytes:
            return False
        if self._listen is not None:
            there = self._known.get(address)
            if there is None:
                return False
            self._transmit(there, address, frame)
            return True
        there = self.net.channels.get(address)
        if there is None and not _is_address(address):
            return False
        conn = self._conns.setdefault(address, _Conn())
        if there is not None and self.net.is_cut(self.node, there.node):
            return True  # lost without a word
        if there is not None and there.open:
            conn.up = True
            self._transmit(there, address, frame)
            return True
        if len(conn.waiting) >= QUEUE_FRAMES:
            return False
        conn.waiting.append(frame)
        self._refuse(address, conn)
        return True

    def _transmit(self, there: SimChannel, address: str, frame: bytes) -> None:
        net = self.net
        if net.is_cut(self.node, there.node):
            return
        name = net.frame_name(self.node, there.node, frame)
        if net.frame_rules is not None:
            copies = net.frame_rules(self.node, there.node, frame)
        elif net.on_frame is not None:
            copies = [Copy(frame, by_s) for by_s in net.on_frame(self._listen or self.name, address, frame)]
        else:
            net.post(self.node, there.node, lambda: self._arrive(there, address, frame), name)
            return
        for copy in copies:
            deliver = lambda c=copy: self._arrive(there, address, c.frame)  # noqa: E731
            if copy.alone or copy.by_s:
                net.after(net.delay() + copy.by_s, deliver, name)
            else:
                net.post(self.node, there.node, deliver, name)

    def _arrive(self, there: SimChannel, address: str, frame: bytes) -> None:
        if self.net.is_cut(self.node, there.node):
            return
        if there.open:
            there.take(self._listen or self.name, frame, self)
        elif self._listen is None and self.open:
            self._lost(address)

    def take(self, sender: str, frame: bytes, channel: SimChannel | None = None) -> None:
        """A frame is here. channel: the D whose connection it came over."""
        if self._listen is not None and channel is not None and channel.open:
            self._known[sender] = channel
        self._inbox.append(FrameIn(sender, frame))
        self.on_wake()

    # ---------------------------------------------------------------- refusals

    def _refuse(self, address: str, conn: _Conn) -> None:
        if not conn.refusal_due:
            conn.refusal_due = True
            self.net.after(2 * self.net.link_s, lambda: self._refused(address), ("refused", self.node))

    def _refused(self, address: str) -> None:
        conn = self._conns.get(address)
        if conn is None or not conn.refusal_due or not self.open:
            return
        conn.refusal_due = False
        there = self.net.channels.get(address)
        if there is None or not there.open:
            self._inbox.append(Refused(address))
            self.on_wake()

    def _lost(self, address: str) -> None:
        """The connection to that P has broken."""
        conn = self._conns.get(address)
        if conn is not None and self.open:
            conn.up = False
            self._refuse(address, conn)

    def _flush(self, address: str) -> None:
        conn, there = self._conns.get(address), self.net.channels.get(address)
        if conn is None or there is None or not there.open or not self.open:
            return
        conn.up, conn.refusal_due = True, False
        while conn.waiting:
            self._transmit(there, address, conn.waiting.popleft())

    # ---------------------------------------------------------------- the rest of the port

    def receive(self) -> list[ChannelEvent]:
        got, self._inbox = self._inbox, []
        return got

    @property
    def has_news(self) -> bool:
        return bool(self._inbox)

    def wait(self, timeout_s: float) -> None:
        raise RuntimeError("a simulated driver is pumped, it never waits")

    def wake(self) -> None:
        self.on_wake()

    def forget(self, address: str) -> None:
        conn = self._conns.pop(address, None)
        there = self.net.channels.get(address)
        if conn is not None and conn.up and there is not None:
            self._tell_gone(there)

    def _tell_gone(self, there: SimChannel) -> None:
        net = self.net
        net.post(self.node, there.node, lambda: there._gone(self), ("leave", self.node, there.node))

    def _gone(self, channel: SimChannel) -> None:
        if self._known.get(channel.name) is channel:
            del self._known[channel.name]

    def close(self) -> None:
        """Also the death of the process: the kernel closes its connections, and the other side sees that."""
        if not self.open:
            return
        self.open = False
        if self._listen is None:
            for address, conn in self._conns.items():
                peer = self.net.channels.get(address)
                if conn.up and peer is not None:
                    self._tell_gone(peer)
            return
        for channel in list(self.net.channels.values()):
            there = channel._conns.get(self._listen)
            if there is not None and there.up and not self.net.is_cut(self.node, channel.node):
                channel._lost(self._listen)


def _is_address(address: str) -> bool:
    ip, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(ip)
        return 0 < int(port) < 65536
    except ValueError:
        return False
