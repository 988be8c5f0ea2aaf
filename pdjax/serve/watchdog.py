"""Says what does not move: a room that has stood in one state for too long, and a scheduler that computes nothing.

For an operator who was not looking: each is one line of the log, with the room, the state and what it waits for, once for
each state that it gets stuck in. Ends nothing: the protocol's timers do that. Must never hold the manager's lock for more
than a few rooms, and must never show a prompt or a token.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdjax.sched.disaggregation import RoomTable
from pdjax.serve.log import ServerLog
from pdjax.serve.node_view import sentence

if TYPE_CHECKING:
    from pdjax.serve.node import Node

MAX_NAMED = 5  # rooms of one look; the rest is a number
MAX_ROOMS = 4096
LOOKS = 4  # in the time after which something is stuck: it is said at most a quarter late


class Watchdog:
    """``look`` now and then, from one thread. after_s: how long nothing must have moved."""

    def __init__(self, node: Node, log: ServerLog, after_s: float) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys(("stuck_rooms", "stuck_scheduler"), 0))
        self._node, self._log, self._after_s = node, log, after_s
        self._told: set[tuple[int, str]] = set()  # (room, state)
        self._work: tuple[int, ...] = ()
        self._since: float | None = None  # when the scheduler's work last changed, None: it has none to do
        self._next = 0.0

    def look(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + self._after_s / LOOKS
        self._look_at_rooms()
        self._look_at_scheduler(now)

    def _look_at_rooms(self) -> None:
        node = self._node
        if node.manager is None or not isinstance(node.scheduler, RoomTable):
            return
        views, _ = node.manager.views(MAX_ROOMS, self._after_s)
        stuck = {(view.room, view.state): view for view in views}
        self._told &= stuck.keys()
        new = [view for key, view in stuck.items() if key not in self._told]
        self._told |= stuck.keys()
        self.counters["stuck_rooms"] += len(new)
        new.sort(key=lambda view: -view.state_s)
        for view in new[:MAX_NAMED]:
            says = sentence(view, node.scheduler.place(view.room))
            self._log.event("stuck", room=view.room, role=node.role, message=says)
        if len(new) > MAX_NAMED:
            self._log.event(
                "stuck", count=len(new) - MAX_NAMED, message="further rooms: /debug/rooms names them"
            )

    def _look_at_scheduler(self, now: float) -> None:
        scheduler = self._node.scheduler
        stats = scheduler.stats()
        work = tuple(stats[name] for name in ("prefill_tokens", "decode_steps", "output_tokens"))
        busy = bool(stats.get("prefilling") or stats["running"]) and not scheduler.paused
        if work != self._work or not busy or self._since is None:
            self._work, self._since = work, now if busy else None
        elif now - self._since >= self._after_s:
            queues = ", ".join(f"{name} {stats[name]}" for name in scheduler.oldest_s() if stats[name])
            self.counters["stuck_scheduler"] += 1
            message = f"no step has ended for {now - self._since:.0f} s: {queues}"
            self._log.event("stuck", role=self._node.role, message=message)
            self._since = float("inf")  # once, until it moves again
