"""What an operator sees of a real pair: the numbers of a hand-off on both sides, and why a request hangs."""

import concurrent.futures
import time

import pytest
from fleets import WAIT_S
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
ROOM = iter(range(700_000, 800_000))


def body(fleet, **changes):
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    where = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": fleet.bootstrap_port,
        "bootstrap_room": next(ROOM),
    }
    return {"input_ids": list(range(3, 40)), "sampling_params": sampling, **where, **changes}


def numbers(fleet, name):
    """(sample name, its labels but the model's) → value."""
    text = fleet.http.get(f"{fleet.url(name)}/metrics").text
    return {
        (
            s.name,
            *(f"{k}={v}" for k, v in sorted(s.labels.items()) if k not in ("model_name", "engine_type")),
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def grown(before, after):
    return {key: after[key] - before.get(key, 0.0) for key in after if after[key] != before.get(key, 0.0)}


def until(look):
    deadline = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def rooms(fleet, name, query=""):
    return fleet.http.get(f"{fleet.url(name)}/debug/rooms{query}").json()


def test_one_hand_off_is_counted_on_both_sides(fleet):
    names = ("prefill-0", "decode-0")
    before = {name: numbers(fleet, name) for name in names}
    assert all(before[name]["pd_ready",] == 1 and before[name]["pd_servable_pairs",] == 2 for name in names)
    request = body(fleet)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        p = pool.submit(fleet.post, "prefill-1", "/generate", request)
        answer = fleet.post("decode-0", "/generate", request)
        assert (p.result().status_code, answer.status_code) == (200, 200)
    fleet.await_free()
    d = grown(before["decode-0"], numbers(fleet, "decode-0"))
    p = numbers(fleet, "prefill-1")
    for source, target in (("Absent", "Bootstrapping"), ("Transferring", "Success")):
        assert d["pd_transitions_total", f"from={source}", "role=receiver", f"to={target}"] == 1
        assert p["pd_transitions_total", f"from={source}", "role=sender", f"to={target}"] >= 1
    assert d["pd_transfer_bytes_count",] == d["pd_pull_seconds_count",] == 1
    assert d["pd_transfer_bytes_sum",] > 0
    assert d["sglang:generation_tokens_total",] == 4 and d["sglang:prompt_tokens_total",] == 37
    assert (
        d["sglang:time_to_first_token_seconds_count",] == d["sglang:e2e_request_latency_seconds_count",] == 1
    )
    for phase in ("queue", "prefill", "ready", "page_wait", "pull", "scatter", "first_token", "decode"):
        assert d["pd_phase_seconds_count", f"phase={phase}"] == 1, phase
    assert ("pd_unpulled_bytes",) not in grown(before["prefill-0"], numbers(fleet, "prefill-0"))
    assert p["pd_unpulled_bytes",] == p["pd_limbo",] == 0


def test_a_leg_without_its_other_one_says_what_it_waits_for(fleet):
    request = body(fleet)
    room = request["bootstrap_room"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.post, "decode-1", "/generate", request)
        (one,) = until(lambda: [r for r in rooms(fleet, "decode-1", f"?room={room}")["rooms"] if r["asking"]])
        assert one["state"] == "Bootstrapping" and one["scheduler"]["queue"] == "bootstrapping"
        assert set(one["asking"]) == {"prefill-0", "prefill-1"}
        assert {w["event"] for w in one["waits_for"]} == {"pending", "ready"}
        assert one["ends"]["reason"] in ("bootstrap_timeout", "peer_lost")
        # P says that it was asked and has no such leg.
        until(lambda: str(room) in [e["room"] for e in rooms(fleet, "prefill-0")["early"]])
        assert numbers(fleet, "decode-1")["pd_queue_oldest_seconds", "queue=bootstrapping"] > 0
        assert fleet.post("prefill-0", "/generate", request).status_code == 200
        assert waiting.result().status_code == 200
    fleet.await_free()
    (one,) = rooms(fleet, "decode-1", f"?room={room}")["rooms"]
    assert one["state"] == "Success" and one["peer"] == "prefill-0"
