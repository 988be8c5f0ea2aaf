"""Liveness properties V1–V12 of protocol §10, each as a deadline with its bound from §7.

A bound that holds only while messages get through is excused by a fault in its window (``ctx.disturbed_ms``); the
bounds that must hold in any case are not. Time that a process spent stopped is added to its deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdjax.sim.properties.base import ENDED, STEP_MS, Context, Property, Track

SLACK_MS = 5.0  # rounding of the log, and the turn in which a due timer fires


def listed(ctx: Context, name: str, epoch: str) -> bool:
    """A look-up made now would find this life. Reads the table without sweeping it."""
    registry = ctx.world.net.registry
    if registry is None:
        return False
    return any(
        key.instance_id == name
        and str(held.seat.epoch) == epoch
        and ctx.now / 1000 - held.heard <= registry.ttl_s + SLACK_MS / 1000
        for key, held in registry._held.items()
    )


class V1(Property):
    name = "V1"
    sentence = "every accepted request reaches exactly one outcome"
    bound = "T_req = request + R"
    hears = ("leg", "request", "finished")

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.open: dict[str, float] = {}
        self.ended: set[str] = set()

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        event = line["event"]
        if event == "leg":
            if track is not None and line["from"] == "Absent" and line["to"] == "Bootstrapping":
                self._watch(track)
        elif event == "request":
            key = f"{line['rid']}/{line['room']}"
            if key not in self.ended:  # it may end before its second leg is posted
                self.open[key] = line["t"]
        elif event == "finished":
            key = f"{line.get('rid')}/{line.get('room')}"
            if key in self.ended:
                self.breach(f"request {key}: a second outcome", line)
            self.ended.add(key)
            self.open.pop(key, None)
            if line.get("reason") == "router_timeout":
                self._unanswered(line)

    def _unanswered(self, line: dict[str, Any]) -> None:
        """The router gave up, which it does long after T_req: did both legs reach a server that lived all the time?"""
        record = self.ctx.world.requests.get(line["rid"])
        if record is None or self.ctx.broken_ms >= record.began:
            return
        legs = record.legs.values()
        if all(leg.accepted for leg in legs) and self.ctx.now - record.began > self._longest_ms(record):
            self.breach(f"request {line['rid']}: its servers never answered", line)

    def _longest_ms(self, record: Any) -> float:
        settings = [self.ctx.settings(leg.node) for leg in record.legs.values()]
        return max(float(s.request_timeout_s + s.answer_bound_s) * 1000 for s in settings)

    def _watch(self, track: Track) -> None:
        settings = self.ctx.settings(track.node)
        bound_ms = (settings.request_timeout_s + settings.answer_bound_s) * 1000
        began, stopped = track.began_ms, self.ctx.stops.get(track.node, 0.0)

        def check() -> None:
            if track.live and track.began_ms == began and self.ctx.node(track.node, track.epoch):
                more = self.ctx.stops.get(track.node, 0.0) - stopped
                if self.ctx.stopped(track.node) or self.ctx.now < began + bound_ms + more:
                    self.ctx.at(self.ctx.now + STEP_MS, check)
                    return
                self.breach(f"{track}: still {track.state} {bound_ms:g} ms after its leg")

        self.ctx.at(began + bound_ms + SLACK_MS, check)

    def at_end(self) -> None:
        for life in self.ctx.lives.values():
            if self.ctx.node(life.name, life.epoch) is None:
                continue
            for track in life.rooms.values():
                if track.live:
                    self.breach(f"{track}: still {track.state} at the end")
        for key in self.open:
            self.breach(f"request {key}: no outcome")


class V2(Property):
    name = "V2"
    sentence = (
        "every resource of an ended attempt is free in time, even if a notice is lost or the peer is gone"
    )
    bound = "T_free = max(lease, limbo) + R; D's pages: one step; 2·R + one step from D's quiet when nothing is lost"
    hears = ("transition",)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        ended = track.state in ENDED and track.before not in ENDED
        if "to_limbo" in line["effects"]:
            self._limbo(track)
        elif ended and track.role == "receiver" and track.state == "Failed":
            self._pages(track)
        if ended and track.role == "sender" and track.uuid:
            self._registration(track)
        if "notice_quiet" in line["effects"]:
            self._quiet(track)

    def _later(self, track: Track, after_ms: float, check: Callable[[], str]) -> None:
        stopped, due = self.ctx.stops.get(track.node, 0.0), self.ctx.now + after_ms + SLACK_MS

        def run() -> None:
            if self.ctx.node(track.node, track.epoch) is None:
                return
            more = self.ctx.stops.get(track.node, 0.0) - stopped
            if self.ctx.stopped(track.node) or self.ctx.now < due + more:
                self.ctx.at(self.ctx.now + STEP_MS, run)
            elif text := check():
                self.breach(f"{track}: {text}")

        self.ctx.at(due, run)

    def _limbo(self, track: Track) -> None:
        settings = self.ctx.settings(track.node)
        bound_ms = (max(settings.lease_s, settings.limbo_timeout_s) + settings.answer_bound_s) * 1000
        attempt, ended = int(track.attempt), self.ctx.now

        def check() -> str:
            node = self.ctx.node(track.node, track.epoch)
            held = node and [
                k for k in node.manager.sender.limbo if k.room == track.room and k.attempt == attempt
            ]
            return f"its bytes are charged {self.ctx.now - ended:g} ms after its end" if held else ""

        self._later(track, bound_ms, check)

    def _pages(self, track: Track) -> None:
        life, attempt = self.ctx.lives[track.node, track.epoch], track.attempt
        self._later(
            track, 2 * STEP_MS, lambda: "its pages are taken after its end" if life.pages.get(attempt) else ""
        )

    def _registration(self, track: Track) -> None:
        uuid = int(track.uuid)

        def check() -> str:
            offer = self.ctx.offers.get(uuid)
            open_ = offer is not None and offer.withdrawn_ms < 0
            return "its registration was not withdrawn" if open_ else ""

        self._later(track, 2 * STEP_MS, check)

    def _quiet(self, track: Track) -> None:
        """D has become quiet: P gives the bytes back when it hears so."""
        settings = self.ctx.settings(track.node)
        bound_ms = 2 * settings.answer_bound_s * 1000 + STEP_MS
        began, peer, attempt = self.ctx.now, track.peer, int(track.attempt)

        def check() -> str:
            node = self.ctx.node(peer)
            if node is None or self.ctx.disturbed_ms >= began - bound_ms or self.ctx.stopped(peer):
                return ""
            held = [k for k in node.manager.sender.limbo if k.room == track.room and k.attempt == attempt]
            return f"{peer} still charges its bytes although D is quiet" if held else ""

        self._later(track, bound_ms, check)


class V3(Property):
    name = "V3"
    sentence = "timers fire with a full pool, with no traffic and with a paused engine"
    bound = "τ after they are due"
    sampled = True

    def on_sample(self) -> None:
        due_s = (self.ctx.now - STEP_MS - SLACK_MS) / 1000
        for node in self.ctx.nodes():
            timers = node.manager._timers
            if timers and timers[0][0] < due_s and not self.ctx.stopped(node.name):
                self.breach(
                    f"{node.name}: a {timers[0][2][0]} timer is overdue since {timers[0][0] * 1000:g} ms"
                )


class V4(Property):
    name = "V4"
    sentence = "nobody holds one stage's resource while it waits for the other stage's"
    bound = "D takes pages only for a pull that starts in the same step"
    hears = ("pages_taken",)
    instants = True

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.taken: list[tuple[str, str, str]] = []

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["node"].startswith("d"):
            self.taken.append((line["node"], line["epoch"], line["token"]))

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
        for node in self.ctx.nodes():
            manager, name = node.manager, node.name
            queues = (manager._inbox, manager._pending, manager._arrived)
            head = next((q[0] for q in queues if q), None)
            if head is None or self.ctx.stopped(name):
                self.seen.pop(name, None)
            elif name not in self.seen or self.seen[name][0] is not head:
                self.seen[name] = (head, self.ctx.now)
            elif self.ctx.now - self.seen[name][1] > STEP_MS:
                self.breach(f"{name}: work has waited since {self.seen[name][1]:g} ms")


class V6(Property):
    name = "V6"
    sentence = "a living instance is listed, a dead or replaced one leaves"
    bound = "T_m = TTL + heartbeat + R"
    hears = ("born",)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        name, epoch = line["node"], line["epoch"]

        def check() -> None:
            node = self.ctx.node(name, epoch)
            bound_ms = self._bound_ms(name)
            if any(n == name and int(e) > int(epoch) for n, e in self.ctx.births):
                bound_ms *= 2  # its clock went back before it started (docs/decisions/0006)
            if node is None or node.manager.draining:
                return
            calm = self.ctx.now - max(self.ctx.disturbed_ms, line["t"]) >= bound_ms
            if not calm or self.ctx.world.net.registry is None or self.ctx.stopped(name):
                self.ctx.at(self.ctx.now + bound_ms, check)
            elif not listed(self.ctx, name, epoch):
                self.breach(f"{name} lives and is not listed")

        self.ctx.at(line["t"] + self._bound_ms(name), check)

    def _bound_ms(self, name: str) -> float:
        s = self.ctx.settings(name)
        return float(s.heartbeat_ttl_s + s.heartbeat_interval_s + s.answer_bound_s) * 1000

    def at_end(self) -> None:
        if self.ctx.world.net.registry is None:
            return
        for node in self.ctx.nodes():
            calm = self.ctx.now - self.ctx.disturbed_ms >= self._bound_ms(node.name)
            if (
                calm
                and not node.manager.draining
                and not listed(self.ctx, node.name, str(node.manager.epoch))
            ):
                self.breach(f"{node.name} lives and is not listed at the end")


class V7(Property):
    name = "V7"
    sentence = "when one leg ends, the other ends in a round trip and a retry, not by its timeout"
    bound = "2·R + h1, and max(h1, hr) more for each of up to two lost messages"
    hears = ("transition",)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None or track.state not in ENDED or track.before in ENDED:
            return
        settings = self.ctx.settings(track.node)
        bound_ms = (2 * settings.answer_bound_s + settings.hello_interval_s) * 1000
        began, attempt = line["t"], track.attempt
        retry_ms = max(settings.hello_interval_s, settings.renew_s) * 1000

        def check() -> None:
            if self.ctx.broken_ms >= began - bound_ms or self.ctx.ending:
                return
            lost = sum(t >= began - bound_ms for t in self.ctx.losses.get(track.room, ()))
            due = began + bound_ms + SLACK_MS + STEP_MS + lost * retry_ms
            if lost > 2:
                return
            if self.ctx.now < due - SLACK_MS:
                self.ctx.at(due, check)
                return
            there = self.ctx.other_side(track)
            if there is None or not there.live or self.ctx.stopped(there.node):
                return
            if there.began_ms > began or not self._same(track, there, attempt):
                return
            if self._never_met(*((track, there) if track.role == "receiver" else (there, track))):
                return
            self.breach(
                f"{track} ended ({track.reason}), {there} is still {there.state} {bound_ms:g} ms later"
            )

        self.ctx.at(began + bound_ms + SLACK_MS + STEP_MS, check)

    def _never_met(self, receiver: Track, sender: Track) -> bool:
        """The registry has not shown this P to D (it is away, or does not match): only timers are left."""
        node = self.ctx.node(receiver.node, receiver.epoch)
        record = node.manager.receiver.rooms.get(receiver.room) if node is not None else None
        return record is None or sender.node not in record.candidates

    def _same(self, track: Track, there: Track, attempt: str) -> bool:
        """The two records are one hand-off: bound to each other, or not bound and of one request."""
        if "0" in (attempt, there.attempt):
            here_n, there_n = self.ctx.node(track.node, track.epoch), self.ctx.node(there.node, there.epoch)
            if here_n is None or there_n is None:
                return False
            a, b = here_n.manager.rooms.get(track.room), there_n.manager.rooms.get(there.room)
            return a is not None and b is not None and a.digest == b.digest
        return attempt == there.attempt


class V8(Property):
    name = "V8"
    sentence = "a transient fault leaves no permanent penalty: healed, every pair serves again"
    bound = "the first request after the healing"
    hears = ("finished",)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if str(line.get("rid", "")).startswith("probe-") and line.get("outcome") != "ok":
            self.breach(
                f"{line['rid']}: {line.get('outcome')} ({line.get('reason')}) after everything was healed",
                line,
            )


class V9(Property):
    name = "V9"
    sentence = "a stuck request delays others by a bounded time; pages are given first come, first served"
    bound = "FIFO by ready on D, by leg on P"
    hears = ("ready", "start", "admit", "kv_ready")

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
            for other in life.rooms.values():
                if other.state == "Bootstrapping" and other.began_ms < track.began_ms - STEP_MS:
                    self.breach(f"{track}: admitted before room {other.room}, which came earlier", line)


class V10(Property):
    name = "V10"
    sentence = "P holds longer than D waits: no lease ends under a D that lives and is heard"
    bound = "(n+1)·max(h1, hr) + R < lease; D's transfer timer starts at start"
    hears = ("expire_lease", "transition")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        if line["event"] == "expire_lease" and line["to"] == "Failed":
            there = self.ctx.other_side(track)
            lease_ms = self.ctx.settings(track.node).lease_s * 1000
            calm = self.ctx.disturbed_ms < line["t"] - 2 * lease_ms
            if there is None or not calm or self.ctx.stopped(there.node):
                return
            if there.live and there.peer == track.node and there.attempt == track.attempt:
                self.breach(f"{track}: its lease ended under {there}, which lives", line)
        elif line["event"] == "expire_transfer":
            settings = self.ctx.settings(track.node)
            if track.before != "Transferring" or self.ctx.now - track.ready_ms < 0:
                self.breach(f"{track}: the transfer timer ran in {track.before}", line)
            started = track.seen.get("start_pull", 0)
            if not started or settings.transfer_timeout_s <= 0:
                self.breach(f"{track}: the transfer timer fired before a start", line)


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
            seq = scheduler.budget_queue.head()
            record = node.manager.sender.rooms.get(seq.req.room) if seq is not None else None
            if record is None or record.state != 1 or (record.settings.gated and not record.peer):
                return None
            return seq if node.manager.sender.budget.can(seq.kv_bytes) else None
        seq = scheduler.page_queue.head()
        record = node.manager.receiver.rooms.get(seq.req.room) if seq is not None else None
        if record is None or record.state != 2 or record.manifest is None:
            return None
        if not node.manager.receiver.fresh(record.bound):
            return None
        return seq if scheduler._page_head(float("inf")) is seq else None


class V12(Property):
    name = "V12"
    sentence = "after drain nothing is accepted, what runs ends, and the registration is removed"
    bound = "T_drain = request"
    hears = ("leg",)
    sampled = True

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.since: dict[tuple[str, str], float] = {}

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["from"] == "Absent" and line["to"] == "Bootstrapping":
            node = self.ctx.node(line["node"], line["epoch"])
            if node is not None and node.manager.draining:
                self.breach(f"{track}: accepted while draining", line)

    def on_sample(self) -> None:
        for node in self.ctx.nodes():
            if not node.manager.draining:
                continue
            key = (node.name, str(node.manager.epoch))
            since = self.since.setdefault(key, self.ctx.now)
            if self.ctx.stopped(node.name):
                self.since[key] = self.ctx.now
            elif self.ctx.now - since > node.manager.settings.request_timeout_s * 1000 + STEP_MS:
                if node.manager.n_live:
                    self.breach(f"{node.name}: {node.manager.n_live} rooms live after the drain")
                elif listed(self.ctx, *key) and self.ctx.now - self.ctx.disturbed_ms > STEP_MS:
                    self.breach(f"{node.name}: still listed after the drain")


PROPERTIES: tuple[type[Property], ...] = (V1, V2, V3, V4, V5, V6, V7, V8, V9, V10, V11, V12)
