"""POST /generate: what is refused and what passes, failures as the client sees them, rooms (facts/router §0)."""

import re

import pytest
from serve_fakes import PD, duplicate, failed, frames

from pdjax.core.errors import PDError
from pdjax.sched.request import Output
from pdjax.serve.limits import HttpLimits

ROOM_MAX = (1 << 63) - 1


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
        ({"text": "x", "return_logprob": 1}, "return_logprob"),
        ({"text": "x", "return_logprob": [True, True]}, "return_logprob"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "xyz", "return_logprob": True, "logprob_start_len": 4}, "past the end of the prompt of 3"),
        ({"text": "x", "top_logprobs_num": 21}, r"top_logprobs_num.*\[0, 20\]"),
        ({"text": "x", "return_text_in_logprobs": 1}, "return_text_in_logprobs"),
        ({"text": "x", "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": ["x", "y"], "sampling_params": [{"n": 2}, {"n": 1}]}, "same for all prompts"),
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


def test_a_bias_that_is_no_number_names_its_token(shared):
    answer = shared().post("/generate", {"text": "x", "sampling_params": {"logit_bias": {"5": "1"}}})
    assert answer.json()["error"]["param"] == "sampling_params.logit_bias.5"


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
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [257]),
        ("stop_token_ids", [1] * 1025),
        ("n", 0),
        ("n", True),
        ("n", 129),
        ("best_of", 2),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", "1"),
        ("top_k", -2),
        ("top_k", 4.0),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.5),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["x", ""]),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("json_schema", 5),
        ("json_schema", '{"wrong": 1}'),
        ("json_schema", '{"a": "' + "x" * (64 << 10) + '"}'),
        ("regex", "a"),
        ("ebnf", "a"),
        ("stop_regex", "a"),
        ("logit_bias", [5]),
        ("logit_bias", {"257": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 1, "05": 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("skip_special_tokens", 0),
        ("no_stop_trim", 1),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_wrong_sampling_parameters_are_named(shared, name, value):
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


@pytest.mark.parametrize(("name", "limit"), [("rid", "max_rid_chars"), ("bootstrap_host", "max_host_chars")])
def test_a_name_over_the_limit_is_400(serve, name, limit):
    server = serve("decode", limits=HttpLimits(**{limit: 3}))
    for text, status in (("abc", 200), ("abcd", 400), ("", 400)):
        answer = server.post("/generate", {"text": "x"} | PD | {"bootstrap_host": "h", name: text})
        assert answer.status_code == status, text
        assert status == 200 or answer.json()["error"]["param"] == name


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
