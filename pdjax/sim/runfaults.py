"""What went wrong in a recorded run, as steps of a trace: deaths, aborts, lost messages, failed and slow pulls.

A step that ends a request while it decodes counts tokens, not time: a simulated decode step lasts as long as Timing says.

Must never invent a fault: what the logs do not show is no step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.node import Timing
from pdjax.sim.runlog import Life, Line, RunLogs
from pdjax.sim.trace_types import room_text

# Lines that a step can wait for: the newest one before a fault says where in the protocol it struck.
MILESTONES = frozenset(
    [
        "admitted",
        "prefilled",
        "registered",
        "peer_known",
        "pull_started",
        "landed",
        "scattered",
        "first_token",
    ]
)
# Lines that stand between a milestone and what follows from it.
_BESIDE = frozenset(
    ["sent", "delivered", "pages_taken", "pages_shared", "pages_freed", "slot_taken", "slot_freed"]
)
MAX_FAULTS = 200  # message rules of one import; a lossy run of an hour is no scenario


class RunFaults(RunLogs):
    """Steps for the faults of one run. remarks: what was left out, or is not where it was.

    rids, rid_of: room, attempt → the request that a step names (an attempt's room may be used again).
    """

    def __init__(self, lines: list[Line]) -> None:
        super().__init__(lines)
        self.rids: dict[int, str] = {}
        self.rid_of: dict[str, str] = {}
        self.remarks: list[str] = []

    def processes(self) -> Iterable[dict[str, Any]]:
        """A node with more than one life has died in between."""
        for node, old, new in self.deaths:
            died = self._died_at(node, old, new)
            yield {**self._under_a_pull(node, died), "crash": self.names[node]}
            yield {"at": max(self.at(new.lines[0]), died), "restart": self.names[node]}

    @cached_property
    def deaths(self) -> list[tuple[str, Life, Life]]:
        """(node, life that ended, life that follows it)."""
        found = []
        by_node: dict[str, list[Life]] = {}
        for life in self.lives.values():
            by_node.setdefault(life.node, []).append(life)
        for node, lives in by_node.items():
            lives.sort(key=lambda life: int(life.epoch))
            for old, new in pairwise(lives):
                found.append((node, old, new))
        return found

    def _died_at(self, node: str, old: Life, new: Life) -> float:
        """After its last line, and before the first sign of it at a peer."""
        last, back = self.at(old.lines[-1]), self.at(new.lines[0])
        signs = [
            self.at(line)
            for life in self.lives.values()
            for line in life.lines
            if line.event in ("refused", "peer_failed", "peer_silence") and last < self.at(line) < back
        ]
        return min(signs, default=last)

    def _under_a_pull(self, node: str, died: float) -> dict[str, Any]:
        """A trigger for a death: by the pull that it struck, if one was under way; else by its own newest milestone."""
        for life in self.lives.values():
            for i, line in enumerate(life.lines):
                if (
                    line.event == "pull_started"
                    and node in (line.get("peer"), life.node)
                    and line.room is not None
                ):
                    began = self.at(line)
                    landed = self._landed_at(life, i)
                    if began <= died and (landed is None or landed > died):
                        room = room_text(line.room)
                        on = {"event": "pull_started", "room": room, "node": self.names[life.node]}
                        return {"on": on, "after": round(max(died - began - 0.5, 0.0), 3)}
        return self._after_milestone(node, died)

    def _after_milestone(self, node: str, died: float) -> dict[str, Any]:
        """So that what it had done by then is done by then in the replay, too: an answered leg stays answered.

        The time, if it had done nothing.
        """
        done = [
            line
            for life in self.lives.values()
            if life.node == node
            for line in life.lines
            if line.event in MILESTONES and line.room is not None and self.at(line) <= died
        ]
        if not done:
            return {"at": died}
        newest = max(done, key=self.at)
        assert newest.room is not None
        nth = sum((line.event, line.room) == (newest.event, newest.room) for line in done)
        on = {"event": newest.event, "room": room_text(newest.room), "node": self.names[node]}
        return {"on": on, "after": round(died - self.at(newest), 3)} | ({"nth": nth} if nth > 1 else {})

    def _landed_at(self, life: Life, index: int) -> float | None:
        began = life.lines[index]
        later = (x for x in life.by_room[began.room] if x.number > began.number and x.event == "landed")
        return next((self.at(x) for x in later), None)

    def slow_pulls(self) -> Iterable[dict[str, Any]]:
        """Pulls that took much longer than the others, or had not landed when their room ended."""
        took: list[tuple[Line, str, float, bool]] = []
        for life in self.lives.values():
            for i, line in enumerate(life.lines):
                if line.event != "pull_started" or line.room is None:
                    continue
                landed = self._landed_at(life, i)
                over = (
                    x
                    for x in life.by_room[line.room]
                    if x.number > line.number and x.get("to") in ("Failed", "Success")
                )
                end = landed if landed is not None else next((self.at(x) for x in over), None)
                if end is not None:
                    took.append((line, self.names[life.node], end - self.at(line), landed is not None))
        usual = statistics.median([ms for _, _, ms, _ in took]) if len(took) > 2 else 5.0
        for line, name, ms, landed_in_time in took:
            if ms > 4 * usual and line.room is not None:
                room = room_text(line.room)
                yield {
                    "at": 0,
                    "transfer": {
                        "match": {"room": room, "to": name},
                        "do": "slow",
                        "by": round(ms - usual if landed_in_time else ms, 3),
                    },
                }

    def _where(self, life: Life, index: int) -> dict[str, Any]:
        """A trigger: the newest milestone up to that line, if it is the same instant of the protocol; else the time."""
        for i in range(index, -1, -1):
            line = life.lines[i]
            if line.event in MILESTONES and line.room is not None:
                room = room_text(line.room)
                return {"on": {"event": line.event, "room": room, "node": self.names[life.node]}}
            if line.event not in _BESIDE and (line.get("role") is None or line.get("from") != line.get("to")):
                break
        return {"at": self.at(life.lines[index])}

    def ends(self) -> Iterable[dict[str, Any]]:
        """Aborts, failed pulls and local errors."""
        for life in self.lives.values():
            name, side = self.names[life.node], "prefill" if life.role == t.SENDER else "decode"
            for i, line in enumerate(life.lines):
                if line.event == "cut_short" and line.room is not None:
                    yield self._cut_short(life, line)
                if line.get("role") is None or line.get("from") == line.get("to") or line.room is None:
                    continue
                room = room_text(line.room)
                where = self._where(life, i - 1) if i else {"at": self.at(line)}
                if line.event == "abort_local":
                    yield {**where, "abort": {"rid": self._rid(line.get("attempt"), line.room), "to": [side]}}
                elif line.event == "peer_failed" and self._peer_died(life, line):
                    continue  # the crash says it
                elif line.event == "peer_failed":
                    yield {"at": 0, "transfer": {"match": {"room": room, "to": name}, "do": "fail"}}
                elif line.event == "expire_transfer":
                    yield {"at": 0, "transfer": {"match": {"room": room, "to": name}, "do": "hang"}}
                elif line.event == "engine_error":
                    yield {"at": 0, "error": {"node": name, "in": self._work(life, line), "room": room}}

    def _rid(self, attempt: Any, room: int) -> str:
        return self.rid_of.get(str(attempt), self.rids[room])

    def _cut_short(self, life: Life, line: Line) -> dict[str, Any]:
        """What ended a request while D decoded it, after as many tokens as in the recorded run where it can be."""
        assert line.room is not None
        name, room, tokens = self.names[life.node], room_text(line.room), int(line.get("tokens"))
        attempt, began = life.decoding(line)
        rid = self._rid(attempt, line.room)
        where: dict[str, Any] = {"at": self.at(line)}
        firsts = [x for x in life.by_room[line.room] if x.event == "first_token"]
        first = next((x for x in firsts if began is not None and x.number > began.number), None)
        # Steps whose tokens are said, or not said any more, because of what is under way at the first token.
        lag = 2.5 if began is not None and began.event == "recompute" else 0.5
        if first is not None:
            earlier = sum(
                x.event == "first_token"
                for other in self.lives.values()
                if other.node == life.node and int(other.epoch) < int(life.epoch)
                for x in other.by_room.get(line.room, ())
            )
            where = {"on": {"event": "first_token", "room": room, "node": name}}
            where |= {"nth": nth} if (nth := earlier + firsts.index(first) + 1) > 1 else {}
            where["after"] = round(max(tokens - lag, 0) * (Timing.decode_step + Timing.loop), 3)
        if first is None or tokens < min(lag + 0.5, 2):  # what ends it at once ends it after so many
            self.remarks.append(f"{rid}: it ended after {tokens} tokens, in the simulator it may be others")
        if line.get("reason") == "engine_error":
            return {**where, "error": {"node": name, "in": "decode", "room": room}}
        return {**where, "abort": {"rid": rid, "to": ["decode"]}}

    def _peer_died(self, life: Life, line: Line) -> bool:
        """The P of this room had ended when the pull failed."""
        peers = [x.get("peer") for x in life.by_room[line.room] if x.event == "pull_started"]
        return any(
            node in peers and self.at(old.lines[-1]) <= self.at(line) <= self.at(new.lines[0])
            for node, old, new in self.deaths
        )

    def _work(self, life: Life, line: Line) -> str:
        """Which work had failed: what the room was doing."""
        if life.role == t.SENDER:
            return "register" if line.get("from") == "Transferring" else "prefill"
        landed = any(x.event == "landed" and x.number < line.number for x in life.by_room[line.room])
        return "scatter" if landed else "pull"

    def messages(self) -> Iterable[dict[str, Any]]:
        """Messages that were sent, and never delivered to a process that lived and had heard this sender."""
        n = 0
        for (sender, receiver), pairs in self.pairs.items():
            if receiver not in self.names:
                continue
            heard = self._heard_from(pairs)
            counts: dict[tuple[Any, ...], int] = {}
            for sent, got in pairs:
                key = (sent.get("message"), sent.room)
                counts[key] = counts.get(key, 0) + 1
                if got is not None or not self._was_there(receiver, sent, heard):
                    continue
                n += 1
                if n > MAX_FAULTS:
                    self.remarks.append(f"more than {MAX_FAULTS} lost messages: the others are left out")
                    return
                room = room_text(sent.room or 0)
                match = {
                    "type": sent.get("message"), "room": room,
                    "from": self.names[sender], "to": self.names[receiver],
                }  # fmt: skip
                yield {"at": 0, "message": {"match": match, "nth": counts[key], "do": "drop"}}

    def _heard_from(self, pairs: list[tuple[Line, Line | None]]) -> dict[tuple[Any, Any], float]:
        """(life of the sender, life of the receiver) → when the one first handled a message of the other."""
        heard: dict[tuple[Any, Any], float] = {}
        for sent, got in pairs:
            if got is not None:
                key = (sent.life, got.life)
                heard[key] = min(heard.get(key, self.at(got)), self.at(got))
        return heard

    def _was_there(self, receiver: str, sent: Line, heard: dict[tuple[Any, Any], float]) -> bool:
        """The receiver lived and could tell how old this was: P drops what a D says before it has proved itself."""
        at = self.at(sent)
        for life in self.lives.values():
            if life.node == receiver and self.at(life.lines[0]) <= at < self.at(life.lines[-1]):
                return (
                    life.role == t.RECEIVER or heard.get((sent.life, (life.node, life.epoch)), at + 1) <= at
                )
        return False
