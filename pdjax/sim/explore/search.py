"""Breadth-first search of a configuration: every reachable state, the properties in each, liveness on the graph.

Breadth first, so the first way found to a breach is a shortest one. Must never sample, and never stop silently: a
search that reaches its bound says so.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdjax.core import transitions as t
from pdjax.sim.explore import parts as w
from pdjax.sim.explore import props
from pdjax.sim.explore.config import TIMERS, Config
from pdjax.sim.explore.parts import Action
from pdjax.sim.explore.world import World

BY_MESSAGES = frozenset({w.MESSAGE, w.WORK, w.LEG})
OWN_ENDS = frozenset({"engine_error", "part_fails", "no_candidate"})  # ends that lose no message
ALONE = frozenset({"issue", "never_issued", "finish"})  # what a process does by itself, without a peer


@dataclass
class Violation:
    """A breach and a shortest way to it. steps: the actions from the start, the last one is the breach's."""

    rule: str
    text: str
    steps: list[Action]


@dataclass
class Report:
    """What a search found. edges: enabled (state, action) pairs. coverage: indices of table rows that were reached.

    graph: a hash of all states and edges of a complete search, comparable within one process.
    """

    config: Config
    states: int = 0
    edges: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = True
    violations: list[Violation] = field(default_factory=list)
    deadlocks: list[Violation] = field(default_factory=list)  # states from which nothing can end it
    coverage: set[int] = field(default_factory=set)
    world: World | None = None
    graph: int = 0

    @property
    def ok(self) -> bool:
        return self.complete and not self.violations and not self.deadlocks


class _Graph:
    """Edges in compact arrays, for the backward searches."""

    def __init__(self) -> None:
        self.src, self.dst, self.mark = array("I"), array("I"), array("B")

    def add(self, src: int, dst: int, mark: int) -> None:
        self.src.append(src)
        self.dst.append(dst)
        self.mark.append(mark)

    def stuck(self, n: int, goals: bytearray, mask: int, only: bytearray | None = None) -> int | None:
        """The lowest state that reaches no goal over edges with a bit of mask; None: all do."""
        heads: list[list[int]] = [[] for _ in range(n)]
        for s, d, m in zip(self.src, self.dst, self.mark, strict=True):
            if m & mask and s != d:
                heads[d].append(s)
        good = bytearray(goals)
        stack = [i for i in range(n) if good[i]]
        while stack:
            for s in heads[stack.pop()]:
                if not good[s]:
                    good[s] = 1
                    stack.append(s)
        return next((i for i in range(n) if not good[i] and (only is None or only[i])), None)


def explore(
    config: Config,
    rows: Sequence[t.Row] | None = None,
    *,
    liveness: bool = True,
    stop_at: int = 1,
    rules: Iterable[str] | None = None,
) -> Report:
    """Search the configuration. rows: run this table instead of the project's.

    stop_at: end after that many breaches (0: go on). rules: look for these properties only.
    """
    if rows is not None:
        with t.using(rows):
            return explore(config, liveness=liveness, stop_at=stop_at, rules=rules)
    return _Search(config, liveness, stop_at, set(rules) if rules is not None else None).run()


