"""Hypothesis drives a world: one rule for each kind of choice, addressed by name and skipped when it cannot happen.

After every step the world is compared with a small reference model: who owns which page, and which state each room
has, kept from the event log by rules of a few lines. On failure the steps are written as a trace file, which
`sim replay` shows and `sim shrink` makes smaller.
"""

import contextlib
import json
import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from pdjax.core import transitions as t
from pdjax.sim import mutate
from pdjax.sim.faults import Scenario
from pdjax.sim.replay import Run
from pdjax.sim.shrink import shrink
from pdjax.sim.trace_file import dumps, parse

FLAGS = {
    "disaggregation-lease": 1.0,
    "disaggregation-peer-timeout": 0.4,
    "disaggregation-hello-interval": 0.06,
    "disaggregation-answer-bound": 0.05,
    "disaggregation-bootstrap-timeout": 1.0,
    "disaggregation-transfer-timeout": 1.0,
    "disaggregation-limbo-timeout": 1.5,
    "disaggregation-request-timeout": 4.0,
    "disaggregation-graveyard-timeout": 1.5,
    "disaggregation-bootstrap-heartbeat-interval": 0.9,
    "disaggregation-bootstrap-heartbeat-ttl": 2.0,
}
ROOMS = st.integers(0, 5)
MESSAGES = st.sampled_from(["hello", "unknown", "pending", "ready", "done", "done_ack", "abort", "failed"])
NODES = st.sampled_from(["p0", "p1", "d0", "d1"])
FOUND = Path(tempfile.gettempdir()) / "pdjax-found"

MOVES = {  # state → states that may follow it
    "Absent": {"Bootstrapping", "Failed"},
    "Bootstrapping": {"WaitingForInput", "Failed"},
    "WaitingForInput": {"Transferring", "Failed"},
    "Transferring": {"Success", "Failed"},
    "Success": {"Absent"},
    "Failed": {"Absent"},
}


class Model:
    """Who owns which page and which state each room has, by the lines of the log alone."""

    def __init__(self):
        self.rooms = {}  # (node, epoch, room) → state
        self.pages = {}  # (node, epoch, page) → tokens

    def line(self, x):
        life = x["node"], x["epoch"]
        if "role" in x and x["from"] != x["to"]:
            key = (*life, int(x["room"]))
            assert self.rooms.get(key, "Absent") == x["from"] and x["to"] in MOVES[x["from"]], x
            self.rooms[key] = x["to"]
        elif x["event"] == "pages_taken":
            for page in x["pages"]:
                assert not self.pages.get((*life, page)), x
                self.pages[(*life, page)] = {x["token"]}
        elif x["event"] == "pages_shared":
            for page in x["pages"]:
                assert x["token"] not in self.pages[(*life, page)], x
                self.pages[(*life, page)].add(x["token"])
        elif x["event"] == "pages_freed":
            for page in x["pages"]:
                self.pages[(*life, page)].remove(x["token"])

    def compare(self, world):
        for node in world.nodes.values():
            if not node.alive:
                continue
            life = node.name, str(node.epoch)
            manager = {room: t.STATE_NAMES[r.state] for room, r in node.manager.rooms.items()}
            model = {k[2]: s for k, s in self.rooms.items() if k[:2] == life and s != "Absent"}
            assert manager == model, (node.name, manager, model)
            held = {(k[2], token) for k, tokens in self.pages.items() if k[:2] == life for token in tokens}
            allocator = node.scheduler.cache.allocator
            assert {(page, str(token)) for token, pages in allocator._held.items() for page in pages} == held


