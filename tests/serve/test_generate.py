"""POST /generate: shapes, batches, streams, aborts, disconnects (facts/router §0)."""

import json
import socket

import httpx
import pytest
from serve_fakes import EOS, PD, echo, failed, frames, text_outputs

from pdjax.core.errors import CLIENT_LEFT, PDError
from pdjax.sched.request import Finish, Output
from pdjax.serve.sampling_fields import seed_for_room


def test_one_text(serve):
    server = serve()
    body = server.post("/generate", {"text": "hi", "sampling_params": {"temperature": 0}}).json()
    assert body["text"] == "hello"
    assert body["output_ids"] == [*b"hello", EOS]
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 6, 0)
    assert meta["e2e_latency"] > 0
    (request,) = server.engine.requests
    assert request.prompt_ids == list(b"hi") and request.room is None
    assert request.sampling.max_new_tokens == 128 and request.sampling.temperature == 0.0


def test_length_counts_the_tokens(serve):
    server = serve(script=lambda request: text_outputs("abc", "length"))
    meta = server.post("/generate", {"input_ids": [1, 2, 3]}).json()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}


def test_max_new_tokens_is_cut_to_the_context(serve):
    server = serve()
    server.post("/generate", {"text": "x" * 500, "sampling_params": {"max_new_tokens": 1 << 40}})
    server.post("/generate", {"text": "x" * 500, "sampling_params": {"max_new_tokens": None}})
    assert [r.sampling.max_new_tokens for r in server.engine.requests] == [12, 12]


def test_temperature_defaults_to_one_and_a_seed_is_drawn(serve):
    server = serve()
    for _ in range(2):
        server.post("/generate", {"text": "x"})
    first, second = (r.sampling for r in server.engine.requests)
    assert first.temperature == second.temperature == 1.0
    assert first.seed != second.seed


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_halves_choose_the_same_seed_from_the_room(serve, role):
    server = serve(role)
    server.post("/generate", {"text": "x"} | PD)
    server.post("/generate", {"text": "x", "sampling_params": {"sampling_seed": 9}} | PD)
    server.post("/generate", {"text": "x", "sampling_params": {"seed": -1}} | PD)
    seeds = [r.sampling.seed for r in server.engine.requests]
    assert seeds == [seed_for_room(5), 9, (1 << 64) - 1]
    assert seed_for_room(5) == 12292231782102680401, "the same on every machine and in every version"


def test_a_batch_is_answered_in_order(serve):
    server = serve(script=echo)
    answer = server.post("/generate", {"text": ["one", "two", "three"]}).json()
    assert [result["text"] for result in answer] == ["one", "two", "three"]
    assert len({result["meta_info"]["id"] for result in answer}) == 3
    assert len(server.post("/generate", {"input_ids": [[65, 66]]}).json()) == 1, "a list of one stays a list"


def test_sampling_params_may_be_a_list(serve):
    server = serve()
    params = [{"max_new_tokens": 3}, {"max_new_tokens": 4}]
    server.post("/generate", {"text": ["a", "b"], "sampling_params": params})
    assert [r.sampling.max_new_tokens for r in server.engine.requests] == [3, 4]
    answer = server.post("/generate", {"text": ["a"], "sampling_params": params})
    assert answer.status_code == 400


