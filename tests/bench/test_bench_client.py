"""The client against scripted answers: what it counts as a token, a gap, and each kind of failure."""

import asyncio
import json
import time

import httpx
import pytest

from pdjax.bench import client as client_module
from pdjax.bench.client import Load, Run, probe
from pdjax.bench.dialects import Completions, Generate
from pdjax.bench.workload import Job, synthetic
from pdjax.core.errors import ConfigError

LOAD = Load("http://server.test", concurrency=4, timeout_s=5.0)
DONE = b"data: [DONE]\n\n"


def sse(*events):
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def frame(n, **more):
    return {
        "text": "x" * n,
        "meta_info": {"completion_tokens": n, "prompt_tokens": 7, "cached_tokens": 2, **more},
    }


def choice(text, **more):
    return {"choices": [{"text": text, "finish_reason": None, **more}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
GENERATE, COMPLETIONS = Generate(512, 0), Completions("default", 0)


@pytest.fixture
def run(monkeypatch):
    """run(handler, …) → outcomes in the order of their jobs."""

    def go(handler, dialect=GENERATE, jobs=None, load=LOAD):
        def client_of(load):
            return httpx.AsyncClient(base_url=load.url, transport=httpx.MockTransport(handler))

        monkeypatch.setattr(client_module, "client_of", client_of)
        made = Run(load, dialect)
        asyncio.run(made.go(jobs or [Job(0, 7, 3)]))
        return sorted(made.outcomes, key=lambda outcome: outcome.number)

    return go


async def trickle(*pieces, gap_s=0.02):
    for piece in pieces:
        yield piece
        await asyncio.sleep(gap_s)


def test_generate_is_asked_with_exact_ids_and_its_cumulative_frames_are_counted_once(run):
    asked = []

    def handler(request):
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, content=trickle(sse(frame(1)), sse(frame(2)), sse(frame(4)) + DONE))

    [outcome] = run(handler, jobs=[Job(0, 7, 4)])
    path, body = asked[0]
    assert path == "/generate" and len(body["input_ids"]) == 7 and body["stream"] is True
    assert body["sampling_params"] == {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert (outcome.error, outcome.n_output, outcome.n_prompt, outcome.n_cached) == ("", 4, 7, 2)
    assert len(outcome.gaps_s) == 3 and outcome.gaps_s[1] == outcome.gaps_s[2], (
        "two tokens share their frame's gap"
    )
    assert outcome.gaps_s[0] >= 0.015
    assert outcome.e2e_s == pytest.approx(outcome.ttft_s + sum(outcome.gaps_s))


def test_completions_count_pieces_and_believe_the_usage(run):
    answer = sse(choice("a"), choice(""), choice("c", finish_reason="length"), USAGE) + DONE
    [outcome] = run(lambda request: httpx.Response(200, content=answer), COMPLETIONS)
    assert (outcome.error, outcome.n_output, outcome.n_prompt, len(outcome.gaps_s)) == ("", 3, 9, 2)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((503, b'{"error": {"message": "m", "code": 503, "reason": "queue_full"}}'), "status 503 queue_full"),
        ((400, b'{"error": {"code": "decode_bad_request"}}'), "status 400 decode_bad_request"),
        ((400, b'data: {\'error\': {"message":{"err'), "status 400"),
        ((500, b'["no object"]'), "status 500"),
        ((500, b'{"a":' + b"[" * 9000), "status 500"),
        ((200, sse({"error": {"reason": "peer_lost"}}) + DONE), "event peer_lost"),
        ((200, sse(frame(1), {"error": "gone"}) + DONE), "event unknown"),
        ((200, sse(frame(1))), "cut short"),
        ((200, sse(frame(3, finish_reason={"type": "abort"})) + DONE), "aborted"),
        ((200, DONE), "no tokens"),
        ((200, b"data: {\n\n" + DONE), "malformed event"),
        ((200, sse(["no object"]) + DONE), "malformed event"),
        ((200, b'data: {"a":' + b"[" * 9000 + b"\n\n" + DONE), "malformed event"),
        ((200, b'data: {"meta_info": {"completion_tokens": Infinity}}\n\n' + DONE), "malformed event"),
        ((200, sse({"meta_info": 3}) + DONE), "malformed event"),
    ],
)
def test_each_failure_has_its_kind(run, answer, kind):
    status, content = answer
    [outcome] = run(lambda request: httpx.Response(status, content=content))
    assert outcome.error == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("refused"), "ConnectError"),
        (httpx.RemoteProtocolError("incomplete chunked read"), "cut short"),
        (httpx.ReadTimeout("late"), "ReadTimeout"),
    ],
)
def test_a_failure_of_the_connection_is_counted_and_the_others_go_on(run, error, kind):
    def handler(request):
        if len(json.loads(request.content)["input_ids"]) == 5:
            raise error
        return httpx.Response(200, content=sse(frame(1)) + DONE)

    outcomes = run(handler, jobs=[Job(0, 5, 1), Job(1, 6, 1)])
    assert [outcome.error for outcome in outcomes] == [kind, ""]


def test_a_server_that_is_silent_is_a_timeout(run):
    async def handler(request):
        await asyncio.sleep(60)

    load = Load("http://server.test", 1, timeout_s=0.05)
    assert [outcome.error for outcome in run(handler, load=load)] == ["timeout"]


def test_no_more_than_the_given_number_runs_at_once(run):
    running, most = 0, 0

    async def handler(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return httpx.Response(200, content=sse(frame(1)) + DONE)

    outcomes = run(handler, jobs=synthetic(20, 4, 1), load=Load("http://server.test", 3, 5.0))
    assert len(outcomes) == 20 and most == 3


def test_an_open_loop_sends_at_the_given_times_whatever_has_ended(run):
    async def handler(request):
        await asyncio.sleep(0.3)
        return httpx.Response(200, content=sse(frame(1)) + DONE)

    jobs = [Job(i, 4, 1, at_s=i * 0.05) for i in range(4)]
    began = time.perf_counter()
    outcomes = run(handler, jobs=jobs, load=Load("http://server.test", 0, 60.0))
    assert [outcome.error for outcome in outcomes] == [""] * 4
    assert all(outcome.sent_s >= job.at_s for outcome, job in zip(outcomes, jobs, strict=True))
    assert outcomes[-1].sent_s < 0.3 or outcomes[-1].late_s > 0.1, "it did not wait for the first answer"
    assert time.perf_counter() - began >= 0.45


@pytest.mark.parametrize(("status", "is_router"), [(404, False), (200, True), (401, True)])
def test_probe_knows_the_rust_router_by_its_workers(monkeypatch, status, is_router):
    def handler(request):
        return httpx.Response(status if request.url.path == "/workers" else 200)

    monkeypatch.setattr(
        client_module,
        "client_of",
        lambda load: httpx.AsyncClient(base_url=load.url, transport=httpx.MockTransport(handler)),
    )
    assert asyncio.run(probe(LOAD)) is is_router


def test_probe_says_when_nobody_answers():
    with pytest.raises(ConfigError, match="nobody answers"):
        asyncio.run(probe(Load("http://127.0.0.1:9", 1, 1.0)))
