"""FaultyTransport: the real transport, made to lose, spoil and delay hand-offs. Transparent without rules.

Each fault is one that the transport itself is known for (facts/transfer rows 1, 2, 6, 7): a pull that comes before its
registration waits for it, one whose registration never comes hangs, a withdrawn one fails on every part, shorter
arrays fail, and changed bytes arrive as they are. P's side only. Must never touch what a request did not offer.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdjax.core.pools import Part
from pdjax.engine.base import Packed
from pdjax.engine.ports import Transport, TransportEvent
from pdjax.faults.channel import Cuts
from pdjax.faults.frames import Rule

log = logging.getLogger(__name__)

FENCE_LIFE_S = 600.0  # of the registration that fails every part: longer than any pull of a replay


@dataclasses.dataclass
class _Held:
    """A registration that is put off: the pull that came for it waits in the native table."""

    peer: str
    timer: threading.Timer | None  # None: it never comes
    withdrawn_for_s: float | None = None


class FaultyTransport(Transport):
    """room_of: the room of a uuid that is being offered. hit(rule, room, uuid): a rule acts.

    late_lost: hand-offs that were put off and could not be offered any more; each is a line of the log, too.
    """

    def __init__(
        self,
        real: Transport,
        me: str,
        cuts: Cuts,
        room_of: Callable[[int], int],
        hit: Callable[[Rule, int, int], None],
    ) -> None:
        self._real, self._me, self._cuts, self._room_of, self._hit = real, me, cuts, room_of, hit
        self.rules: list[Rule] = []
        self.ms_s = 0.001
        self.late_lost = 0
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}

    # ------------------------------------------------------------ P

    def offer(self, peer: str, uuid: int, packed: Packed) -> None:
        acting = self._acting(peer, uuid, len(packed.parts))
        late_s = sum(rule.value["by"] for rule in acting if rule.value["do"] == "slow") * self.ms_s
        late_s = max(late_s, self._cuts.rest_s(_instance(peer)))
        kinds = {rule.value["do"] for rule in acting}
        for rule in acting:
            packed = _spoilt(packed, rule)
        if "hang" in kinds:
            self._hold(peer, uuid, None)
        elif "fail" in kinds:
            self._real.offer(peer, uuid, packed)
            self._real.withdraw(peer, uuid, FENCE_LIFE_S)
        elif late_s > 0:
            timer = threading.Timer(late_s, self._offer_late, (peer, uuid, packed))
            timer.daemon = True
            self._hold(peer, uuid, timer)
            timer.start()
        else:
            self._real.offer(peer, uuid, packed)

    def _acting(self, peer: str, uuid: int, n_parts: int) -> list[Rule]:
        if not self.rules:
            return []
        room, found = self._room_of(uuid), []
        for rule in self.rules:
            match = rule.value["match"]
            if (
                match.get("room", room) == room
                and match.get("from", self._me) == self._me
                and match.get("to", _instance(peer)) == _instance(peer)
                and match.get("part", 0) < n_parts
                and rule.turn()
            ):
                found.append(rule)
                self._hit(rule, room, uuid)
        return found

    def _hold(self, peer: str, uuid: int, timer: threading.Timer | None) -> None:
        with self._lock:
            self._held[uuid] = _Held(peer, timer)

    def _offer_late(self, peer: str, uuid: int, packed: Packed) -> None:
        """A pull that is under way ends right, also when it was withdrawn meanwhile (protocol §6)."""
        with self._lock:
            held = self._held.pop(uuid, None)
            if held is None:  # its peer was dropped
                return
            try:
                self._real.offer(peer, uuid, packed)
            except (
                RuntimeError,
                ValueError,
            ) as error:  # the process leaves, or the room is gone with its arrays
                self.late_lost += 1
                log.warning("a hand-off that was put off could not be offered: %s", error)
                return
            if held.withdrawn_for_s is not None:
                self._real.withdraw(peer, uuid, held.withdrawn_for_s)

    def address_for(self, peer: str) -> str:
        return self._real.address_for(peer)

    def withdraw(self, peer: str, uuid: int, life_s: float) -> None:
        with self._lock:
            held = self._held.get(uuid)
            if held is not None:
                held.withdrawn_for_s = life_s
                return
        self._real.withdraw(peer, uuid, life_s)

    # ------------------------------------------------------------ D, and both

    def start(self, sink: Callable[[TransportEvent], None]) -> None:
        self._real.start(sink)

    def pull(self, peer: str, address: str, uuid: int, parts: Sequence[Part]) -> int:
        return self._real.pull(peer, address, uuid, parts)

    def abandon(self, pull_id: int) -> None:
        self._real.abandon(pull_id)

    def drop_peer(self, peer: str) -> None:
        with self._lock:
            for uuid in [uuid for uuid, held in self._held.items() if held.peer == peer]:
                _stop(self._held.pop(uuid))
        self._real.drop_peer(peer)

    def tick(self) -> None:
        self._real.tick()

    def reset(self) -> None:
        """No rule is in force any more; what is put off still comes."""
        self.rules.clear()

    def close(self, wait_s: float) -> None:
        with self._lock:
            for held in self._held.values():
                _stop(held)
            self._held.clear()
        self._real.close(wait_s)


def _instance(peer: str) -> str:
    """peer_key without the life."""
    return peer.rpartition(":")[0] or peer


def _stop(held: _Held) -> None:
    if held.timer is not None:
        held.timer.cancel()


def _spoilt(packed: Packed, rule: Rule) -> Packed:
    """The arrays that D will get in place of the right ones, for the parts that the rule names."""
    do, only = rule.value["do"], rule.value["match"].get("part")
    if do not in ("corrupt", "truncate"):
        return packed
    arrays: list[Any] = list(packed.arrays)
    parts = list(packed.parts)
    for i in range(len(arrays)):
        if only not in (None, i):
            continue
        if do == "corrupt":
            first = (0,) * arrays[i].ndim
            arrays[i] = arrays[i].at[first].add(1)
        else:
            arrays[i] = arrays[i].reshape(-1)[:-1]
            short = arrays[i]
            parts[i] = msgspec.structs.replace(parts[i], shape=tuple(short.shape), nbytes=short.nbytes)
    return Packed(tuple(parts), arrays)
