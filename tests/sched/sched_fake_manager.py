"""A manager for the scheduler tests, faithful to engine/base.py: two roles joined by a Link in one process.

Everything that takes time in reality (a peer's message, a pull) is an action of the Link, done when the test says
so and in the order it chooses. An end reported to a scheduler always comes as an event, also of its own aborts: the
contract allows it, so the scheduler must stand it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdjax.core.errors import PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import KVArgs, pages_for
from pdjax.engine.base import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVEnded,
    KVLanded,
    KVReady,
    KVReleased,
    Leg,
    Packed,
)

LIVE = (KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring)


@dataclass
class Half:
    """One side's record of a room."""

    leg: Leg
    state: KVPoll = KVPoll.Bootstrapping
    error: PDError | None = None
    charged: int = 0  # P
    packed: Packed | None = None  # P
    first: object = None  # P
    n_pages: int = 0
    ready: bool = False  # D: KVReady was given
    token: int = 0  # D
    pulling: bool = False  # D: a pull may still touch P's bytes


@dataclass
class Link:
    """The world between P and D."""

    budget_bytes: int = 1 << 40
    halves: dict[tuple[str, int], Half] = field(default_factory=dict)
    events: dict[str, list] = field(default_factory=lambda: {"prefill": [], "decode": []})
    wire: list[tuple[str, Callable[[], None]]] = field(default_factory=list)  # messages on their way
    not_now: bool = False  # D: receive() refuses, as when the peer is silent
    attempts: int = 1000
    woken: int = 0
    receive_calls: int = 0
    admit_calls: int = 0

    @property
    def charged(self) -> int:
        return sum(half.charged for half in self.halves.values())

    def half(self, role: str, room: int) -> Half | None:
        return self.halves.get((role, room))

    def post(self, role: str, event) -> None:
        self.events[role].append(event)
        self.woken += 1

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        """What the world could do next: deliver a message, let P's offer be seen, finish a pull."""
        found = list(self.wire)
        for (role, room), half in self.halves.items():
            peer = self.half("prefill", room)
            if role != "decode":
                continue
            if peer is not None and half.state == KVPoll.Bootstrapping and peer.state in LIVE:
                found.append((f"bind {room}", lambda h=half: setattr(h, "state", KVPoll.WaitingForInput)))
            offered = peer is not None and peer.state == KVPoll.Transferring
            if half.token and offered and half.state == KVPoll.WaitingForInput and not half.ready:
                found.append((f"ready {room}", lambda r=room: self._ready(r)))
            if half.pulling:
                found.append((f"land {room}", lambda r=room: self.land(r)))
        return found

    def pump(self) -> bool:
        """Do everything that can happen, oldest first; False: nothing could."""
        worked = False
        while actions := self.actions():
            self.do(actions[0])
            worked = True
        return worked

    def do(self, action: tuple[str, Callable[[], None]]) -> None:
        if action in self.wire:
            self.wire.remove(action)
        action[1]()

    def _ready(self, room: int) -> None:
        p, d = self.half("prefill", room), self.half("decode", room)
        d.ready = True
        self.post("decode", KVReady(room, p.leg.n_prompt, p.n_pages, p.first))

    def land(self, room: int) -> None:
        """The pull is over: the parts land if the attempt lives, and P's bytes are quiescent either way."""
        p, d = self.half("prefill", room), self.half("decode", room)
        d.pulling = False
        if d.state == KVPoll.Transferring:
            self.post("decode", KVLanded(room, d.token, p.packed))
        elif p.state == KVPoll.Failed:
            self.release(p)

    def release(self, half: Half) -> None:
        if half.charged:
            half.charged = 0
            self.post("prefill", KVReleased())

    def end(
        self, role: str, room: int, reason: str = "peer_lost", status: int = 503, *, tell: bool = True
    ) -> None:
        """A live half fails; its peer hears of it later."""
        half = self.half(role, room)
        if half is None or half.state not in LIVE:
            return
        half.state = KVPoll.Failed
        half.error = PDError(f"ended by {reason}", reason=reason, status=status, room=room)
        self.post(role, KVEnded(room, status, reason, f"ended by {reason}"))
        if role == "prefill":
            peer = self.half("decode", room)
            if peer is None or not peer.pulling:
                self.release(half)  # else limbo, until the pull settles
        other = "decode" if role == "prefill" else "prefill"
        if tell:
            self.wire.append(
                (f"failed {other} {room}", lambda: self.end(other, room, "peer_failed", tell=False))
            )


