"""Event logs of real processes → a trace file: the same requests, rooms, and faults, as far as the logs show them.

Must never invent a fault: what the logs do not show is not in the trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdjax.core import conform, log_lines
from pdjax.core import transitions as t
from pdjax.sim.runfaults import RunFaults
from pdjax.sim.runlog import Life, Line, NoRun
from pdjax.sim.trace_reader import exact_room
from pdjax.sim.trace_types import FORMAT, room_text


@dataclass
class Half:
    """One side of one request."""

    line: Line
    node: str
    at: float
    life: Life


def import_logs(data: Sequence[bytes], *, source: str = "") -> tuple[dict[str, Any], list[str]]:
    """(trace, remarks). Raises NoRun for files that are no whole event logs."""
    lines, wrong = log_lines.read(data)
    wrong += conform.numbered(log_lines.Log(lines))
    if wrong:
        raise NoRun(f"not a whole event log: {wrong[0]}")
    if not lines:
        raise NoRun("there is no event in these files")
    return _Importer(lines, source).trace()


def quicker(trips: Sequence[float]) -> list[float]:
    """The quicker half of what frames took, at least three: those that wait for a stopped process are not the link's time."""
    return sorted(trips)[: max(3, (len(trips) + 1) // 2)]


class _Importer(RunFaults):
    def __init__(self, lines: list[Line], source: str) -> None:
        super().__init__(lines)
        self.source = source
        self.guesses = 0

    # ---------------------------------------------------------------- the whole

    def trace(self) -> tuple[dict[str, Any], list[str]]:
        legs = [line for line in self._lines() if line.event in ("leg", "leg_bad", "leg_refused")]
        if not legs:
            raise NoRun("no request was posted in these logs")
        self.start = min(float(line.get("t")) + self.offsets[line.life[0]] for line in legs)
        requests = self._requests(legs)
        faults = [*self.processes(), *self.ends(), *self.messages(), *self.slow_pulls()]
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
        out = {"link": quicker(trips), "prefill_per_token": prefills, "pull_per_page": pulls}
        # A few of them may each be the odd one; what is slow beyond the usual becomes a step of its own.
        return {k: round(max(statistics.median(v), 0.001), 3) for k, v in out.items() if len(v) > 2}

    # ---------------------------------------------------------------- requests

    def _requests(self, legs: list[Line]) -> list[dict[str, Any]]:
        """One step for each pair of legs of a room. A second leg of one side is a request of its own."""
        self.outcomes: dict[str, str] = {}
        self.prompts: dict[int | None, int] = {}
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
        if "decode" in pair:
            self.rid_of[str(pair["decode"].line.get("attempt"))] = rid
        request: dict[str, Any] = {
            "rid": rid,
            "room": room_text(room),
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
        cut = self._cut_of(room, pair["decode"]) if "decode" in pair else None
        return prompt, max(output, 1 if cut is None else int(cut.get("tokens")) + 1)

    def _cut_of(self, room: int, half: Half) -> Line | None:
        """What ended this attempt while D decoded it."""
        cuts = (line for line in half.life.by_room[room] if line.event == "cut_short")
        return next((x for x in cuts if half.life.decoding(x)[0] == str(half.line.get("attempt"))), None)

    def _pages_of(self, half: Half) -> int:
        """D's pages of this attempt. P's pages carry a number of its own and are not told apart."""
        if half.life.role != t.RECEIVER:
            return 0
        return half.life.pages.get(str(half.line.get("attempt")), {}).get("pages_taken", 0)

    def _outcome(self, room: int, pair: Mapping[str, Half]) -> str:
        half = pair.get("decode")
        if half is None or half.line.get("effects") == ["answer_duplicate"]:
            return "any"
        cut = self._cut_of(room, half)
        if cut is not None:
            return "aborted" if cut.get("reason") == "client_abort" else "any"
        token, good = half.line.get("attempt"), False
        for line in half.life.by_room[room]:
            if line.get("attempt") == token:
                good |= line.event == "scattered" and line.get("to") == "Success"
                if line.event == "abort_local":
                    return "any"
        return "ok" if good and "pages_freed" in half.life.pages.get(str(token), {}) else "any"
