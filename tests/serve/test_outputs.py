"""What a body asks for reaches the engine, and what the engine says reaches the client: options, n, logprobs, JSON."""

from __future__ import annotations

import json
import threading

import pytest
from serve_fakes import EOS, PD, frames

from pdjax.engine.ports import Sampled
from pdjax.sched.request import Finish, Output, SamplingParams
from pdjax.serve.limits import HttpLimits
from pdjax.serve.sampling_fields import seed_for_room, seed_of_sample

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def scored(text, finish=("stop", EOS), prompt=()):
    """An output for each byte; token i has logprob -i/4 and two likeliest tokens, itself and "z"."""
    ids = [*text.encode()] + ([EOS] if finish[1] == EOS else [])

    def script(request):
        given = tuple(Sampled(t, -t / 100, ((t, -t / 100),)) for t in prompt)
        for i, t in enumerate(ids):
            end = Finish(*finish) if i == len(ids) - 1 else None
            yield Output((t,), (-i / 4,), (((t, -i / 4), (122, -9.0)),), given if i == 0 else (), end)

    return script


# ---------------------------------------------------------------- parameters


def test_every_sampling_field_of_generate_arrives(serve):
    server = serve()
    params = {
        "max_new_tokens": 30, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "sampling_seed": 7,
        "stop": ["a", "b"], "stop_token_ids": [3, 4], "ignore_eos": True, "logit_bias": {"5": 1, "6": -2.5},
        "json_schema": '{"type": "object"}',
    }  # fmt: skip
    assert server.post("/generate", {"text": "x", "sampling_params": params}).status_code == 200
    (request,) = server.engine.requests
    assert request.sampling == SamplingParams(
        30, 0.5, 7, True, frozenset({3, 4}), 0.9, 40, 0.05, 0.5, -0.5, 1.1, 2, ((5, 1.0), (6, -2.5)),
        '{"type": "object"}',
    )  # fmt: skip
    assert request.grammar == '{"type": "object"}'
    assert [request.find_stop(ord(c)) for c in "xa"] == [None, "a"]


def test_every_sampling_field_of_openai_arrives(serve):
    server = serve(script=scored("hi"))
    body = {
        "max_tokens": 30, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "seed": 7, "stop": "a",
        "stop_token_ids": [3], "ignore_eos": False, "logit_bias": {"5": 1},
    }  # fmt: skip
    server.post("/v1/completions", {"prompt": "x", "logprobs": 3} | body)
    server.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3} | body)
    expected = SamplingParams(
        30, 0.5, 7, False, frozenset({3}), 0.9, 40, 0.05, 0.5, -0.5, 1.1, 2, ((5, 1.0),), "", 3
    )
    assert [r.sampling for r in server.engine.requests] == [expected] * 2
    assert all(r.find_stop(ord("a")) == "a" and r.grammar is None for r in server.engine.requests)


@pytest.mark.parametrize("value", [-1, 0, 1 << 30, 1 << 60, None])
def test_top_k_values_that_mean_every_token(serve, value):
    server = serve()
    server.post("/generate", {"text": "x", "sampling_params": {"top_k": value, "stop": ""}})
    assert server.engine.requests[0].sampling.top_k == 0 and server.engine.requests[0].find_stop is None


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}, '{"const":1}'),
    ],
)
def test_response_formats(serve, form, schema):
    server = serve()
    assert server.post("/v1/chat/completions", CHAT | {"response_format": form}).status_code == 200
    (request,) = server.engine.requests
    assert request.sampling.grammar == schema and (request.grammar or "") == schema


def test_the_schema_may_be_an_object(serve):
    server = serve()
    server.post("/generate", {"text": "x", "sampling_params": {"json_schema": {"const": 1}}})
    server.post("/v1/completions", {"prompt": "x", "json_schema": {"const": 1}})
    assert [r.grammar for r in server.engine.requests] == ['{"const":1}'] * 2


# ---------------------------------------------------------------- n


