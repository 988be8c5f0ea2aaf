"""Event logs of real processes → a trace file: the same requests, rooms, and faults, as far as the logs show them.

Must never invent a fault: what the logs do not show is not in the trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pdjax.core import conform
from pdjax.core import transitions as t
from pdjax.sim.runlog import Life, Line, NoRun, RunLogs
from pdjax.sim.trace_reader import exact_room
from pdjax.sim.trace_types import FORMAT

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
MAX_FAULTS = 200  # message rules of one import; a lossy run of an hour is no scenario


@dataclass
class Half:
    """One side of one request."""

    line: Line
    node: str
    at: float
    life: Life


def import_logs(data: Sequence[bytes], *, source: str = "") -> tuple[dict[str, Any], list[str]]:
    """(trace, remarks). Raises NoRun for files that are no whole event logs."""
    lines, wrong = conform.read(data)
    wrong += conform.numbered(conform.Log(lines))
    if wrong:
        raise NoRun(f"not a whole event log: {wrong[0]}")
    if not lines:
        raise NoRun("there is no event in these files")
    return _Importer(lines, source).trace()


class _Importer(RunLogs):
    def __init__(self, lines: list[Line], source: str) -> None:
        super().__init__(lines)
        self.source = source
        self.remarks: list[str] = []
        self.guesses = 0

    # ---------------------------------------------------------------- the whole

    def trace(self) -> tuple[dict[str, Any], list[str]]:
        legs = [line for line in self._lines() if line.event in ("leg", "leg_bad", "leg_refused")]
        if not legs:
            raise NoRun("no request was posted in these logs")
        self.start = min(float(line.get("t")) + self.offsets[line.life[0]] for line in legs)
        requests = self._requests(legs)
        faults = [*self._processes(), *self._ends(), *self._messages(), *self._slow_pulls()]
        steps = sorted([*requests, *faults], key=lambda s: s.get("at", 0.0))
        if self.guesses:
            self.remarks.append(f"{self.guesses} prompts have a guessed length: the logs do not say it")
        named = ", ".join(f"{name} = {short}" for name, short in self.names.items())
        raw = {
            "format": FORMAT,
            "name": "imported",
            "why": "a recorded run",
            "source": f"{self.source}: {named}" if self.source else named,
            "world": self._world(),
            "steps": steps,
            "expect": {"outcomes": self.outcomes},
        }
        return raw, self.remarks

    def _lines(self) -> Iterable[Line]:
        for life in self.lives.values():
            yield from life.lines

    # ---------------------------------------------------------------- the world

    def _world(self) -> dict[str, Any]:
        world: dict[str, Any] = {
            "prefill": [n for n in self.names.values() if n[0] == "p"] or ["p0"],
            "decode": [n for n in self.names.values() if n[0] == "d"] or ["d0"],
            "page_size": self.page_size,
        }
        pages: dict[str, int] = {}
        flags: dict[str, Any] = {}
        for life in self.lives.values():
            started = next((x.raw for x in life.lines if x.event == "started" and "mode" in x.raw), None)
            name = self.names[life.node]
            if started is not None:
                pages[name] = max(int(started["num_pages"]) - 1, 1)
                world["pools"] = list(started["pools"])
                if started["flags"]:
                    flags[name] = started["flags"]
        if not pages:
            self.remarks.append("the logs do not say how large the pools are: 1024 pages each")
            pages = dict.fromkeys([*world["prefill"], *world["decode"]], 1024)
        world["pages"] = pages
        for life in self.lives.values():
            if any(x.event == "abort_local" and x.get("from") == "WaitingForInput" for x in life.lines):
                # An abort between two chunks of a prefill: let there be more than one.
                flags.setdefault(self.names[life.node], {})["chunked-prefill-size"] = self.page_size
        if flags:
            world["flags"] = flags
        world["timing"] = self._timing()
        return world

    @cached_property
    def page_size(self) -> int:
        for line in self._lines():
            if line.event == "started" and "page_size" in line.raw:
                return int(line.get("page_size"))
        return 16

    def _timing(self) -> dict[str, float]:
        """What work cost, as the medians of the run."""
        trips, prefills, pulls = [], [], []
        for (a, b), pairs in self.pairs.items():
            shift = self.offsets.get(b, 0.0) - self.offsets.get(a, 0.0)
            trips += [y.get("t") - x.get("t") + shift for x, y in pairs if y is not None]
        for life in self.lives.values():
            began: dict[tuple[str, int | None], float] = {}
            for line in life.lines:
                began[line.event, line.room] = float(line.get("t"))
                if line.event == "kv_ready" and ("admit", line.room) in began:
                    prefills.append(
                        (line.get("t") - began["admit", line.room]) / self.prompts.get(line.room, 1)
                    )
                if line.event == "landed" and ("pull_started", line.room) in began:
                    n_pages = max(1, -(-self.prompts.get(line.room, 1) // self.page_size))
                    pulls.append((line.get("t") - began["pull_started", line.room]) / n_pages)
        out = {"link": trips, "prefill_per_token": prefills, "pull_per_page": pulls}
        # A few of them may each be the odd one; what is slow beyond the usual becomes a step of its own.
        return {k: round(max(statistics.median(v), 0.001), 3) for k, v in out.items() if len(v) > 2}

    # ---------------------------------------------------------------- requests

    def _requests(self, legs: list[Line]) -> list[dict[str, Any]]:
        """One step for each pair of legs of a room. A second leg of one side is a request of its own."""
        self.outcomes: dict[str, str] = {}
        self.prompts: dict[int | None, int] = {}
        self.rids: dict[int, str] = {}
        halves: dict[int, list[dict[str, Half]]] = {}
        for line in sorted(legs, key=self.at):
            assert line.room is not None
            life = self.lives[line.life]
            side = "prefill" if life.role == t.SENDER else "decode"
            half = Half(line, self.names[life.node], self.at(line), life)
            for pair in halves.setdefault(line.room, []):
                if side not in pair:
                    pair[side] = half
                    break
            else:
                halves[line.room].append({side: half})
        steps = []
        taken: dict[str, int] = {}
        for room, pairs in halves.items():
            for pair in pairs:
                steps.append(self._request(room, pair, taken))
        return steps

    def _request(self, room: int, pair: Mapping[str, Half], taken: dict[str, int]) -> dict[str, Any]:
        exact_room(room, "room")
        first = min(pair.values(), key=lambda h: h.at)
        rid = str(next((h.line.get("rid") for h in pair.values() if h.line.get("rid")), f"r{room}"))
        taken[rid] = taken.get(rid, 0) + 1
        if taken[rid] > 1:  # a router's retry repeats the rid; a trace names each attempt
            rid = f"{rid}#{taken[rid]}"
        prompt, output = self._sizes(room, pair)
        self.prompts[room] = prompt
        self.rids.setdefault(room, rid)
        request: dict[str, Any] = {
            "rid": rid,
            "room": room if room < 1 << 53 else str(room),
            "prompt": prompt,
            "output": output,
        }
        shaped: dict[str, Any] = {}
        for side in ("prefill", "decode"):
            half = pair.get(side)
            if half is None:
                shaped[side] = {"drop": True}
                continue
            request[side] = half.node
            if half.at > first.at:
                shaped[side] = {"delay": round(half.at - first.at, 3)}
            if half.line.event != "leg" and half.line.get("effects") != ["answer_duplicate"]:
                shaped.setdefault(side, {})["status"] = 400 if half.line.event == "leg_bad" else 503
        for side, letter in (("prefill", "p"), ("decode", "d")):
            if side not in request:
                request[side] = next((n for n in self.names.values() if n[0] == letter), f"{letter}0")
        if shaped:
            request["legs"] = shaped
        self.outcomes[rid] = self._outcome(room, pair)
        return {"at": first.at, "request": request}

    def _sizes(self, room: int, pair: Mapping[str, Half]) -> tuple[int, int]:
        """Tokens of prompt and output, as exactly as the logs have them: pages give an upper bound."""
        prompt = next((int(h.line.get("prompt")) for h in pair.values() if h.line.get("prompt")), 0)
        page = self.page_size
        taken: dict[str, int] = {}
        for side, half in pair.items():
            taken[side] = self._pages_of(half)
        if not prompt:
            prompt = max((taken.get("prefill", 0) or taken.get("decode", 0)) * page - 1, 1)
            self.guesses += 1
        output = taken.get("decode", 0) * page - prompt if taken.get("decode") else 4
        return prompt, max(output, 1)

    def _pages_of(self, half: Half) -> int:
        """D's pages of this attempt. P's pages carry a number of its own and are not told apart."""
        if half.life.role != t.RECEIVER:
            return 0
        return half.life.pages.get(str(half.line.get("attempt")), {}).get("pages_taken", 0)

    def _outcome(self, room: int, pair: Mapping[str, Half]) -> str:
        half = pair.get("decode")
        if half is None or half.line.get("effects") == ["answer_duplicate"]:
            return "any"
        token, good = half.line.get("attempt"), False
        for line in half.life.by_room[room]:
            if line.get("attempt") == token:
                good |= line.event == "scattered" and line.get("to") == "Success"
                if line.event == "abort_local":
                    return "any"
        return "ok" if good and "pages_freed" in half.life.pages.get(str(token), {}) else "any"

    # ---------------------------------------------------------------- faults

    def _processes(self) -> Iterable[dict[str, Any]]:
        """A node with more than one life has died in between."""
        for node, old, new in self._deaths():
            died = self._died_at(node, old, new)
            yield {**self._under_a_pull(node, died), "crash": self.names[node]}
            yield {"at": max(self.at(new.lines[0]), died), "restart": self.names[node]}

    def _deaths(self) -> Iterable[tuple[str, Life, Life]]:
        by_node: dict[str, list[Life]] = {}
        for life in self.lives.values():
            by_node.setdefault(life.node, []).append(life)
        for node, lives in by_node.items():
            lives.sort(key=lambda life: int(life.epoch))
            for old, new in pairwise(lives):
                yield node, old, new

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
        """A trigger for a death: by the pull that it struck, if one was under way; else the time."""
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
                        room = line.room if line.room < 1 << 53 else str(line.room)
                        on = {"event": "pull_started", "room": room, "node": self.names[life.node]}
                        return {"on": on, "after": round(max(died - began - 0.5, 0.0), 3)}
        return {"at": died}

    def _landed_at(self, life: Life, index: int) -> float | None:
        began = life.lines[index]
        later = (x for x in life.by_room[began.room] if x.number > began.number and x.event == "landed")
        return next((self.at(x) for x in later), None)

    def _slow_pulls(self) -> Iterable[dict[str, Any]]:
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
                room = line.room if line.room < 1 << 53 else str(line.room)
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
        for line in reversed(life.lines[: index + 1]):
            if line.event in MILESTONES and line.room is not None:
                room = line.room if line.room < 1 << 53 else str(line.room)
                return {"on": {"event": line.event, "room": room, "node": self.names[life.node]}}
            if line.event not in ("sent", "delivered", "pages_taken", "pages_freed") and (
                line.get("role") is None or line.get("from") != line.get("to")
            ):
                break
        return {"at": self.at(life.lines[index])}

    def _ends(self) -> Iterable[dict[str, Any]]:
        """Aborts, failed pulls and local errors."""
        for life in self.lives.values():
            name, side = self.names[life.node], "prefill" if life.role == t.SENDER else "decode"
            for i, line in enumerate(life.lines):
                if line.get("role") is None or line.get("from") == line.get("to") or line.room is None:
                    continue
                room = line.room if line.room < 1 << 53 else str(line.room)
                where = self._where(life, i - 1) if i else {"at": self.at(line)}
                if line.event == "abort_local":
                    yield {**where, "abort": {"rid": self.rids[line.room], "to": [side]}}
                elif line.event == "peer_failed" and self._peer_died(life, line):
                    continue  # the crash says it
                elif line.event == "peer_failed":
                    yield {"at": 0, "transfer": {"match": {"room": room, "to": name}, "do": "fail"}}
                elif line.event == "expire_transfer":
                    yield {"at": 0, "transfer": {"match": {"room": room, "to": name}, "do": "hang"}}
                elif line.event == "engine_error":
                    yield {"at": 0, "error": {"node": name, "in": self._work(life, line), "room": room}}

    def _peer_died(self, life: Life, line: Line) -> bool:
        """The P of this room had ended when the pull failed."""
        peers = [x.get("peer") for x in life.by_room[line.room] if x.event == "pull_started"]
        return any(
            node in peers and self.at(old.lines[-1]) <= self.at(line) <= self.at(new.lines[0])
            for node, old, new in self._deaths()
        )

    def _work(self, life: Life, line: Line) -> str:
        """Which work had failed: what the room was doing."""
        if life.role == t.SENDER:
            return "register" if line.get("from") == "Transferring" else "prefill"
        landed = any(x.event == "landed" and x.number < line.number for x in life.by_room[line.room])
        return "scatter" if landed else "pull"

    def _messages(self) -> Iterable[dict[str, Any]]:
        """Messages that were sent, and never delivered to a process that lived on and had heard this sender."""
        n = 0
        for (sender, receiver), pairs in self.pairs.items():
            if receiver not in self.names:
                continue
            heard: float | None = min((self.at(b) for _, b in pairs if b is not None), default=None)
            if self.names[sender][0] == "p":
                heard = 0.0  # P speaks only when it is asked, so D can always tell how old it is
            until = max(self.at(life.lines[-1]) for life in self.lives.values() if life.node == receiver)
            counts: dict[tuple[Any, ...], int] = {}
            for sent, got in pairs:
                key = (sent.get("message"), sent.room)
                counts[key] = counts.get(key, 0) + 1
                lost = got is None and heard is not None and heard <= self.at(sent) < until
                if not lost or self._reborn_around(receiver, sent):
                    continue
                n += 1
                if n > MAX_FAULTS:
                    self.remarks.append(f"more than {MAX_FAULTS} lost messages: the others are left out")
                    return
                room = sent.room if (sent.room or 0) < 1 << 53 else str(sent.room)
                match = {
                    "type": sent.get("message"), "room": room,
                    "from": self.names[sender], "to": self.names[receiver],
                }  # fmt: skip
                yield {"at": 0, "message": {"match": match, "nth": counts[key], "do": "drop"}}

    def _reborn_around(self, receiver: str, sent: Line) -> bool:
        """The receiver was between two lives: nothing was lost but the process."""
        lives = [life for life in self.lives.values() if life.node == receiver]
        return not any(self.at(x.lines[0]) <= self.at(sent) <= self.at(x.lines[-1]) for x in lives)
