"""One client's large answer leaves the event loop to the others: their streams, and /health, share it."""

import asyncio

import pytest
from serve_fakes import frames
from test_outputs import CHAT, scored


@pytest.mark.parametrize(("n", "threads"), [(1, {"http"}), (8, {"pool"})])
def test_the_texts_of_a_long_answer_do_not_hold_up_the_event_loop(serve, monkeypatch, n, threads):
    server = serve(script=scored("x" * 40))
    decode, seen = server.engine.tokenizer.decode, set()

    def watched(ids, skip_special_tokens=True):
        if not skip_special_tokens:
            on_loop = asyncio._get_running_loop() is not None
            seen.add("http" if on_loop else "pool")
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(server.engine.tokenizer, "decode", watched)
    answer = server.post("/v1/chat/completions", CHAT | {"n": n, "logprobs": True, "top_logprobs": 2}).json()
    assert [len(c["logprobs"]["content"]) for c in answer["choices"]] == [41] * n
    assert seen == threads


def test_a_stream_makes_each_entry_of_its_logprobs_once(serve, monkeypatch):
    """Frames repeat the lists, and making them anew each time stops the event loop for everybody."""
    server = serve(script=scored("x" * 40))
    decoded = []
    decode = server.engine.tokenizer.decode

    def counted(ids, skip_special_tokens=True):
        decoded.append(skip_special_tokens)
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(server.engine.tokenizer, "decode", counted)
    body = {"text": "ab", "stream": True, "return_text_in_logprobs": True, "return_logprob": True}
    got = frames(server.post("/generate", body))
    assert len(got) == 41 and got[-1]["meta_info"]["output_token_logprobs"][7] == [-1.75, 120, "x"]
    assert decoded.count(False) < 2 * 41, "one text for each output token, not for each in each frame"
