"""Liveness: everything ends and is given back in time (V1, V2, V7, V10 of protocol §10, bounds from its §7).

A bound that holds only while messages get through is excused by a fault in its window (``ctx.disturbed_ms``); the
bounds that must hold in any case are not. Time that a process spent stopped is added to its deadlines. Must never
excuse what no fault of the run explains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdjax.sim.properties.base import ENDED, SLACK_MS, STEP_MS, Context, Decision, Life, Property, Track
from pdjax.sim.properties.upkeep import EXPIRES, Answers, is_over, still_works, tells_by_itself, wrong_timers


class V1(Property):
    name = "V1"
    sentence = "every accepted request reaches exactly one outcome"
    bound = "T_req = request + R"
    hears = ("transition", "request", "finished")

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.event == "leg" and d.opens

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.open: dict[str, float] = {}
        self.ended: set[str] = set()

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        event = line["event"]
        if event == "leg":
            if track is not None:
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

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.ends or d.event == "peer_reborn" or "to_limbo" in d.effects or "notice_quiet" in d.effects

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        ended = track.state in ENDED and track.before not in ENDED
        if "to_limbo" in line["effects"]:
            self._limbo(track)
        elif ended and track.role == "receiver" and track.state == "Failed":
            self._pages(track)
            self._pull(track)
        if ended and track.state == "Failed":
            self._work(track)
        if ended and track.role == "sender" and track.uuid:
            self._registration(track)
        if track.role == "receiver" and (
            "notice_quiet" in line["effects"] or (ended and track.state == "Success")
        ):
            self._quiet(track)
        if line["event"] == "peer_reborn" and track.role == "sender":
            self._reborn(track, line["peer"], int(line["peer_epoch"]))

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

    def _work(self, track: Track) -> None:
        """A scheduler hears of the end in its next turn, or in the one after if it has not taken the request in yet.

        A device step may hold these turns up.
        """

        def works() -> str:
            node = self.ctx.node(track.node, track.epoch)
            idle = node is None or self._used_again(track) or not still_works(node, track.room)
            return "" if idle else "its scheduler still works for it"

        self._in_two_turns(track, works)

    def _in_two_turns(self, track: Track, wrong: Callable[[], str]) -> None:
        """Looks once the scheduler has had two turns, or will have none by itself."""
        node = self.ctx.node(track.node, track.epoch)
        turns = node.host_turns if node is not None else 0

        def check() -> str:
            node = self.ctx.node(track.node, track.epoch)
            text = wrong()
            if text and node is not None and node.host_turns < turns + 2 and node.will_look:
                self._later(track, STEP_MS, check)
                return ""
            return text

        self._later(track, 2 * STEP_MS, check)

    def _used_again(self, track: Track) -> bool:
        """The number came a second time, which it may once its tombstone has fallen: the work is the new room's."""
        now = self.ctx.lives[track.node, track.epoch].rooms.get(track.room)
        return now is not None and now.live

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
        # D's scheduler has long steps, too, when it computes a request anew.
        self._in_two_turns(
            track, lambda: "its pages are taken after its end" if life.pages.get(attempt) else ""
        )

    def _pull(self, track: Track) -> None:
        """A pull that outlives its room is in the graveyard, whose timer ends it."""
        key = (track.room, int(track.attempt))

        def check() -> str:
            node = self.ctx.node(track.node, track.epoch)
            pull = node.manager._pulls.get(node.manager._pull_ids.get(key)) if node is not None else None
            return (
                "its pull goes on, and no timer will end it"
                if pull is not None and not pull.abandoned
                else ""
            )

        self._later(track, 2 * STEP_MS, check)

    def _registration(self, track: Track) -> None:
        uuid = int(track.uuid)

        def check() -> str:
            offer = self.ctx.offers.get(uuid)
            open_ = offer is not None and offer.withdrawn_ms < 0
            return "its registration was not withdrawn" if open_ else ""

        self._later(track, 2 * STEP_MS, check)

    def _reborn(self, track: Track, peer: str, epoch: int) -> None:
        """The life that could still read the bytes is over: they are free at once."""

        def check() -> str:
            node = self.ctx.node(track.node, track.epoch)
            limbo = node.manager.sender.limbo.items() if node is not None else ()
            dead = [k for k, v in limbo if (k.room, k.peer) == (track.room, peer) and v.epoch < epoch]
            return f"its bytes are charged for a life of {peer} that is over" if dead else ""

        self._later(track, STEP_MS, check)

    def _quiet(self, track: Track) -> None:
        """D has become quiet: P gives the bytes back when it hears so."""
        settings = self.ctx.settings(track.node)
        bound_ms = 2 * settings.answer_bound_s * 1000 + STEP_MS
        began, peer, attempt = self.ctx.now, track.peer, int(track.attempt)

        def check() -> str:
            node = self.ctx.node(peer)
            if node is None or self.ctx.disturbed_ms >= began - bound_ms or self.ctx.stopped(peer):
                return ""
            if any(
                self.ctx.set_back(*life)
                for life in ((track.node, track.epoch), (peer, node.manager.log.epoch))
            ):
                return ""  # one does not believe the other yet
            held = [k for k in node.manager.sender.limbo if k.room == track.room and k.attempt == attempt]
            return f"{peer} still charges its bytes although D is quiet" if held else ""

        self._later(track, bound_ms, check)