def test_a_stream_is_cumulative_with_one_finish_in_its_last_frame(serve):
    server = serve(script=lambda request: text_outputs("héllo"))
    answer = server.post("/generate", {"text": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    got = frames(answer)
    assert [f["text"] for f in got] == ["h", "h", "hé", "hél", "héll", "héllo", "héllo"], (
        "never half a character"
    )
    assert [f["meta_info"]["finish_reason"] is not None for f in got] == [False] * 6 + [True]
    assert len({f["meta_info"]["id"] for f in got}) == 1
    assert got[-1]["output_ids"] == [*"héllo".encode(), EOS]
    assert "index" not in got[0]


def test_a_streamed_batch_carries_the_index(serve):
    server = serve(script=echo)
    got = frames(server.post("/generate", {"text": ["ab", "cd"], "stream": True}))
    last = {f["index"]: f["text"] for f in got if f["meta_info"]["finish_reason"]}
    assert last == {0: "ab", 1: "cd"}
    assert sum(f["meta_info"]["finish_reason"] is not None for f in got) == 2


def test_a_prefill_stream_sends_headers_at_once_and_one_frame_at_its_end(serve):
    server = serve("prefill", script=lambda r: [..., Output((65,), finish=Finish("length"))])
    with server.http.stream("POST", "/generate", json={"text": "x", "stream": True} | PD) as answer:
        assert answer.status_code == 200, "headers are here while the prefill still runs"
        server.engine.wait(lambda: server.engine.gated() == 1)
        server.engine.release()
        text = answer.read().decode()
    first, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(first.removeprefix("data: "))["output_ids"] == [65]


# ---------------------------------------------------------------- aborts and disconnects


def test_abort_request_matches_the_rid_exactly(serve):
    server = serve(script=lambda r: [Output((65,)), ...])
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as other:
        streams = [
            server.http.stream("POST", "/generate", json={"text": "x", "rid": rid, "stream": True})
            for rid in ("job", "job-2")
        ]
        with streams[0] as first, streams[1] as second:
            server.engine.wait(lambda: server.engine.gated() == 2)
            assert other.post("/abort_request", json={"rid": "jo"}).json() == {"aborted": 0}
            assert other.post("/abort_request", json={"rid": "job", "abort_all": False}).json() == {
                "aborted": 1
            }
            first.read()
            end = frames(first)[-1]
            assert end["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted"}
            assert end["meta_info"]["id"] == "job"
            assert server.engine.gated() == 1
            assert other.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 1}
            assert server.desk.counters["aborts"] == 2
            second.read()
            assert frames(second)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_the_same_rid_again_at_once_is_accepted_and_both_are_aborted_by_it(serve):
    server = serve("decode", script=lambda r: [...])
    body = {"text": "x", "rid": "same", "stream": True}
    with (
        server.http.stream("POST", "/generate", json=body | PD) as first,
        server.http.stream("POST", "/generate", json=body | PD | {"bootstrap_room": 6}) as second,
    ):
        server.engine.wait(lambda: server.engine.gated() == 2)
        assert [r.rid for r in server.engine.requests] == ["same", "same"]
        assert server.post("/abort_request", {"rid": "same"}).json() == {"aborted": 2}
        for answer in (first, second):
            answer.read()
            assert frames(answer)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_abort_at_p_after_its_answer_is_of_the_hand_off(serve):
    server = serve("prefill")
    assert server.post("/generate", {"text": "x", "rid": "a"} | PD).status_code == 200
    server.engine.hand_offs = {"a": 1, "b": 2}
    assert server.post("/abort_request", {"rid": "a"}).json() == {"aborted": 1}
    assert server.engine.aborted == ["a"]
    assert server.post("/abort_request", {"abort_all": True}).json() == {"aborted": 3}
    assert server.desk.counters["aborts"] == 4


@pytest.mark.parametrize("body", [{}, {"rid": 5}, {"rid": None}, {"abort_all": "x"}])
def test_a_wrong_abort_is_400(shared, body):
    assert shared().post("/abort_request", body).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
def test_a_disconnect_aborts_every_prompt_while_the_engine_is_silent(serve, stream, role):
    server = serve(role, script=lambda r: [...])
    body = {"text": ["a", "b"], "rid": "gone", "stream": stream} | PD
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        if stream:
            with client.stream("POST", "/generate", json=body):
                server.engine.wait(lambda: server.engine.gated() == 2)
        else:
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                content = json.dumps(body).encode()
                raw.sendall(
                    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content)
                    + content
                )
                server.engine.wait(lambda: server.engine.gated() == 2)
    server.engine.wait(lambda: len(server.engine.aborted) == 2)
    assert set(server.engine.aborted) == {r.rid for r in server.engine.requests}
    assert server.desk.live() == 0


def test_a_finished_request_is_not_aborted_by_its_disconnect(serve):
    server = serve()
    assert server.post("/generate", {"text": "x", "stream": True}).status_code == 200
    assert server.post("/generate", {"text": "x"}).status_code == 200
    server.http.close()
    server.http = httpx.Client(base_url=server.url, trust_env=False, timeout=60)
    assert server.http.get("/health").status_code == 200
    assert server.engine.aborted == []
    assert server.desk.counters["finished"] == 2 and server.desk.live() == 0


def test_the_log_tells_the_story_and_no_content(serve):
    server = serve("decode", script=lambda r: failed(503) if r.room == 6 else text_outputs("secret"))
    server.post("/generate", {"text": "private", "rid": "r1"} | PD)
    server.post("/generate", {"text": "private", "rid": "r2"} | PD | {"bootstrap_room": 6})
    events = [json.loads(line) for line in server.log_text.getvalue().splitlines()]
    assert [(e["event"], e["rid"], e["room"]) for e in events] == [
        ("accepted", "r1", 5),
        ("finished", "r1", 5),
        ("accepted", "r2", 6),
        ("failed", "r2", 6),
    ]
    assert (
        events[3]["status"] == 503
        and events[3]["reason"] == "peer_lost"
        and events[1]["completion_tokens"] == 7
    )
    assert "secret" not in server.log_text.getvalue() and "private" not in server.log_text.getvalue()


def test_the_token_that_stopped_the_request_is_no_text(serve):
    server = serve(script=lambda r: [Output((97, 98)), Output((99,), finish=Finish("stop", matched=99))])
    body = server.post("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [99]}}).json()
    assert (body["text"], body["output_ids"]) == ("ab", [97, 98, 99])
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 99}
    assert server.engine.requests[0].sampling.stop_token_ids == {99}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_was_aborted_at_the_other_half_ends_as_an_abort(serve, role, stream):
    """200, which no router tries again (facts/router §3.4, §9)."""
    server = serve(role, script=lambda request: failed(499, "peer_failed", "the client left or aborted it"))
    answer = server.post("/generate", {"text": "x", "stream": stream} | PD)
    assert answer.status_code == 200
    (end,) = frames(answer) if stream else [answer.json()]
    assert end["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_leg_whose_other_half_was_aborted_before_it_came_ends_as_aborted(serve):
    """As one that runs does: a router would try a 503 again, in a new room (facts/router §3.4)."""
    server = serve("prefill")
    server.engine.refuse = lambda request: PDError("gone", reason="client_abort", status=CLIENT_LEFT)
    body = {"input_ids": [5, 6], "rid": "mine", **PD}
    answer = server.post("/generate", body)
    assert answer.status_code == 200 and answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    (last,) = frames(server.post("/generate", {**body, "stream": True}))
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and last["meta_info"]["id"] == "mine"
    assert server.desk.live() == 0 and server.desk.counters["refused"] == 0
