"""The OpenAI endpoints: prompts, usage, streams, model names, error shapes (facts/router §2, §3)."""

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serve_fakes import EOS, PD, echo, failed, frames, text_outputs

from pdjax.sched.request import Output
from pdjax.serve.sampling_fields import seed_for_room

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": CHAT}


def test_answers_are_what_openais_client_has_types_for(serve):
    """It warns of a field of its own with another content, and warnings are errors here."""
    server = serve(script=echo)
    completion, chat = (server.post(path, body).json() for path, body in BODIES.items())
    told = [ChatCompletion.construct(**chat), Completion.construct(**completion)]
    streamed = frames(server.post("/v1/chat/completions", CHAT | {"stream": True}))
    told.append(ChatCompletionChunk.construct(**streamed[-1]))
    assert all("first_token_s" in one or one == {} for answer in told for one in answer.model_dump()["times"])


def test_a_completion(serve):
    server = serve()
    body = server.post(
        "/v1/completions", {"model": "fake-model", "prompt": "hi", "max_tokens": 9, "seed": 4}
    ).json()
    assert body["object"] == "text_completion" and body["model"] == "fake-model"
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (request,) = server.engine.requests
    assert (request.sampling.max_new_tokens, request.sampling.seed, request.sampling.temperature) == (
        9,
        4,
        1.0,
    )


def test_a_chat_completion(serve):
    server = serve(script=lambda r: text_outputs("ok", "length"))
    body = server.post("/v1/chat/completions", CHAT | {"max_completion_tokens": 2, "temperature": 0}).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ok"} and choice["finish_reason"] == "length"
    (request,) = server.engine.requests
    assert bytes(request.prompt_ids) == b"<user>hi" and request.sampling.max_new_tokens == 2


def test_default_lengths(serve):
    server = serve()
    server.post("/v1/completions", {"prompt": "hi"})
    server.post("/v1/chat/completions", CHAT)
    server.post("/v1/chat/completions", CHAT | {"max_tokens": 3, "max_completion_tokens": None})
    assert [r.sampling.max_new_tokens for r in server.engine.requests] == [16, 512 - 8, 3]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ab"]), (["ab", "cd"], ["ab", "cd"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])],
    ids=str,
)
def test_every_kind_of_prompt(serve, prompt, texts):
    server = serve(script=echo)
    body = server.post("/v1/completions", {"prompt": prompt}).json()
    assert [c["text"] for c in body["choices"]] == texts
    assert [c["index"] for c in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))
    streamed = frames(server.post("/v1/completions", {"prompt": prompt, "stream": True}))
    for index, text in enumerate(texts):
        mine = [e["choices"][0] for e in streamed if e["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


def test_content_parts_are_joined(serve):
    server = serve()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert bytes(server.engine.requests[0].prompt_ids) == b"<user>ab"


def test_a_streamed_chat(serve):
    server = serve(script=lambda r: text_outputs("hé"))
    got = frames(server.post("/v1/chat/completions", CHAT | {"stream": True}))
    choices = [e["choices"][0] for e in got]
    assert [c["delta"] for c in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "é"},
        {},
    ]
    assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]
    assert {e["object"] for e in got} == {"chat.completion.chunk"} and len({e["id"] for e in got}) == 1
    assert all(e["usage"] is None for e in got)


def test_the_role_waits_for_the_first_token(serve):
    server = serve(script=lambda r: [..., *text_outputs("ab")])
    with server.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        server.engine.wait(lambda: server.engine.gated() == 1)
        body = answer.iter_raw()
        server.engine.release()
        assert b'"role":"assistant"' in next(body)
        list(body)


@pytest.mark.parametrize("path", BODIES)
def test_usage_comes_last_when_asked(serve, path):
    server = serve()
    body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}}
    got = frames(server.post(path, body))
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 6
    assert all(e["choices"] and e["usage"] is None for e in got[:-1])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", ["fake-model", "default", "unknown", None, ""])
def test_accepted_model_names(serve, path, model):
    server = serve()
    assert server.post(path, BODIES[path] | {"model": model}).json()["model"] == "fake-model"