class V7(Property):
    name = "V7"
    sentence = "when one leg ends, the other ends in a round trip and a retry, not by its timeout"
    bound = "2·R + h1, and max(h1, hr) more for each of up to two lost messages; P answers within its turn"
    hears = ("transition", "delivered", "sent", "effect_failed")
    instants = True

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.answers = Answers(ctx)
        self.shown_ms: dict[tuple[str, str, str], float] = {}  # D, its attempt, a P: when D first knew of it
        self.untold: dict[tuple[str, str, int, str], float] = {}  # P, D, room, attempt: since when

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.ends or d.event == "candidates" or (d.role == "sender" and d.event.startswith("leg"))

    def on_instant(self) -> None:
        if self.answers.open:
            for text in self.answers.missing():
                self.breach(text)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if "role" not in line:
            self.answers.on_line(line, track)
            if line["event"] == "sent":
                self.untold.pop((line["node"], line["peer"], int(line["room"]), line["attempt"]), None)
            return
        if track is not None and line["event"] == "candidates":
            self._note_candidates(line, track)
        if track is not None and tells_by_itself(line, track):
            self._must_tell(track)
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
            here = self.ctx.node(track.node, track.epoch)
            if here is None or here.left:
                return  # it has drained and ends: who is sent to it then finds nobody
            if any(self.ctx.set_back(t.node, t.epoch) for t in (track, there)):
                return  # neither believes the other yet: silence and leases are left
            if there.began_ms > began or not self._same(track, there, attempt):
                return
            receiver, sender = (track, there) if track.role == "receiver" else (there, track)
            if self._waits_for_another(receiver, sender):
                return
            shown_ms = self.shown_ms.get((receiver.node, receiver.attempt, sender.node), 0.0)
            if self.ctx.now < shown_ms + bound_ms:  # the registry has just named this P to D: D asks it now
                self.ctx.at(shown_ms + bound_ms + SLACK_MS, check)
                return
            self.breach(
                f"{track} ended ({track.reason}), {there} is still {there.state} {bound_ms:g} ms later"
            )

        self.ctx.at(began + bound_ms + SLACK_MS + STEP_MS, check)

    def _note_candidates(self, line: dict[str, Any], receiver: Track) -> None:
        node = self.ctx.node(receiver.node, receiver.epoch)
        record = node.manager.receiver.rooms.get(receiver.room) if node is not None else None
        for peer in record.candidates if record is not None else ():
            self.shown_ms.setdefault((receiver.node, receiver.attempt, peer), line["t"])

    def _must_tell(self, track: Track) -> None:
        """Within two turns: the decision may be the scheduler's, the driver sends."""
        key = (track.node, track.peer, track.room, track.attempt)
        since = self.untold.setdefault(key, self.ctx.now)

        def check() -> None:
            # Of this telling: another may be open by now, and is looked at in its own time.
            if self.untold.get(key) == since and self.ctx.node(track.node, track.epoch):
                if self.ctx.stopped(track.node):
                    self.ctx.at(self.ctx.now + STEP_MS, check)
                else:
                    self.breach(f"{track}: {track.peer} is not told that it is {track.state}")

        self.ctx.at(self.ctx.now + 2 * STEP_MS, check)

    def _waits_for_another(self, receiver: Track, sender: Track) -> bool:
        """This P is none of those that D may still hear of: only timers are left.

        The registry has not shown the P to D (it is away, or does not match), or the P has dropped out while others
        remain, which is no failure (protocol §3: D cannot know which of them the router has chosen). It has said
        failed, or was not heard. D that ends has told every one of them.
        """
        node = self.ctx.node(receiver.node, receiver.epoch)
        record = node.manager.receiver.rooms.get(receiver.room) if node is not None else None
        if record is None:
            return True
        candidate = record.candidates.get(sender.node)
        if candidate is None:
            return True
        return candidate.out and receiver.live and any(not c.out for c in record.candidates.values())

    def _same(self, track: Track, there: Track, attempt: str) -> bool:
        """The two records are one hand-off: bound to each other, or not bound and of one request."""
        if "0" in (attempt, there.attempt):
            here_n, there_n = self.ctx.node(track.node, track.epoch), self.ctx.node(there.node, there.epoch)
            if here_n is None or there_n is None:
                return False
            a, b = here_n.manager.rooms.get(track.room), there_n.manager.rooms.get(there.room)
            return a is not None and b is not None and a.digest == b.digest
        return attempt == there.attempt


