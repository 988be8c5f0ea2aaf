"""Liveness: timers fire, loops turn, and who could go on does (V3, V4, V5, V9, V11 of protocol §10).

A bound that holds only while messages get through is excused by a fault in its window (``ctx.disturbed_ms``); the
bounds that must hold in any case are not. Time that a process spent stopped is added to its deadlines. Must never
excuse what no fault of the run explains.
"""

from __future__ import annotations

from typing import Any

from pdjax.sim.properties.base import SLACK_MS, STEP_MS, Context, Decision, Property, Track


class V3(Property):
    name = "V3"
    sentence = "timers fire with a full pool, with no traffic and with a paused engine"
    bound = "τ after they are due"
    sampled = True

    def on_sample(self) -> None:
        due_s = (self.ctx.now - STEP_MS - SLACK_MS) / 1000
        for node in self.ctx.up:
            timers = node.manager._timers
            if timers and timers[0][0] < due_s and not self.ctx.stopped(node.name):
                self.breach(
                    f"{node.name}: a {timers[0][2][0]} timer is overdue since {timers[0][0] * 1000:g} ms"
                )


class V4(Property):
    name = "V4"
    sentence = "nobody holds one stage's resource while it waits for the other stage's"
    bound = "D takes pages only for a pull that starts in the same step; a gated P takes budget only when D has come, D takes pages only while its P answers"
    hears = ("pages_taken", "admit", "start")
    instants = True

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.taken: list[tuple[str, str, str]] = []

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "admit":
            if track is not None and line["to"] == "WaitingForInput":
                self._admitted(track)
        elif line["event"] == "start":
            if track is not None and line["to"] == "Transferring":
                self._started(track)
        elif line["node"].startswith("d"):
            self.taken.append((line["node"], line["epoch"], line["token"]))

    def _admitted(self, track: Track) -> None:
        node = self.ctx.node(track.node, track.epoch)
        record = node.manager.sender.rooms.get(track.room) if node is not None else None
        if record is not None and record.settings.gated and not record.peer:
            self.breach(f"{track}: a gated P holds budget for it, and no D has come")

    def _started(self, track: Track) -> None:
        node = self.ctx.node(track.node, track.epoch)
        if node is not None and track.peer and not node.manager.receiver.fresh(track.peer):
            self.breach(f"{track}: takes pages for a pull from {track.peer}, which owes an answer")

    def on_instant(self) -> None:
        if not self.taken:
            return
        taken, self.taken = self.taken, []
        for name, epoch, token in taken:
            life = self.ctx.lives[name, epoch]
            if token not in life.pages or self.ctx.node(name, epoch) is None:
                continue
            track = next((t for t in life.rooms.values() if t.attempt == token), None)
            if track is not None and track.state in ("Bootstrapping", "WaitingForInput"):
                self.breach(f"{track}: holds pages while it waits in {track.state}")


class V5(Property):
    name = "V5"
    sentence = "the loop of a node waits for no peer, registry, transfer or compile"
    bound = "τ: what has arrived is taken within one turn"
    sampled = True

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.seen: dict[str, tuple[Any, float]] = {}

    def on_sample(self) -> None:
        for node in self.ctx.up:
            manager, name = node.manager, node.name
            queue = manager._inbox or manager._pending or manager._arrived
            head = queue[0] if queue else None
            if head is None or self.ctx.stopped(name):
                self.seen.pop(name, None)
            elif name not in self.seen or self.seen[name][0] is not head:
                self.seen[name] = (head, self.ctx.now)
            elif self.ctx.now - self.seen[name][1] > STEP_MS:
                self.breach(f"{name}: work has waited since {self.seen[name][1]:g} ms")


class V9(Property):
    name = "V9"
    sentence = "a stuck request delays others by a bounded time; pages are given first come, first served"
    bound = "FIFO by ready on D, by leg on P, by D's hello on a gated P; what comes within one turn of P has no order"
    hears = ("transition",)

    @staticmethod
    def wants(d: Decision) -> bool:
        return not {"note_ready", "start_pull", "reserve"}.isdisjoint(d.effects)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        life = self.ctx.lives[track.node, track.epoch]
        if "note_ready" in line["effects"]:
            track.ready_ms = line["t"]
        elif "start_pull" in line["effects"]:
            for other in life.rooms.values():
                if other.state == "WaitingForInput" and 0 <= other.ready_ms < track.ready_ms - STEP_MS:
                    self.breach(
                        f"{track}: its pull starts before that of room {other.room}, ready earlier", line
                    )
        elif "reserve" in line["effects"]:
            # A gated room that waits for its D has no place in the order.
            gated = self.ctx.settings(track.node).gated
            for other in life.rooms.values():
                if other.state != "Bootstrapping" or (gated and not other.peer):
                    continue
                if other.came_turn < track.came_turn and other.came_ms < track.came_ms - STEP_MS:
                    self.breach(f"{track}: admitted before room {other.room}, which came earlier", line)


class V11(Property):
    name = "V11"
    sentence = "no wake-up is lost: who could go on does"
    bound = "τ after the resource is free"
    sampled = True

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.since: dict[str, tuple[Any, float]] = {}

    def on_sample(self) -> None:
        for name, node in self.ctx.world.nodes.items():
            seq = self._could(node) if self._runs(node) else None
            if seq is None:
                if name in self.since:
                    del self.since[name]
                continue
            known = self.since.get(name)
            if known is None or known[0] is not seq:
                self.since[name] = (seq, self.ctx.now)
            elif self.ctx.now - known[1] > 2 * STEP_MS:
                self.breach(f"{name}: room {seq.req.room} could have gone on since {known[1]:g} ms")

    def _runs(self, node: Any) -> bool:
        """Its scheduler is between two device calls, where it looks at its queues."""
        return bool(node.alive) and not node._busy and not self.ctx.stopped(node.name)

    @staticmethod
    def _could(node: Any) -> Any | None:
        """The head of the queue for budget or pages, if nothing keeps it there."""
        scheduler = node.scheduler
        if node.role == "prefill":
            rooms = node.manager.sender.rooms
            for seq in scheduler.gate:
                if (record := rooms.get(seq.req.room)) is not None and record.state == 1 and record.peer:
                    return seq
            seq = scheduler.budget_queue.head()
            record = rooms.get(seq.req.room) if seq is not None else None
            if record is None or record.state != 1:
                return None
            return seq if node.manager.sender.budget.can(seq.kv_bytes) else None
        if scheduler._may_admit():
            return scheduler.recompute.head()
        seq = scheduler.page_queue.head()
        record = node.manager.receiver.rooms.get(seq.req.room) if seq is not None else None
        if record is None or record.state != 2 or record.manifest is None:
            return None
        if not node.manager.receiver.fresh(record.bound):
            return None
        return seq if scheduler._page_head(float("inf")) is seq else None