class WorldMachine(RuleBasedStateMachine):
    """The world of a trace file that is written while it runs: each rule appends one step and performs it."""

    def __init__(self):
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.raw = {
            "format": "pdjax.trace/1",
            "name": "found-by-hypothesis",
            "world": {
                "prefill": ["p0", "p1"], "decode": ["d0", "d1"], "page_size": 4,
                "pages": {"p0": 12, "p1": 12, "d0": 8, "d1": 8}, "flags": FLAGS,
            },
            "steps": [],
        }  # fmt: skip
        self.model = Model()
        self.run = Run(parse({**self.raw, "steps": []}), conformance=False)
        for line in self.run.world.early_lines:
            self.model.line(line)
        self.run.world.taps.append(self.model.line)
        self.requests = {}
        self.down = set()

    # ---------------------------------------------------------------- one step

    def do(self, action, value):
        """Append the step at the present time, perform it, and look at everything."""
        step = {"at": round(self.run.world.now * 1000, 3), action: value}
        self.raw["steps"].append(step)
        with self.kept():
            parsed = parse(self.raw).steps[-1]
            scenario: Scenario = self.run.scenario
            scenario._requests = {**scenario._requests, **self.requests}
            getattr(scenario, f"_{action}")(parsed, parsed.value)
            self.check()

    def check(self):
        self.model.compare(self.run.world)
        assert [str(v) for v in self.run.monitor.violations] == []
        assert self.run.raised == []

    @contextlib.contextmanager
    def kept(self):
        """A failure is written as a trace."""
        try:
            yield
        except Exception:
            FOUND.mkdir(exist_ok=True)
            (FOUND / "found-by-hypothesis.json").write_text(dumps(self.raw))
            raise

    # ---------------------------------------------------------------- rules, by name

    @rule(ms=st.sampled_from([0.1, 0.3, 1.0, 5.0, 60.0, 500.0]))
    def time_passes(self, ms):
        with self.kept():
            self.run.world.run(limit_s=ms / 1000)
            self.check()

    @rule(
        room=ROOMS,
        prompt=st.sampled_from([1, 4, 9]),
        output=st.integers(1, 6),
        p=st.integers(0, 1),
        d=st.integers(0, 1),
    )
    def request(self, room, prompt, output, p, d):
        rid = f"r{len(self.requests)}"
        value = {
            "rid": rid,
            "room": room,
            "prompt": prompt,
            "output": output,
            "prefill": f"p{p}",
            "decode": f"d{d}",
        }
        self.requests[rid] = value
        self.do("request", value)

    @rule(n=st.integers(0, 9), side=st.sampled_from(["prefill", "decode"]))
    def abort(self, n, side):
        if f"r{n}" in self.requests:
            self.do("abort", {"rid": f"r{n}", "to": [side]})

    @rule(n=st.integers(0, 9))
    def disconnect(self, n):
        if f"r{n}" in self.requests:
            self.do("disconnect", {"rid": f"r{n}"})

    def has(self, room):
        return any(value["room"] == room for value in self.requests.values())

    @rule(room=ROOMS, kind=MESSAGES, do=st.sampled_from(["drop", "duplicate"]), nth=st.integers(1, 2))
    def message(self, room, kind, do, nth):
        if self.has(room):
            self.do("message", {"match": {"type": kind, "room": room}, "nth": nth, "do": do})

    @rule(room=ROOMS, kind=MESSAGES, by=st.sampled_from([1, 30, 700]))
    def late(self, room, kind, by):
        if self.has(room):
            self.do("message", {"match": {"type": kind, "room": room}, "do": "delay", "by": by})

    @rule(room=ROOMS, do=st.sampled_from(["hang", "fail", "corrupt", "truncate"]))
    def transfer(self, room, do):
        if self.has(room):
            self.do("transfer", {"match": {"room": room}, "do": do})

    @rule(room=ROOMS, by=st.sampled_from([5, 100, 1500]))
    def slow(self, room, by):
        if self.has(room):
            self.do("transfer", {"match": {"room": room}, "do": "slow", "by": by})

    @rule(node=NODES)
    def crash(self, node):
        if node not in self.down:
            self.down.add(node)
            self.do("crash", node)

    @rule(node=NODES)
    def restart(self, node):
        if node in self.down:
            self.down.discard(node)
            self.do("restart", node)

    @rule(node=NODES, ms=st.sampled_from([5, 200, 1200]))
    def stop(self, node, ms):
        if node not in self.down:
            self.do("stop", {"node": node, "for": ms})
            self.note_still("stop")

    @rule(p=st.integers(0, 1), d=st.integers(0, 1), ms=st.sampled_from([5, 200, 1200]))
    def partition(self, p, d, ms):
        self.do("partition", {"between": [f"p{p}", f"d{d}"], "for": ms})
        self.note_still("partition")

    def note_still(self, action):
        """The properties hear of these from the step's line, which the scenario writes when it runs by itself."""
        self.run.world.log("sim").line("step", step=len(self.raw["steps"]) - 1, action=action)

    # ---------------------------------------------------------------- the end

    def teardown(self):
        """Heal everything: what is open ends, everything becomes free."""
        run, world = self.run, self.run.world
        with self.kept():
            if any(v.property for v in run.monitor.violations):
                return
            world.net.frame_rules = world.net.part_rules = None
            world.net.heal()
            for node in sorted(self.down):
                world.restart(node)
            world.run(limit_s=12.0)
            assert run.router.n_open == 0 or run.router.spec.timeout > 12000
            assert world.held() == {}
            self.model.compare(world)
            assert [str(v) for v in run.monitor.violations] == []


TestWorld = WorldMachine.TestCase


def test_a_mistake_is_found_and_written_as_a_trace_that_replays_and_shrinks():
    """The machine can fail: with the protocol broken on purpose it does, and what it writes shows the same."""
    path = FOUND / "found-by-hypothesis.json"
    path.unlink(missing_ok=True)
    broken = next(m for m in mutate.mistakes() if m.name == "free on send")
    quick = settings(settings.get_profile("ci"), phases=[Phase.generate], report_multiple_bugs=False)
    with broken.patch():
        with pytest.raises(AssertionError):
            run_state_machine_as_test(WorldMachine, settings=quick)
        trace = json.loads(path.read_text())
        small = shrink(trace, limit_s=5.0)
    assert {"S3", "S17"} & set(small.signature)
    assert len(small.trace["steps"]) == 1 and "request" in small.trace["steps"][0]
