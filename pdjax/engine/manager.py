"""KVManager: the protocol's core between a scheduler and the ports (design §1).

Three layers: ``LockedRooms`` (the table under one lock, for any thread), ``Driver`` (what the driver thread does in
one turn, alone with channel, transport and registry), and here what a scheduler and an operator call. The simulator
calls the same ``turn``. Must never import JAX or start a thread.
"""

from __future__ import annotations

from pdjax.core.room import Event
from pdjax.engine.driver import Driver
from pdjax.engine.halves import Receiver, Sender
from pdjax.engine.rooms import Counters, Ports

__all__ = ["Counters", "KVManager", "Ports", "Receiver", "Sender"]


class KVManager(Driver):
    """Senders (role prefill) or receivers (role decode) of one process."""

    def create_sender(self, room: int) -> Sender:
        with self._lock:
            self._open(room)
            return Sender(self, room, self.sender.rooms[room])

    def create_receiver(self, room: int, bootstrap_addr: str) -> Receiver:
        with self._lock:
            self._open(room)
            return Receiver(self, bootstrap_addr, room, self.receiver.rooms[room])

    def quiescent(self) -> dict[str, int]:
        """What still belongs to somebody: all zero when everything is free (tombstones not counted)."""
        with self._lock:
            return {
                "live_rooms": self._n_live,
                "budget_bytes": self.sender.budget.charged_bytes,
                "limbo": len(self.sender.limbo),
                "notices": sum(len(r.notices) for r in self.receiver.rooms.values()),
                "pulls": len(self._pulls),
                "pending_effects": len(self._pending),
            }

    def end_rooms(self) -> int:
        """A process that leaves: end what is live, and so tell the peers (V7). How many rooms there were."""
        with self._lock:
            live = [room for room, record in self.rooms.items() if record.live]
            for room in live:
                self._handle(room, Event("abort_local", reason="draining"))
        self.ports.channel.wake()
        return len(live)

    def close(self, wait_s: float) -> None:
        """End of the process: peers are told by the caller (``end_rooms`` and a turn), then the ports go."""
        self.ports.registry.close()
        self.ports.transport.close(wait_s)
        self.ports.channel.close()
