"""POST /generate: shapes, batches, streams, aborts, disconnects (facts/router §0)."""

import json
import re
import socket

import httpx
import pytest
from serve_fakes import EOS, duplicate, failed, text_outputs

from pdjax.core.errors import PDError
from pdjax.sched.request import Finish, Output
from pdjax.serve.answer import HttpLimits
from pdjax.serve.params import seed_for_room

PD = {"bootstrap_host": "127.0.0.1", "bootstrap_port": None, "bootstrap_room": 5}
ROOM_MAX = (1 << 63) - 1


def frames(answer):
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def echo(request):
    """The prompt back, one byte at a time."""
    return text_outputs(bytes(request.prompt_ids).decode())


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


# ---------------------------------------------------------------- errors


def test_a_failure_is_its_status_with_the_reason_in_the_text(serve):
    server = serve("decode", script=lambda r: failed(503))
    answer = server.post("/generate", {"text": "x"} | PD)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "peer_lost: the peer is gone"
    assert answer.json()["error"]["reason"] == "peer_lost"


def test_a_failure_in_a_stream_is_an_event_then_done(serve):
    server = serve("decode", script=lambda r: [Output((65,)), *failed(503)])
    answer = server.post("/generate", {"text": "x", "stream": True} | PD)
    assert answer.status_code == 200
    assert [next(iter(f)) for f in frames(answer)] == ["text", "error"]


@pytest.mark.parametrize(
    ("role", "status"), [("null", 400), ("prefill", 400), ("decode", 200)], ids=["null", "prefill", "decode"]
)
def test_a_refused_stream_is_400_but_on_d_an_error_event(serve, role, status):
    server = serve(role)
    server.engine.refuse = duplicate
    for body in ({"text": "x", "stream": True} | PD, {"text": "", "stream": True} | PD):
        answer = server.post("/generate", body)
        assert answer.status_code == status
        error = frames(answer)[0]["error"] if status == 200 else answer.json()["error"]
        assert error["code"] == 400
        assert not answer.headers.get("content-length") or status == 400


@pytest.mark.parametrize("status", [400, 503])
def test_a_refusal_of_the_engine_keeps_its_status(serve, status):
    server = serve()
    server.engine.refuse = lambda r: PDError("no", reason="queue_full", status=status)
    answer = server.post("/generate", {"text": "x"})
    assert answer.status_code == status and "queue_full" in answer.json()["error"]["message"]


def test_a_batch_is_all_or_nothing(serve):
    server = serve("prefill", script=lambda r: [...])
    server.engine.refuse = lambda r: duplicate(r) if r.room == 7 else None
    answer = server.post("/generate", {"text": ["a", "b", "c", "d"]} | PD)
    assert answer.status_code == 400
    assert [r.room for r in server.engine.requests] == [5, 6]
    assert server.engine.aborted == [r.rid for r in server.engine.requests]
    assert server.desk.live() == 0


def test_one_failed_prompt_ends_its_batch(serve):
    server = serve("decode", script=lambda r: failed(503) if r.room == 6 else [...])
    answer = server.post("/generate", {"text": ["a", "b"]} | PD)
    assert answer.status_code == 503
    server.engine.wait(lambda: server.engine.aborted == [server.engine.requests[0].rid])


@pytest.mark.parametrize(
    ("body", "names_it"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "empty"),
        ({"text": []}, "text"),
        ({"text": 5}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"text": ["a", ""]}, "empty"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "empty"),
        ({"input_ids": [[1], []]}, "empty"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [1.0]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [-1]}, r"\[0, 256\]"),
        ({"input_ids": [257]}, r"\[0, 256\]"),
        ({"text": "x" * 512}, "context of 512"),
        ({"text": "x", "sampling_params": 5}, "sampling_params"),
        ({"text": "x", "stream": "yes"}, "stream"),
        ({"text": "x", "rid": 7}, "rid"),
        ({"text": "x", "rid": ["a", "b"]}, "rid"),
        ({"text": "x", "return_logprob": True}, "return_logprob"),
        ({"text": "x", "lora_path": "some"}, "lora_path"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_bodies_are_400_before_anything_is_taken(shared, body, names_it, stream):
    server = shared()
    answer = server.post("/generate", body | ({"stream": True} if stream and "stream" not in body else {}))
    assert answer.status_code == 400
    assert re.search(names_it, answer.json()["error"]["message"])
    assert server.engine.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", 10**400),
        ("temperature", "0"),
        ("temperature", True),
        ("sampling_seed", 1.5),
        ("sampling_seed", 1 << 64),
        ("ignore_eos", 1),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1.0]),
        ("n", 2),
        ("n", True),
        ("top_p", 0.9),
        ("top_k", 40),
        ("min_p", 0.1),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("min_new_tokens", 3),
        ("stop", "x"),
        ("stop", ["x"]),
        ("json_schema", "{}"),
        ("regex", "a"),
        ("logit_bias", {"5": 1}),
        ("skip_special_tokens", False),
        ("no_stop_trim", True),
    ],
)
def test_sampling_parameters_that_would_change_the_answer_are_named(shared, name, value):
    server = shared()
    answer = server.post("/generate", {"text": "x", "sampling_params": {name: value}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"sampling_params.{name}"
    assert server.engine.requests == []


def test_neutral_values_and_unknown_keys_pass(serve):
    params = {
        "n": 1,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0,
        "stop": [],
        "regex": None,
    }
    params |= {
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "stop_token_ids": None,
        "whatever": [1],
    }
    server = serve()
    body = {
        "text": "x",
        "sampling_params": params,
        "lora_path": "",
        "return_logprob": False,
        "foo": {"bar": 1},
    }
    assert server.post("/generate", body).status_code == 200


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b'{"text": NaN}', b"\xff", b'{"a":' * 50000], ids=range(7)
)
def test_what_is_no_json_object_is_400(shared, content):
    answer = shared().http.post("/generate", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_over_the_limit_is_400_and_read_to_its_end(serve):
    server = serve(limits=HttpLimits(max_body_bytes=1000))
    assert server.post("/generate", {"text": "x", "pad": "y" * 2_000_000}).status_code == 400
    assert "1000 bytes" in server.post("/generate", {"text": "x" * 1000}).json()["error"]["message"]
    assert server.post("/generate", {"text": "x"}).status_code == 200


def test_a_batch_over_the_limit_is_400(serve):
    server = serve(limits=HttpLimits(max_batch=2))
    assert server.post("/generate", {"text": ["a"] * 3}).status_code == 400


def test_a_long_prompt_is_tokenized_beside_the_loop(serve):
    server = serve(context_length=200_000)
    assert server.post("/generate", {"text": "x" * 100_000}).json()["meta_info"]["prompt_tokens"] == 100_000
    assert server.post("/generate", {"text": "x" * 200_000}).status_code == 400


# ---------------------------------------------------------------- rooms


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"bootstrap_room": 0}, [0, 1]),
        ({"bootstrap_room": ROOM_MAX}, [ROOM_MAX, 0]),
        ({"bootstrap_room": [ROOM_MAX, 3]}, [ROOM_MAX, 3]),
        ({"bootstrap_port": [9001, None], "bootstrap_host": ["a", "b"]}, [5, 6]),
    ],
)
def test_rooms_of_a_batch(serve, fields, expected):
    server = serve("decode")
    assert server.post("/generate", {"text": ["a", "b"]} | PD | fields).status_code == 200
    assert [r.room for r in server.engine.requests] == expected