class _Search:
    def __init__(self, config: Config, liveness: bool, stop_at: int, rules: set[str] | None) -> None:
        self.config, self.liveness, self.stop_at, self.rules = config, liveness, stop_at, rules
        self.world = World(config)
        self.checker = props.Checker(self.world)
        self.report = Report(config, world=self.world)
        self.ids: dict[w.State, int] = {}
        self.states: list[w.State] = []
        self.parents = array("i")
        self.actions: list[Action] = []
        self.graph = _Graph()
        self.goals = bytearray()
        self.empty = bytearray()  # nothing is remembered either
        self.calm = bytearray()  # reached without loss, overflow, timer, crash or hanging pull
        self.depths = array("I")

    def run(self) -> Report:
        began = time.perf_counter()
        report = self.report
        self._state(self.world.initial(), -1, ())
        self.calm[0] = 1
        done = 0
        while done < len(self.states) and not self._enough():
            if len(self.states) > self.config.max_states:
                report.complete = False
                break
            self._expand(done)
            done += 1
        report.states, report.depth = len(self.states), max(self.depths, default=0)
        if done < len(self.states):
            report.complete = False
        # Parts are numbered as they are found: equal numbers mean equal states only if the parts are equal, too.
        report.graph = hash((report.graph, tuple(self.states), tuple(self.world.parts.things)))
        if self.liveness and report.complete and not report.violations:
            self._live()
        report.seconds = time.perf_counter() - began
        return report

    def _enough(self) -> bool:
        return bool(self.stop_at) and len(self.report.violations) >= self.stop_at

    def _state(self, state: w.State, parent: int, action: Action) -> int:
        found = self.ids.get(state)
        if found is not None:
            return found
        found = self.ids[state] = len(self.states)
        self.states.append(state)
        self.parents.append(parent)
        self.actions.append(action)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.goals.append(props.quiescent(self.world, state))
        self.empty.append(props.forgotten(self.world, state))
        self.calm.append(0)
        for text in self.checker.state(state):
            self._breach(text, found, None)
        return found

    def _expand(self, i: int) -> None:
        state, report = self.states[i], self.report
        for move in self.world.moves(state):
            report.edges += 1
            for line in move.lines:
                if line.row >= 0:
                    report.coverage.add(line.row)
            for text in self.checker.move(state, move):
                self._breach(text, i, move.action)
            if move.errors:
                continue
            j = self._state(move.state, i, move.action)
            report.graph = hash((report.graph, i, j, move.action))
            mark = marks(move)
            ends = move.kind == w.END or move.action[0] in OWN_ENDS
            if self.calm[i] and (mark & 1 or (ends and not move.overflow)):
                self.calm[j] = 1
            if self.liveness:
                self.graph.add(i, j, mark)

    def _breach(self, text: str, i: int, action: Action | None) -> None:
        rule, _, what = text.partition(": ")
        if self.rules is not None and rule not in self.rules:
            return
        if self._enough():
            return
        steps = self._way(i)
        if action is not None:
            steps.append(action)
        self.report.violations.append(Violation(rule, what, steps))

    def _way(self, i: int) -> list[Action]:
        steps = []
        while self.parents[i] >= 0:
            steps.append(self.actions[i])
            i = self.parents[i]
        return steps[::-1]

    def _live(self) -> None:
        n = len(self.states)
        levels = ["V2"] if not set(TIMERS) - set(self.config.timers) else []  # else nothing is promised
        levels += ["S12"] if levels and self.config.lose else []
        levels += ["V7"] if self.config.prompt else []
        goals = {"V2": self.goals, "S12": self.empty, "V7": self.goals}
        for rule in levels:
            only = self.calm if rule == "V7" else None
            stuck = self.graph.stuck(n, goals[rule], LEVELS[rule].bit, only)
            if stuck is not None and (self.rules is None or rule in self.rules):
                self.report.deadlocks.append(Violation(rule, LEVELS[rule].text, self._way(stuck)))


@dataclass(frozen=True)
class Level:
    """A promise that something is reached by some kinds of moves alone. bit: of ``marks``."""

    bit: int
    text: str
    goal: Callable[[World, w.State], bool]


LEVELS = {
    "V7": Level(1, "nothing was lost, and messages alone cannot end it from here", props.quiescent),
    "V2": Level(2, "timers alone cannot end every request and free everything from here", props.quiescent),
    "S12": Level(4, "what is kept here is never forgotten", props.forgotten),
}


def marks(move: w.Move) -> int:
    """Which promises may use this move: 1 messages and work, 2 timers, 4 whatever no client and no fault has to do."""
    by_messages = move.kind in BY_MESSAGES and not move.overflow
    alone = move.kind == w.TIMER or move.action[0] in ALONE
    fair = (by_messages or alone or move.action[0] == "lose") and move.kind != w.LEG
    return by_messages | alone << 1 | fair << 2


def leads_out(world: World, state: w.State, rule: str) -> bool:
    """Whether the promise is kept in this state: its goal is reached by the moves that it may use."""
    level = LEVELS[rule]
    seen, todo = {state}, [state]
    while todo:
        here = todo.pop()
        if level.goal(world, here):
            return True
        for move in world.moves(here):
            if marks(move) & level.bit and not move.errors and move.state not in seen:
                seen.add(move.state)
                todo.append(move.state)
    return False