@pytest.mark.parametrize("path", BODIES)
def test_another_model_is_404_in_openais_shape(shared, path):
    answer = shared().post(path, BODIES[path] | {"model": "gpt-9"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (
        error["type"] == "invalid_request_error" and error["param"] == "model" and "gpt-9" in error["message"]
    )


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt"),
        ("/v1/completions", {"prompt": [999]}, "prompt"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"max_tokens": 2.0}, "max_tokens"),
        ("/v1/completions", {"n": 0}, "n"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/v1/completions", {"n": 3, "best_of": 2}, "best_of"),
        ("/v1/completions", {"echo": 1}, "echo"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/completions", {"stop": [5]}, "stop"),
        ("/v1/completions", {"min_tokens": 17}, "min_tokens"),
        ("/v1/completions", {"json_schema": '{"wrong": 1}'}, "json_schema"),
        ("/v1/completions", {"stream": 1}, "stream"),
        ("/v1/completions", {"stream_options": 1}, "stream_options"),
        ("/v1/completions", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"top_p": 0}, "top_p"),
        ("/v1/chat/completions", {"logprobs": 1}, "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", {"response_format": {"type": "grammar"}}, "response_format"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
        ("/v1/chat/completions", {"response_format": "json_object"}, "response_format"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object"}, "json_schema": "{}"},
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"wrong": 1}}}},
            "response_format",
        ),
        ("/v1/chat/completions", {"seed": "x"}, "seed"),
    ],
)
def test_wrong_bodies_are_400_and_name_the_field(shared, path, change, param):
    server = shared()
    answer = server.post(path, BODIES[path] | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert server.engine.requests == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_bodies_as_the_rust_router_writes_them(serve, role):
    server = serve(role)
    extra = (
        b'"no_stop_trim":false,"ignore_eos":false,"skip_special_tokens":true,"return_hidden_states":false,'
        b'"bootstrap_host":"127.0.0.1","bootstrap_port":9001,"bootstrap_room":753694254886458110}'
    )
    completion = b'{"model":"fake-model","prompt":"hello","max_tokens":3,"temperature":0.0,"stream":false,"echo":false,'
    chat = (
        b'{"messages":[{"role":"user","content":"hi"}],"model":"unknown","logprobs":false,"max_completion_tokens":3,'
        b'"stream":false,"temperature":0.0,"continue_final_message":false,"separate_reasoning":true,"stream_reasoning":true,'
    )
    assert server.http.post("/v1/completions", content=completion + extra).status_code == 200
    assert server.http.post("/v1/chat/completions", content=chat + extra).status_code == 200
    assert [(r.room, r.sampling.max_new_tokens) for r in server.engine.requests] == [
        (753694254886458110, 3)
    ] * 2


def test_a_scalar_room_with_two_prompts_as_mini_sends_it(serve):
    server = serve("decode")
    assert server.post("/v1/completions", {"prompt": ["a", "b"]} | PD).status_code == 200
    assert [r.room for r in server.engine.requests] == [5, 6]
    assert [r.sampling.seed for r in server.engine.requests] == [seed_for_room(5), seed_for_room(6)]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_a_router_it_is_400(shared, path, role):
    assert shared(role).post(path, BODIES[path]).status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_d_answers_every_stream_error_as_an_event(serve, path):
    server = serve("decode", script=lambda r: [Output((65,)), *failed(503)])
    for change in ({"model": "gpt-9"}, {"max_tokens": 0}, {}, PD):
        answer = server.post(path, BODIES[path] | {"stream": True} | change)
        assert answer.status_code == 200
        error = frames(answer)[-1]["error"]
        assert error["code"] == {"model": 404, "bootstrap_host": 503}.get(next(iter(change), ""), 400)


def test_the_stop_token_counts_and_is_no_text(serve):
    server = serve(script=lambda r: text_outputs("", "stop"))
    body = server.post("/v1/completions", {"prompt": "x"}).json()
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 1
    assert server.post("/generate", {"text": "x"}).json()["output_ids"] == [EOS]