def test_host_and_port_reach_the_engine(serve):
    server = serve("decode")
    server.post("/generate", {"text": "a"} | PD | {"bootstrap_port": 9001})
    server.post("/generate", {"text": "a"} | {k: [v] for k, v in PD.items()})
    assert [(r.bootstrap_host, r.bootstrap_port, r.room) for r in server.engine.requests] == [
        ("127.0.0.1", 9001, 5),
        ("127.0.0.1", None, 5),
    ]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_room": room}
        for room in (
            None,
            True,
            False,
            "5",
            5.0,
            -1,
            1 << 63,
            1 << 64,
            [],
            [1],
            [1, 2, 3],
            [1, "2"],
            [1, 2.0],
            [4, 4],
        )
    ]
    + [{"bootstrap_host": host} for host in (None, "", 5, ["a"], "x" * 300)]
    + [{"bootstrap_port": port} for port in (0, -1, 65536, "9001", 9001.0, True, [1])],
    ids=str,
)
def test_wrong_bootstrap_fields_are_400(shared, role, fields):
    server = shared(role)
    answer = server.post("/generate", {"text": ["a", "b"]} | PD | fields)
    assert answer.status_code == 400 and next(iter(fields)) in answer.json()["error"]["message"]
    assert server.engine.requests == []


@pytest.mark.parametrize("number", ["1e3", "5.0", "5e0", "9223372036854775808", "-0.0", "true"])
def test_a_room_that_is_no_exact_integer_in_the_json_text_is_400(shared, number):
    server = shared("decode")
    text = b'{"text":"a","bootstrap_host":"h","bootstrap_room":' + number.encode() + b"}"
    assert server.http.post("/generate", content=text).status_code == 400


def test_a_room_above_2_to_53_is_exact(serve):
    server = serve("decode")
    text = b'{"text":"a","bootstrap_host":"h","bootstrap_room":9007199254740993}'
    assert server.http.post("/generate", content=text).status_code == 200
    assert server.engine.requests[0].room == 9007199254740993


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_without_a_router_is_400_at_once(shared, role):
    answer = shared(role).post("/generate", {"text": "x"})
    assert answer.status_code == 400 and "router" in answer.json()["error"]["message"]


def test_without_pd_bootstrap_fields_mean_nothing(serve):
    server = serve("null")
    assert (
        server.post("/generate", {"text": "x", "bootstrap_room": "junk", "bootstrap_host": 5}).status_code
        == 200
    )
    assert server.engine.requests[0].room is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_body_as_the_rust_router_writes_it(serve, role):
    server = serve(role)
    text = (
        b'{"text":"hello","model":null,"sampling_params":{"temperature":0.0,"max_new_tokens":3},'
        b'"return_text_in_logprobs":false,"stream":false,"log_metrics":true,"return_hidden_states":false,'
        b'"background":false,"no_logs":false,"return_bytes":false,"return_entropy":false,'
        b'"bootstrap_host":"127.0.0.1","bootstrap_port":9001,"bootstrap_room":7688161634865549034}'
    )
    assert server.http.post("/generate", content=text).status_code == 200
    (request,) = server.engine.requests
    assert (request.room, request.bootstrap_port) == (7688161634865549034, 9001)
    assert (request.sampling.max_new_tokens, request.sampling.temperature) == (3, 0.0)


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
            assert other.post("/abort_request", json={"abort_all": True}).status_code == 200
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
        assert len({r.rid for r in server.engine.requests}) == 2
        assert server.post("/abort_request", {"rid": "same"}).json() == {"aborted": 2}
        for answer in (first, second):
            answer.read()
            assert frames(answer)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


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
