"""FaultyChannel: a side channel under message rules, cuts and frames that nobody sent. Transparent without them.

A port around a port: the manager behind it is the one that serves. Everything but ``inject``, ``cut`` and ``wake`` belongs to
the driver thread. Must never exist in a process that was started without a fault socket.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from pdjax.engine.ports import ChannelEvent, FrameIn, SideChannel
from pdjax.faults.frames import Copy, FrameRules


class Cuts:
    """Instances that nothing passes to or from, each until a time on the clock. Any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def cut(self, peer: str, for_s: float) -> None:
        self._until = {**self._until, peer: self._clock() + for_s}

    def rest_s(self, peer: str) -> float:
        """How long it still lasts; 0: there is none."""
        until = self._until.get(peer)
        return max(until - self._clock(), 0.0) if until is not None else 0.0

    def clear(self) -> None:
        self._until = {}


class FaultyChannel(SideChannel):
    """me: this instance. peer_of: the instance behind an address, "" where it is not known.

    holding: whether what is sent now stays here until the driver's next turn: somebody acts at the end of this one.
    """

    def __init__(
        self,
        real: SideChannel,
        me: str,
        rules: FrameRules,
        cuts: Cuts,
        clock: Callable[[], float],
        peer_of: Callable[[str], str],
        holding: Callable[[], bool] = lambda: False,
    ) -> None:
        self._real, self._me, self._rules, self._cuts = real, me, rules, cuts
        self._clock, self._peer_of, self._holding = clock, peer_of, holding
        self._late: list[tuple[float, int, str, bytes]] = []  # due, order, address, frame
        self._order = itertools.count()
        self._injected: deque[FrameIn] = deque()

    @property
    def address(self) -> str | None:
        return self._real.address

    def send(self, address: str, frame: bytes) -> bool:
        """What is dropped by a rule or a cut counts as sent, as a frame that a network loses does."""
        peer = self._peer_of(address)
        if self._cuts.rest_s(peer) > 0:
            return True
        copies = self._rules.copies(self._me, peer, frame) if self._rules.rules else [Copy(frame)]
        held, sent = self._holding(), True
        for copy in copies:
            if copy.by_s > 0 or held:
                due = self._clock() + copy.by_s
                heapq.heappush(self._late, (due, next(self._order), address, copy.frame))
            else:
                sent &= self._real.send(address, copy.frame)
        return sent

    def send_late(self) -> None:
        """Driver thread: what is due leaves now, not at the next turn."""
        while self._late and self._late[0][0] <= self._clock():
            _, _, address, frame = heapq.heappop(self._late)
            if self._cuts.rest_s(self._peer_of(address)) <= 0:
                self._real.send(address, frame)

    def receive(self) -> list[ChannelEvent]:
        self.send_late()
        events: list[ChannelEvent] = []
        while self._injected:
            events.append(self._injected.popleft())
        return events + [e for e in self._real.receive() if not self._is_lost(e)]

    def _is_lost(self, event: ChannelEvent) -> bool:
        if not isinstance(event, FrameIn):
            return False
        return self._cuts.rest_s(self._peer_of(event.address)) > 0

    def inject(self, sender: str, frame: bytes) -> None:
        """From any thread: as if this frame had just arrived from that address."""
        self._injected.append(FrameIn(sender, frame))
        self._real.wake()

    def wait(self, timeout_s: float) -> None:
        if self._late:
            timeout_s = min(timeout_s, self._late[0][0] - self._clock())
        if timeout_s > 0 and not self._injected:
            self._real.wait(timeout_s)

    def wake(self) -> None:
        self._real.wake()

    def forget(self, address: str) -> None:
        self._real.forget(address)

    def reset(self) -> None:
        """Driver thread: what is still delayed is sent now, in the order of its sending; rules and cuts are gone."""
        self._rules.rules.clear()
        self._cuts.clear()
        late = sorted(
            self._late, key=lambda one: one[1]
        )  # all are due: as they were sent, which is a heap, too
        self._late = [(0.0, order, address, frame) for _, order, address, frame in late]
        self.send_late()

    def close(self) -> None:
        self._real.close()
