"""D's side of the hand-off: its rooms, and how long each P has been silent (protocol §5, §7).

Pure: events and times come in, effects go out. Must never call a port.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdjax.core.by_peer import RoomsByPeer
from pdjax.core.effects import ArmTimer, Effect
from pdjax.core.identity import Minter
from pdjax.core.pools import PoolTransferSpec
from pdjax.core.receiver_room import Candidate as Candidate
from pdjax.core.receiver_room import Notice as Notice
from pdjax.core.receiver_room import ReceiverRoom as ReceiverRoom
from pdjax.core.room import Event, Transition
from pdjax.core.settings import PDSettings


@dataclass
class PeerLife:
    """What D knows of one P: its silence is measured per instance, not per room (protocol §7)."""

    waiting_since: float | None = None
    last_answer: float = float("-inf")


@dataclass
class ReceiverSide:
    """All of D's protocol state. ``rooms`` holds live rooms and tombstones."""

    settings: PDSettings
    epoch: int
    fingerprint: str
    page_size: int
    pools: list[PoolTransferSpec]
    rooms: dict[int, ReceiverRoom] = field(default_factory=dict)  # written by ``keep``
    peers: dict[str, PeerLife] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.minter = Minter(self.epoch)
        self.n_notices = 0  # that have no answer yet, of all rooms
        self._by_peer = RoomsByPeer(self.rooms)

    def handle(self, room: int, ev: Event, now: float, leg: Any = None) -> tuple[list[Effect], Transition]:
        """One event for one room. A message of another attempt meets the table as if there were no record."""
        self.now = now
        record = self.rooms.get(room)
        if record is None or self._of_another_attempt(record, ev):
            record = ReceiverRoom(room, self)
            if leg is not None:
                record.digest, record.n_tokens = leg.digest, leg.n_prompt
        effects, line = record.handle(ev, now)
        self.keep(record)
        return effects, line

    def keep(self, record: ReceiverRoom) -> None:
        """After each event, and for a record that is set up in a state: what is known of all rooms follows it."""
        self._by_peer.keep(record)
        n = len(record.notices) if self.rooms.get(record.room) is record else 0
        self.n_notices += n - record.n_noted
        record.n_noted = n

    @staticmethod
    def _of_another_attempt(record: ReceiverRoom, ev: Event) -> bool:
        return ev.msg is not None and ev.msg.attempt != record.attempt

    def hello_sent(self, peer: str, now: float) -> list[Effect]:
        life = self.peers.setdefault(peer, PeerLife())
        if life.waiting_since is not None:
            return []
        life.waiting_since = now
        return [ArmTimer(("silence", peer), now + self.settings.peer_timeout_s)]

    def answered(self, peer: str, now: float) -> None:
        """Any valid frame of a P counts as its answer (protocol §7)."""
        life = self.peers.setdefault(peer, PeerLife())
        life.waiting_since, life.last_answer = None, now

    def gone(self, peer: str) -> None:
        """Nobody is there: no answer is owed any more, and none is fresh."""
        self.peers.pop(peer, None)

    def silent(self, peer: str, now: float) -> float | None:
        """When the silence of that P will be over, None when it owes no answer."""
        since = self.peers[peer].waiting_since if peer in self.peers else None
        return None if since is None else since + self.settings.peer_timeout_s

    def fresh(self, peer: str) -> bool:
        life = self.peers.get(peer)
        return life is not None and self.now - life.last_answer < self.settings.peer_timeout_s

    def rooms_of(self, peer: str) -> list[int]:
        """Live rooms bound to that P or asking it, and all with a notice for it."""
        return [r.room for r in self._by_peer.of(peer)]
