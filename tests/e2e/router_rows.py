"""What the tests of docs/routers.md share: requests through a router, frames of a stream, what shims saw."""

import concurrent.futures
import contextlib
import http.client
import json
from dataclasses import dataclass

import httpx
from shims import until

BOTH = ("rust", "mini")
PROMPT = [17, 23, 5, 99, 211, 42, 7, 8, 140, 33]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}


def body(ids=PROMPT, n_out=6, **changes):
    return {"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": n_out}, **changes}


def ok(answer):
    assert answer.status_code == 200, (answer.status_code, answer.text)
    return answer.json()


@dataclass
class Stream:
    """A streamed answer as a client saw it. broken: the connection ended before the body did; status 0: and before the headers."""

    status: int
    headers: dict
    raw: str
    broken: bool

    @property
    def lines(self):
        return [line.strip().removeprefix("data: ") for line in self.raw.split("\n\n") if line.strip()]

    @property
    def frames(self):
        assert self.lines[-1] == "[DONE]" and not self.broken, self.raw
        return [json.loads(line) for line in self.lines[:-1]]


def stream(fleet, where, path, content):
    """The whole stream, however it ends."""
    raw, status, headers, broken = b"", 0, {}, False
    try:
        with fleet.http.stream(
            "POST", f"{fleet.url(where)}{path}", json={**content, "stream": True}
        ) as answer:
            status, headers = answer.status_code, dict(answer.headers)
            for chunk in answer.iter_raw():
                raw += chunk
    except httpx.TransportError:
        broken = True
    return Stream(status, headers, raw.decode(errors="replace"), broken)


def at_once(*calls):
    """Results of these calls, made at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


def bound(fleet):
    """Whether D's half of the one request under way has met its P: what ends P's half now ends D's at once.

    Before that, with several P listed, D goes on asking the others until its bootstrap timer.
    """
    rooms = fleet.http.get(f"{fleet.url('decode-0')}/debug/rooms").json()["rooms"]
    return any(room["peer"] for room in rooms) or fleet.state("decode-0")["in_flight"]


def await_bound(fleet, answer):
    """Until the halves of the one request under way have met, or it is answered."""
    assert until(lambda: bound(fleet) or answer.done()), "D has met no P"


def left_when(fleet, where, content, condition, path="/generate"):
    """Sends the request and closes the connection when the condition holds; nothing of the answer is read."""
    url = httpx.URL(fleet.url(where))
    connection = http.client.HTTPConnection(url.host, url.port)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(content), {"content-type": "application/json"})
        assert until(condition), f"{where} passed nothing on"


def left_after_first_frame(fleet, where, content, path="/generate"):
    """Opens a stream, reads its first frame and closes the connection; the frame."""
    with (
        httpx.Client(trust_env=False, timeout=60) as http,
        http.stream("POST", f"{fleet.url(where)}{path}", json={**content, "stream": True}) as answer,
    ):
        return next(line for line in answer.iter_lines() if line.startswith("data: "))