class V10(Property):
    name = "V10"
    sentence = (
        "P holds longer than D waits: no lease ends under a D that lives and is heard, no P that lives counts as silent,"
        " and each timer runs where protocol §7 names it and ends its room"
    )
    bound = "(n+1)·max(h1, hr) + R < lease; D's transfer timer starts at start"
    hears = ("transition",)
    instants = True

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.event == "peer_silence" or d.event.removeprefix("expire_") in EXPIRES

    def on_instant(self) -> None:
        for track, record, _ in self.ctx.changed:
            for text in wrong_timers(track, record) if record is not None else ():
                self.breach(f"{track}: {text}")

    def _mute(self, line: dict[str, Any], track: Track) -> None:
        """D takes a P for gone: did it live, and could it be heard, all the time?"""
        patience_ms = self.ctx.settings(track.node).peer_timeout_s * 1000
        calm = self.ctx.disturbed_ms < line["t"] - 2 * patience_ms
        node = self.ctx.node(line["peer"])
        if not calm or node is None or self.ctx.stopped(line["peer"]):
            return
        lives = ((track.node, track.epoch), (line["peer"], node.manager.log.epoch))
        if self._asks_for_what_is_over(*lives):
            return
        if not any(self.ctx.set_back(*life) for life in lives):
            self.breach(f"{track}: {line['peer']} lives and counts as silent", line)

    def _asks_for_what_is_over(self, d: Life, p: Life) -> bool:
        """One of D's rooms has lost its P to a twin and gets no answer. Silence is of the peer, not of that room: if
        nothing else is asked of P, all of D's rooms that know it hear of the silence."""
        there = self.ctx.lives[p].rooms
        mine = self.ctx.lives[d].rooms.values()
        return any(t.room in there and is_over(t.attempt, t.node, there[t.room]) for t in mine)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        if line["event"] == "peer_silence":
            self._mute(line, track)
        elif track.live:
            self.breach(f"{track}: {line['event']} and the room goes on", line)
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
