"""/health_generate: one real pass through this server and a peer, shared by all who ask at once."""

import concurrent.futures
import ssl
import sys
from pathlib import Path

import pytest
from serve_fakes import failed, text_outputs

from pdjax.engine.ports import Entry
from pdjax.sched.request import Finish, Output
from pdjax.serve import health

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from stranger import Stranger, answer

FIRST = [Output((104,), finish=Finish("length"))]
BOTH = text_outputs("hi", finish="length")


def entry(server, name="p-0"):
    return Entry(name, 1, "127.0.0.1:1", server.url)


def ask(server):
    return server.http.get("/health_generate")


def pair(serve, p_script=lambda request: FIRST, d_script=lambda request: BOTH, **more):
    p, d = serve("prefill", script=p_script), serve("decode", script=d_script, **more)
    p.engine.serving_url, d.engine.serving_url = p.url, d.url
    p.engine.others, d.engine.others = (entry(d, "d-0"),), (entry(p),)
    return p, d


def test_a_server_without_pd_answers_itself(serve):
    server = serve(script=lambda request: BOTH)
    answer = ask(server)
    assert (answer.status_code, answer.content) == (200, b"")
    (request,) = server.engine.requests
    assert request.sampling.max_new_tokens == 2 and server.desk.live() == 0


@pytest.mark.parametrize("asked", ["prefill", "decode"])
def test_both_halves_get_the_same_room_prompt_and_address(serve, asked):
    p, d = pair(serve)
    assert ask(p if asked == "prefill" else d).status_code == 200
    ((ours,), (theirs,)) = p.engine.requests, d.engine.requests
    assert ours.room == theirs.room is not None and ours.prompt_ids == theirs.prompt_ids
    assert (ours.bootstrap_host, ours.bootstrap_port) == ("127.0.0.1", 8998)
    assert theirs.bootstrap_host == "127.0.0.1", "P's own, as a router injects it"


def test_a_peer_that_fails_is_named_and_the_next_one_is_tried(serve):
    p, d = pair(serve, p_script=lambda request: failed(503, "queue_full"), d_script=lambda request: [...])
    answer = ask(d)
    assert answer.status_code == 503 and "p-0" in answer.text and "queue_full" in answer.text
    d.engine.wait(lambda: d.engine.aborted)  # our half does not wait for a timer
    d.engine.script = lambda request: BOTH
    good = serve("prefill", script=lambda request: FIRST)
    gone = Entry("p-9", 1, "127.0.0.1:1", "http://127.0.0.1:1")
    d.engine.others = (gone, entry(p), entry(good, "p-1"))
    assert ask(d).status_code == 200
    d.engine.others = (gone,)
    answer = ask(d)
    assert answer.status_code == 503 and "p-9: does not answer" in answer.text
    d.engine.others = ()
    assert "none that fits is listed" in ask(d).text


def test_our_own_failure_and_an_abort_are_told(serve):
    _, d = pair(serve, d_script=lambda request: failed(503, "peer_lost"))
    assert ask(d).status_code == 503 and "peer_lost" in ask(d).text
    d.engine.script = lambda request: [Output(finish=Finish("abort"))]
    assert "aborted" in ask(d).text


def test_a_pass_has_a_limit_and_what_hangs_is_ended(serve):
    _, d = pair(serve, d_script=lambda request: [...], health_timeout_s=0.3)
    answer = ask(d)
    assert answer.status_code == 503 and "no pass within 0.3 s" in answer.text
    d.engine.wait(lambda: len(d.engine.aborted) == 1)


def test_behind_a_full_queue_the_passes_of_others_count(serve, monkeypatch):
    monkeypatch.setattr(health, "LOOK_S", 0.05)
    _, d = pair(serve, d_script=lambda request: [...])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, d) for _ in range(2)]
        d.engine.wait(lambda: d.engine.gated() == 1)
        assert not any(one.done() for one in asked)
        while concurrent.futures.wait(asked, timeout=0.05).not_done:
            d.engine.n_passed += 1  # again and again: the second request may only come now
        assert [one.result().status_code for one in asked] == [200, 200]
    assert len(d.engine.requests) == 1, "they share one pass"
    d.engine.release()


def test_dead_or_draining_is_told_without_a_pass(serve):
    _, d = pair(serve)
    d.engine.ask_to_drain()
    assert ask(d).status_code == 503 and "draining" in ask(d).text
    d.engine.dead = "scheduler: boom"
    assert "boom" in ask(d).text and not d.engine.requests


def test_a_try_makes_no_certificate_store(serve, monkeypatch):
    """A tenth of a second of CPU on the event loop, three times for each pass, and anybody may ask for one."""
    _, d = pair(serve)
    made = []
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: made.append(1))
    assert ask(d).status_code == 200 and not made


@pytest.mark.parametrize(
    "reply", ["endless", "trickle", b"\xff not HTTP", answer(b"\xff", status=b"500 Broken")]
)
def test_a_listed_peer_that_answers_anything_is_a_reason(serve, reply):
    _, d = pair(serve, health_timeout_s=1.0)
    stranger = Stranger()
    try:
        stranger.reply = reply if isinstance(reply, bytes) else getattr(stranger, reply)
        d.engine.others = (Entry("p-x", 1, "127.0.0.1:1", stranger.url),)
        told = ask(d)
        assert told.status_code == 503 and told.text
        d.engine.others = (Entry("p-x", 1, "127.0.0.1:1", "http://["),)
        assert ask(d).status_code == 503
    finally:
        stranger.close()
    d.engine.wait(lambda: d.desk.live() == 0)
