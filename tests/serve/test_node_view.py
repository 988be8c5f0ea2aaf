"""A real P and a real D as operators see them, on the tiny model and with their schedulers stepped by the test."""

import dataclasses
import io
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdjax.core import transitions as t
from pdjax.sched.request import Request, SamplingParams
from pdjax.serve.args import ServeArgs
from pdjax.serve.loading import load
from pdjax.serve.log import ServerLog
from pdjax.serve.metrics import Exposition
from pdjax.serve.node import Node
from pdjax.serve.request_stats import RequestStats

ROOM = (1 << 62) + 12345


@pytest.fixture(scope="module")
def nodes():
    made = {}
    for role in ("prefill", "decode"):
        args = ServeArgs(
            "tiny",
            num_pages=32,
            context_length=64,
            chunked_prefill_size=16,
            disaggregation_mode=role,
            bootstrap_host="127.0.0.1",
            bootstrap_port=9,
        )
        made[role] = Node(args, load(args), f"http://127.0.0.1:{len(made) + 1}")
    yield made
    for node in made.values():
        node.manager.stop(0.0)


def submit(node, room):
    prompt = [5, 6, 7]
    node.submit(
        Request("mine", prompt, SamplingParams(max_new_tokens=2), sink=lambda output: None, room=room)
    )
    node.scheduler.host_work()


def test_a_live_room_of_p_with_its_place_in_the_scheduler(nodes):
    node = nodes["prefill"]
    submit(node, ROOM)
    shown = node.rooms(10, None)
    (room,) = shown["rooms"]
    assert (shown["live"], shown["left_out"], shown["role"]) == (1, 0, "prefill")
    assert room["room"] == str(ROOM), "exact, as text"
    assert room["state"] == "WaitingForInput" and room["scheduler"]["queue"] == "prefilling"
    assert room["scheduler"]["pages"] == 1 and room["held_bytes"] == shown["unpulled"]["charged_bytes"] > 0
    assert room["ends"]["timer"] == "request"
    assert "waits for kv_ready → Transferring" in room["says"] and "no peer yet" in room["says"]
    assert "stands in prefilling" in room["says"] and "request_timeout" in room["says"]
    json.dumps(shown)
    left = node.rooms(0, None)
    assert (left["rooms"], left["live"], left["left_out"]) == ([], 1, 1)


def test_one_room_is_found_also_when_it_has_ended(nodes):
    node = nodes["decode"]
    submit(node, ROOM)
    (room,) = node.rooms(10, ROOM)["rooms"]
    assert room["state"] == "Bootstrapping" and room["scheduler"]["queue"] == "bootstrapping"
    assert {w["event"] for w in room["waits_for"]} == {"pending", "ready"}
    node.abort("mine")
    node.scheduler.host_work()
    (room,) = node.rooms(10, ROOM)["rooms"]
    assert (room["state"], room["reason"], room["scheduler"]) == ("Failed", "client_abort", None)
    assert node.rooms(10, None)["live"] == 0
    assert node.rooms(10, 77)["rooms"] == []


def test_nothing_of_a_prompt_is_shown(nodes):
    node = nodes["prefill"]
    prompt = list(range(11, 31))
    node.submit(Request("p", prompt, SamplingParams(), sink=lambda output: None, room=5))
    node.scheduler.host_work()
    text = json.dumps(node.rooms(10, None))
    assert str(prompt)[1:-1] not in text and node.manager.rooms[5].digest not in text
    node.scheduler.abort_all()
    node.scheduler.host_work()


def test_the_numbers_of_a_node_are_its_own_counters(nodes):
    node = nodes["decode"]
    before = node.numbers()
    submit(node, 6)
    n = node.numbers()
    assert n.queues["bootstrapping"] == 1 and n.oldest_s["bootstrapping"] >= 0 and n.queued == 1
    assert n.tally.live() == {"Bootstrapping": 1, "WaitingForInput": 0, "Transferring": 0}
    assert n.used_pages + n.free_pages == 31 and n.page_tokens == 16
    assert n.compatible_peers == 0 and n.tombstones == before.tombstones
    assert set(n.counters) == {"scheduler", "driver", "transport", "channel", "registry"}
    node.abort("mine")
    node.scheduler.host_work()
    assert node.numbers().tombstones == before.tombstones + 1


def test_at_debug_each_move_of_a_room_is_a_line_with_its_room(monkeypatch):
    stream = io.StringIO()
    args = ServeArgs("tiny", num_pages=8, context_length=64, chunked_prefill_size=16, with_bootstrap=True)
    args = dataclasses.replace(args, disaggregation_mode="prefill")
    model = load(args)
    for level, wanted in (
        ("info", []),
        ("debug", [("Absent", "Bootstrapping", "leg"), ("Bootstrapping", "WaitingForInput", "admit")]),
    ):
        stream.truncate(0)
        node = Node(args, model, "http://127.0.0.1:3", ServerLog(stream, level=level))
        submit(node, 9)
        node.manager.stop(0.0)
        lines = [json.loads(line) for line in stream.getvalue().strip("\0").splitlines()]
        assert [(x["source"], x["target"], x["cause"]) for x in lines] == wanted
        assert all(
            (x["event"], x["level"], x["room"], x["role"]) == ("moved", "debug", 9, "sender") for x in lines
        )


def test_no_label_of_a_real_node_holds_a_room(nodes):
    for node in nodes.values():
        text = Exposition(node, RequestStats(), dict).text().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                assert str(ROOM) not in str(sample.labels)
        states = {
            s.labels["state"]
            for f in text_string_to_metric_families(text)
            if f.name == "pd_rooms"
            for s in f.samples
        }
        assert states == {t.STATE_NAMES[s] for s in t.LIVE}