@pytest.mark.parametrize(
    ("path", "prompt", "count"),
    [
        ("/generate", {"text": "x", "sampling_params": {"n": 3}}, 1),
        ("/generate", {"text": ["x", "y"], "sampling_params": {"n": 3}}, 2),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 3}, 2),
        ("/v1/chat/completions", CHAT | {"n": 3}, 1),
    ],
)
def test_rooms_of_n_outputs(serve, path, prompt, count):
    """A scalar counts on; a list has one for each output (rust's chat), or for each prompt (mini's batches)."""
    server = serve("decode")
    total = 3 * count
    cases = [
        (5, list(range(5, 5 + total))),
        ([100 + 7 * i for i in range(total)], [100 + 7 * i for i in range(total)]),
        ([10 + 50 * i for i in range(count)], [10 + 50 * i + j for i in range(count) for j in range(3)]),
    ]
    for rooms, expected in cases:
        server.engine.requests.clear()
        assert server.post(path, prompt | PD | {"bootstrap_room": rooms}).status_code == 200
        assert [r.room for r in server.engine.requests] == expected
        assert [r.sampling.seed for r in server.engine.requests] == [seed_for_room(r) for r in expected]
    assert server.post(path, prompt | PD | {"bootstrap_room": [1] * total}).status_code == 400
    assert server.post(path, prompt | PD | {"bootstrap_room": [1] * (total + 1)}).status_code == 400


def test_n_outputs_of_one_seed_draw_from_streams_of_their_own(serve):
    server = serve()
    params = {"n": 3, "seed": 9}
    answer = server.post("/generate", {"text": "x", "rid": "r", "sampling_params": params}).json()
    assert [one["text"] for one in answer] == ["hello"] * 3
    seeds = [r.sampling.seed for r in server.engine.requests]
    assert seeds == [9, seed_of_sample(9, 1), seed_of_sample(9, 2)] and len(set(seeds)) == 3
    assert seed_of_sample(9, 1) == 17246972319965045905, "the same on every machine and in every version"
    assert {one["meta_info"]["id"] for one in answer} == {"r"}


def test_choices_come_prompt_by_prompt_and_a_prompt_counts_once(serve):
    server = serve(script=lambda r: scored(chr(r.prompt_ids[0]))(r))
    body = server.post("/v1/completions", {"prompt": ["a", "bc"], "n": 2, "best_of": 2}).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 8
    streamed = frames(server.post("/v1/chat/completions", CHAT | {"n": 2, "stream": True}))
    deltas = [(c["index"], c["delta"]) for f in streamed for c in f["choices"]]
    for index in (0, 1):
        mine = [delta for i, delta in deltas if i == index]
        assert mine[0] == {"role": "assistant", "content": ""} and mine[1:] == [{"content": "<"}, {}]


def test_outputs_beyond_the_limit_are_400(serve):
    server = serve(limits=HttpLimits(max_batch=5))
    body = {"text": ["a", "b"], "sampling_params": {"n": 3}}
    assert "limit is 5 outputs" in server.post("/generate", body).json()["error"]["message"]


# ---------------------------------------------------------------- logprobs of /generate

LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
def test_logprobs_of_generate(serve, role):
    server = serve(role, script=scored("hi", prompt=() if role == "decode" else b"bc"))
    meta = server.post("/generate", {"text": "abc"} | LOGPROBS | PD).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.0, 104, None], [-0.25, 105, None], [-0.5, EOS, None]]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert meta["output_top_logprobs"][1] == [[-0.25, 105, None], [-9.0, 122, None]]
    if role == "decode":
        assert meta["input_token_logprobs"] == [] == meta["input_top_logprobs"]
    else:
        assert meta["input_token_logprobs"] == [[None, 97, None], [-0.98, 98, None], [-0.99, 99, None]]
        assert meta["input_top_logprobs"] == [None, [[-0.98, 98, None]], [[-0.99, 99, None]]]
    sampling = server.engine.requests[0].sampling
    assert (sampling.top_logprobs, sampling.prompt_logprobs_from) == (2, 0)


def test_texts_in_logprobs(serve):
    server = serve(script=scored("h"))
    body = {"text": "abc", "return_logprob": True, "return_text_in_logprobs": True}
    meta = server.post("/generate", body).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.0, 104, "h"], [-0.25, EOS, "<eos>"]]
    assert meta["input_token_logprobs"] == [] and "output_top_logprobs" not in meta
    assert server.engine.requests[0].sampling.prompt_logprobs_from is None


@pytest.mark.parametrize(
    ("start", "prompt", "expected"), [(0, b"bc", 3), (1, b"c", 2), (2, b"", 1), (3, b"", 0), (-1, b"", 0)]
)
def test_input_logprobs_begin_where_asked_with_an_unknown_one(serve, start, prompt, expected):
    server = serve(script=scored("h", prompt=prompt))
    body = {"text": "abc", "return_logprob": True, "logprob_start_len": start}
    got = server.post("/generate", body).json()["meta_info"]["input_token_logprobs"]
    assert len(got) == expected and [e[0] for e in got[:1]] == [None] * min(expected, 1)