class FakeManager(BaseKVManager):
    def __init__(self, role: str, link: Link, args: KVArgs) -> None:
        super().__init__(args, "registry.test:8998")
        self.role, self.link, self.runner = role, link, None

    def register_runner(self, runner) -> None:
        self.runner = runner

    def claim(self, leg: Leg) -> None:
        if (self.role, leg.room) in self.link.halves:
            raise PDError("in use", reason="duplicate_room", status=400, room=leg.room)
        self.link.halves[self.role, leg.room] = Half(leg)

    def create_sender(self, room: int) -> FakeSender:
        return FakeSender(self, room)

    def create_receiver(self, room: int, bootstrap_addr: str) -> FakeReceiver:
        return FakeReceiver(self, room, bootstrap_addr)

    def live_rooms(self, rid: str | None) -> dict[int, KVPoll]:
        return {
            room: half.state
            for (role, room), half in self.link.halves.items()
            if role == self.role and half.state in LIVE and rid in (None, half.leg.rid)
        }

    def take_events(self) -> list:
        events, self.link.events[self.role] = self.link.events[self.role], []
        return events


class _Handle:
    def __init__(self, manager: FakeManager, room: int) -> None:
        self.manager, self.link, self.room = manager, manager.link, room
        self.half = manager.link.half(manager.role, room)
        if self.half is None:
            raise PDError("not claimed", reason="lost", room=room)

    def poll(self) -> KVPoll:
        return self.half.state

    def abort(self, reason: str = "client_abort") -> None:
        self.link.end(self.manager.role, self.room, reason)

    def failure_exception(self) -> PDError | None:
        return self.half.error


class FakeSender(_Handle, BaseKVSender):
    def wanted(self) -> bool:
        return True

    def admit(self, n_bytes: int) -> bool:
        self.link.admit_calls += 1
        charged = self.link.charged
        if self.half.state != KVPoll.Bootstrapping or (
            charged and charged + n_bytes > self.link.budget_bytes
        ):
            return False
        self.half.charged, self.half.state = n_bytes, KVPoll.WaitingForInput
        return True

    def send(self, kv_indices, first) -> bool:
        if self.half.state != KVPoll.WaitingForInput:
            return False
        packed = self.manager.runner.gather(kv_indices)
        assert sum(array.nbytes for array in packed.arrays) == self.half.charged, (
            "the budget was asked for other bytes"
        )
        self.half.packed, self.half.first, self.half.n_pages = packed, first, len(kv_indices)
        self.half.state = KVPoll.Transferring
        return True


class FakeReceiver(_Handle, BaseKVReceiver):
    def __init__(self, manager: FakeManager, room: int, bootstrap_addr: str) -> None:
        super().__init__(manager, room)
        self.bootstrap_addr = bootstrap_addr
        self.link.attempts += 1
        self.token = self.half.token = self.link.attempts

    def receive(self, kv_indices) -> bool:
        self.link.receive_calls += 1
        if self.half.state != KVPoll.WaitingForInput or self.link.not_now:
            return False
        assert self.half.ready, "pages were offered before ready"
        size = self.manager.args.page_size
        assert (
            len(kv_indices)
            == pages_for(self.half.leg.n_prompt, size)
            == self.link.half("prefill", self.room).n_pages
        )
        self.half.state, self.half.pulling = KVPoll.Transferring, True
        return True

    def commit(self) -> bool:
        if self.half.state != KVPoll.Transferring:
            return False
        assert not self.half.pulling, "committed before it landed"
        self.half.state = KVPoll.Success
        peer = self.link.half("prefill", self.room)

        def done() -> None:
            if peer.state == KVPoll.Transferring:
                peer.state = KVPoll.Success
            self.link.release(peer)

        self.link.wire.append((f"done {self.room}", done))
        return True
