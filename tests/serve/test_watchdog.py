"""The watchdog on real nodes whose schedulers the test steps: what stands still is named once, what moves is not."""

import io
import json

import pytest

from pdjax.sched.request import Request, SamplingParams
from pdjax.serve.args import ServeArgs
from pdjax.serve.loading import load
from pdjax.serve.log import ServerLog
from pdjax.serve.node import Node
from pdjax.serve.watchdog import MAX_NAMED, Watchdog

AFTER_S = 5.0


@pytest.fixture(scope="module")
def model():
    return load(ARGS)


ARGS = ServeArgs("tiny", num_pages=32, context_length=64, chunked_prefill_size=16, max_running_requests=2)


class Watched:
    def __init__(self, model, role):
        pd = {"disaggregation_mode": role, "bootstrap_host": "127.0.0.1", "bootstrap_port": 9}
        args = ServeArgs(**{**vars(ARGS), **(pd if role != "null" else {})})
        self.node = Node(args, model, "http://127.0.0.1:1")
        self.text = io.StringIO()
        self.dog = Watchdog(self.node, ServerLog(self.text), AFTER_S)
        self.now = 0.0
        if self.node.manager is not None:  # a room's age is of the manager's own clock
            self.node.manager.ports.clock = lambda: self.now

    def submit(self, rid, room=None):
        sampling = SamplingParams(max_new_tokens=2)
        self.node.submit(Request(rid, [5, 6, 7], sampling, sink=lambda output: None, room=room))
        self.node.scheduler.host_work()

    def look(self, later_s=2 * AFTER_S):
        """The lines of a look at a later time."""
        self.now += later_s
        self.text.truncate(0)
        self.text.seek(0)
        self.dog.look(self.now)
        return [json.loads(line) for line in self.text.getvalue().splitlines()]

    def close(self):
        self.node.scheduler.abort_all()
        self.node.scheduler.host_work()
        if self.node.manager is not None:
            self.node.manager.stop(0.0)


@pytest.fixture
def watch(model):
    made = []

    def watch(role):
        made.append(Watched(model, role))
        return made[-1]

    yield watch
    for one in made:
        one.close()


def test_a_room_that_stands_still_is_named_once_with_its_state_and_its_wait(watch):
    d = watch("decode")
    room = (1 << 62) + 77
    d.submit("mine", room)
    assert d.look(AFTER_S / 2) == [], "it has only just come"
    (line,) = d.look()
    assert (line["event"], line["level"], line["room"]) == ("stuck", "warning", room)
    assert "Bootstrapping" in line["message"] and "waits for pending" in line["message"]
    assert "bootstrap_timeout" in line["message"]
    assert d.look() == [], "said once"
    assert d.node.watchdog is None and d.dog.counters["stuck_rooms"] == 1


def test_many_are_a_number(watch):
    d = watch("decode")
    for room in range(1, MAX_NAMED + 4):
        d.submit(f"r{room}", room)
        d.now += 0.1
    lines = d.look()
    assert len(lines) == MAX_NAMED + 1 and lines[-1]["count"] == 3
    assert [line.get("room") for line in lines[:-1]] == list(range(1, MAX_NAMED + 1)), "the oldest first"


def test_a_scheduler_that_has_work_and_ends_no_step_is_named(watch):
    server = watch("null")
    assert server.look() == [], "nothing to do"
    server.submit("mine")
    assert server.look() == [] and server.look()[0]["message"] == "no step has ended for 10 s: prefilling 1"
    assert server.look() == [], "said once"
    server.node.scheduler.counts["prefill_tokens"] += 1  # it moves
    assert server.look() == [] and len(server.look()) == 1
    server.node.pause(True)
    server.node.scheduler.host_work()
    server.node.scheduler.counts["prefill_tokens"] += 1
    assert not any(server.look() for _ in range(3)), "a pause is no fault"


def test_it_looks_no_more_often_than_it_must(watch):
    server = watch("null")
    looked = []
    server.dog._look_at_rooms = lambda: looked.append(1)
    for at in (100.0, 100.0 + AFTER_S / 8, 100.0 + AFTER_S):
        server.dog.look(at)
    assert len(looked) == 2