def test_mini_needs_the_list_wherever_the_key_is(serve):
    """mini adds P's list to D's if the body has the key, even when it is false (facts/router §3.1)."""
    for role in ("prefill", "decode"):
        server = serve(role)
        meta = server.post("/generate", {"text": "a", "return_logprob": False} | PD).json()["meta_info"]
        assert meta["input_token_logprobs"] == [] and "output_token_logprobs" not in meta
        meta = server.post("/generate", {"text": "a"} | PD | {"bootstrap_room": 9}).json()["meta_info"]
        assert "input_token_logprobs" not in meta


def test_each_prompt_of_a_batch_may_ask_for_other_logprobs(serve):
    server = serve(script=scored("h"))
    body = {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": [1, 0]}
    first, second = (one["meta_info"] for one in server.post("/generate", body).json())
    assert first["output_token_logprobs"] and "output_token_logprobs" not in second
    assert [r.sampling.top_logprobs for r in server.engine.requests] == [1, 0]


def test_what_is_not_answered_is_not_computed(serve):
    server = serve(script=scored("h"))
    body = {"text": "a", "return_logprob": False, "top_logprobs_num": 5, "logprob_start_len": 0}
    server.post("/generate", body)
    (request,) = server.engine.requests
    assert (request.sampling.top_logprobs, request.sampling.prompt_logprobs_from) == (0, None)


def test_streamed_logprobs_are_cumulative(serve):
    server = serve(script=scored("hi", prompt=b"b"))
    got = frames(server.post("/generate", {"text": "ab", "stream": True} | LOGPROBS))
    assert [len(f["meta_info"]["output_token_logprobs"]) for f in got] == [1, 2, 3]
    assert all(len(f["meta_info"]["input_token_logprobs"]) == 2 for f in got)


# ---------------------------------------------------------------- logprobs of OpenAI


def test_logprobs_of_a_completion(serve):
    server = serve(script=scored("hi"))
    got = server.post("/v1/completions", {"prompt": "abc", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert got == {
        "tokens": ["h", "i", "<eos>"],
        "token_logprobs": [-0.0, -0.25, -0.5],
        "top_logprobs": [{"h": -0.0}, {"i": -0.25}, {"<eos>": -0.5}],
        "text_offset": [0, 1, 2],
    }
    server.post("/v1/completions", {"prompt": "abc", "logprobs": 0})
    assert server.post("/v1/completions", {"prompt": "abc"}).json()["choices"][0]["logprobs"] is None
    assert server.post("/v1/completions", {"prompt": "abc", "logprobs": False}).status_code == 200


def test_the_drawn_token_is_listed_even_if_it_is_not_likely(serve):
    server = serve(script=lambda r: [Output((104,), (-7.0,), (((122, -0.1),),), (), Finish("length"))])
    got = server.post("/v1/completions", {"prompt": "a", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert got["top_logprobs"] == [{"z": -0.1, "h": -7.0}]


def test_a_part_of_a_character_goes_by_its_number(serve):
    server = serve(script=scored("é", finish=("length", None)))
    got = server.post("/v1/completions", {"prompt": "a", "logprobs": 0}).json()["choices"][0]
    assert got["text"] == "é" and got["logprobs"]["tokens"] == ["token_id:195", "token_id:169"]
    chat = server.post("/v1/chat/completions", CHAT | {"logprobs": True}).json()["choices"][0]["logprobs"]
    assert [c["bytes"] for c in chat["content"]] == [None, None]


def test_logprobs_of_a_chat(serve):
    server = serve(script=scored("hi", finish=("length", None)))
    body = server.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}).json()
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {"token": t, "logprob": p, "bytes": [ord(t)], "top_logprobs": [{"token": t, "logprob": p, "bytes": [ord(t)]}]}
            for t, p in (("h", -0.0), ("i", -0.25))
        ],
        "refusal": None,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_chunks_tell_each_token_once_also_those_held_back(serve, path):
    """Text that may begin a stop string comes later, and its tokens with it."""
    server = serve(script=scored("axxb"))
    body = {"stream": True, "stop": ["xxx"], "logprobs": 1 if path == "/v1/completions" else True}
    prompt = {"prompt": "p"} if path == "/v1/completions" else CHAT
    choices = [f["choices"][0] for f in frames(server.post(path, prompt | body))]
    told = [c["logprobs"] for c in choices if c["logprobs"]]
    if path == "/v1/completions":
        assert [t["tokens"] for t in told] == [["a"], ["x", "x", "b"], ["<eos>"]]
        assert [t["text_offset"] for t in told] == [[0], [1, 2, 3], [4]]
    else:
        assert ["".join(e["token"] for e in t["content"]) for t in told] == ["a", "xxb", "<eos>"]


# ---------------------------------------------------------------- echo


@pytest.mark.parametrize(("prompt", "n"), [("ab", 1), ([97, 98], 1), ("ab", 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first_once(serve, prompt, n, stream):
    server = serve(script=scored("hi"))
    answer = server.post("/v1/completions", {"prompt": prompt, "echo": True, "n": n, "stream": stream})
    choices = [c for f in frames(answer) for c in f["choices"]] if stream else answer.json()["choices"]
    for index in range(n):
        assert "".join(c["text"] for c in choices if c["index"] == index) == "abhi"


def test_echo_with_logprobs_scores_the_prompt(serve):
    server = serve(script=scored("h", finish=("length", None), prompt=b"b"))
    got = server.post("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1}).json()["choices"][0]
    assert got["text"] == "abh"
    assert got["logprobs"] == {
        "tokens": ["a", "b", "h"],
        "token_logprobs": [None, -0.98, -0.0],
        "top_logprobs": [None, {"b": -0.98}, {"h": -0.0}],
        "text_offset": [0, 1, 2],
    }
    assert server.engine.requests[0].sampling.prompt_logprobs_from == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_echo_with_logprobs_is_refused_by_both_halves_alike(shared, role):
    body = {"prompt": "ab", "echo": True, "logprobs": 1} | PD
    answer = shared(role).post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"
    assert "logprob_start_len" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- text


def test_a_stop_string_is_no_text_and_is_named(serve):
    script = scored("hello", finish=("stop", "lo"))
    server = serve(script=script)
    body = {"text": "x", "sampling_params": {"stop": "lo"}}
    answer = server.post("/generate", body).json()
    assert answer["text"] == "hel" and answer["meta_info"]["finish_reason"]["matched"] == "lo"
    assert answer["meta_info"]["completion_tokens"] == 5
    body["sampling_params"]["no_stop_trim"] = True
    assert server.post("/generate", body).json()["text"] == "hello"
    completion = server.post("/v1/completions", {"prompt": "x", "stop": ["lo"]}).json()["choices"][0]
    assert (completion["text"], completion["finish_reason"]) == ("hel", "stop")


def test_special_tokens_are_shown_when_asked_for(serve):
    server = serve(script=scored("hi"))
    body = {"text": "x", "sampling_params": {"skip_special_tokens": False, "no_stop_trim": True}}
    assert server.post("/generate", body).json()["text"] == "hi<eos>"


def test_a_stream_with_a_stop_string_never_shrinks(serve):
    server = serve(script=scored("hello", finish=("stop", "lo")))
    body = {"text": "x", "stream": True, "sampling_params": {"stop": "lo"}}
    texts = [f["text"] for f in frames(server.post("/generate", body))]
    assert texts == ["h", "he", "he", "hel", "hel"]


def test_json_is_plain_json(serve):
    server = serve(script=scored('{"a": 1}'))
    body = {"text": "x", "sampling_params": {"json_schema": '{"type": "object"}'}}
    assert json.loads(server.post("/generate", body).json()["text"]) == {"a": 1}


def test_a_schema_is_compiled_beside_the_loop(serve):
    """It may take a second, and other streams must not wait for it."""
    server = serve()
    seen = []
    compiled = server.engine.tokenizer.json_grammar

    def compile_here(schema):
        seen.append(threading.current_thread())
        return compiled(schema)

    server.engine.tokenizer.json_grammar = compile_here
    server.post("/generate", {"text": "x", "sampling_params": {"json_schema": "{}"}})
    server.post("/generate", {"text": ["x"], "sampling_params": [{"json_schema": "{}"}]})
    server.post("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}})
    assert len(seen) == 3 and not any(thread.name == "test-http" for thread in seen)
