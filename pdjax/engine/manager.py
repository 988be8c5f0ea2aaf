"""KVManager: the protocol's core between a scheduler and the ports (design §1).

Four layers: ``LockedRooms`` (the table under one lock, for any thread), ``Performer`` (its effects on channel, transport
and registry, without the lock), ``Driver`` (one turn of the driver thread), and here what a scheduler and an operator
call. The simulator calls the same ``turn``. Must never import JAX or start a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

from pdjax.core.budget import Slot
from pdjax.core.outlook import RoomView, view
from pdjax.core.receiver import ReceiverRoom
from pdjax.core.room import Event
from pdjax.core.sender import SenderRoom
from pdjax.engine.driver import Driver
from pdjax.engine.halves import Receiver, Sender
from pdjax.engine.rooms import Counters, Ports

LOOK_AT_ONCE = 16  # rooms described in one hold of the lock: about a millisecond (protocol §7)

T = TypeVar("T")
R = TypeVar("R")

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
                "notices": self.receiver.n_notices,
                "pulls": len(self._pulls),
                "pending_effects": len(self._pending),
                "host_slots": len(self.host_slots.held) if self.host_slots is not None else 0,
            }

    def fill_slots(self, sizes_bytes: Iterable[int]) -> list[Slot]:
        """Fresh slots for hand-offs of these sizes, at most to the limit, for the runner to give them memory. At the start."""
        with self._lock:
            return [] if self.host_slots is None else self.host_slots.fill(sizes_bytes)

    def views(self, limit: int, still_s: float = 0.0) -> tuple[list[RoomView], int]:
        """The live rooms, at most limit of them, and how many there are. For an operator's eyes, from any thread.

        still_s: only those that have been in their state for so long. The driver waits for a few rooms at a time at most: each is as it was at a moment of this call.
        """
        known: list[SenderRoom | ReceiverRoom] = [*self.rooms.values()]
        latest = self.ports.clock() - still_s
        live = [record for record in known if record.live and record.since <= latest]
        shown = self._look(
            live[:limit], lambda record: view(record, self.ports.clock()) if record.live else None
        )
        return [one for one in shown if one is not None], len(live)

    def view(self, room: int) -> RoomView | None:
        """That room, also when it has ended and is remembered; None when it is not known."""
        with self._lock:
            record = self.rooms.get(room)
            return None if record is None else view(record, self.ports.clock())

    def remains(self, limit: int) -> dict[str, Any]:
        """What is kept for rooms that are not live: early entries, limbo, notices (at most limit of each), tombstones."""
        now = self.ports.clock()
        with self._lock:
            early = [
                {
                    "room": str(room),
                    "kind": e.kind,
                    "peer": e.peer,
                    "attempt": str(e.attempt),
                    "in_s": round(e.until - now, 3),
                }
                for room, entries in islice(self.sender.early.items(), limit)
                for e in entries.values()
            ][:limit]
            limbo = [
                {
                    "room": str(k.room),
                    "peer": k.peer,
                    "attempt": str(k.attempt),
                    "bytes": v.n_bytes,
                    "in_s": round(v.until - now, 3),
                }
                for k, v in islice(self.sender.limbo.items(), limit)
            ]
        noticing = [record for record in list(self.receiver.rooms.values()) if record.notices]
        told = self._look(
            noticing[:limit],
            lambda record: [
                {
                    "room": str(record.room),
                    "kind": n.kind,
                    "peer": n.peer,
                    "age_s": round(now - n.since, 3),
                    "in_s": round(n.due - now, 3),
                }
                for n in record.notices.values()
            ],
        )
        return {
            "early": early,
            "limbo": limbo,
            "notices": [notice for of_room in told for notice in of_room],
            "tombstones": len(self.rooms) - self._n_live,
        }

    def _look(self, records: Iterable[T], describe: Callable[[T], R]) -> list[R]:
        """describe of each, under the lock, which is let go between a few."""
        out: list[R] = []
        left = iter(records)
        while some := list(islice(left, LOOK_AT_ONCE)):
            with self._lock:
                out += [describe(record) for record in some]
        return out

    def drain(self) -> None:
        """Refuse every new leg from now on, and say so to the registry; what is here goes on (V12)."""
        self.draining = True
        self.ports.registry.drain()

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
