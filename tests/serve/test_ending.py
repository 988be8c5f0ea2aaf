"""How often a process was asked to end, what each time means, and with which code it ends."""

import io
import json
import subprocess
import sys

import pytest

from pdjax.engine.bootstrap.server import HTTPBootstrapServer
from pdjax.serve import ending
from pdjax.serve.end_request import EndRequest
from pdjax.serve.ending import Failure, Patience, end
from pdjax.serve.log import ServerLog

WAIT_S = 60.0

SIGNALLED = """
import os, signal, sys
from pdjax.serve.end_request import EndRequest
request = EndRequest()
request.listen()
for step in sys.argv[1:]:
    if step == "drain":
        request.ask("POST /drain")
    else:
        os.kill(os.getpid(), getattr(signal, step))
        request.wait(60)
    print(step, request.asked, request.urgent, request.by, flush=True)
"""


@pytest.mark.parametrize(
    ("steps", "last", "code"),
    [
        (["SIGTERM"], "SIGTERM True False SIGTERM", 0),
        (["SIGTERM", "SIGINT"], "SIGINT True True SIGTERM", 0),
        (["drain", "drain"], "drain True False POST /drain", 0),
        (["drain", "SIGTERM"], "SIGTERM True False POST /drain", 0),
        (["drain", "SIGTERM", "SIGTERM"], "SIGTERM True True POST /drain", 0),
        (["SIGTERM", "SIGTERM", "SIGTERM"], "SIGTERM True True SIGTERM", 143),
    ],
)
def test_signals_and_requests_to_end(steps, last, code):
    """The first drains, the second signal makes it urgent, the third ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *steps], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.stdout.splitlines()[-1], done.returncode) == (last, code), done.stderr


def test_a_wait_ends_with_the_request_and_a_full_pipe_loses_nothing():
    request = EndRequest()
    request.wait(0.01)
    assert not request.asked
    for _ in range(100_000):  # more than a pipe holds
        request.ask("POST /drain")
    request.wait(WAIT_S)
    assert request.asked and not request.urgent
    request.close()


HOLDS_THE_LOG = """
import logging, os, signal
from pdjax.serve.end_request import EndRequest
EndRequest().listen()
logging.basicConfig()
held = __import__("threading").Lock()
logging.getLogger().handlers[0].flush = held.acquire  # whoever flushes waits for ever
held.acquire()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
"""


def test_a_third_signal_ends_a_process_whose_log_is_held():
    done = subprocess.run([sys.executable, "-c", HOLDS_THE_LOG], capture_output=True, timeout=WAIT_S)
    assert (done.stdout, done.returncode) == (b"", 143), done.stderr


class FakeNode:
    """Has ``left`` requests; tick: called at each look of the watchdog, which is itself."""

    instance_id = "p0"

    def __init__(self, left=0, tick=lambda node: None):
        self.left, self.words, self.why, self.said = left, 0, None, []
        self.quiet, self.paused = WAIT_S, False
        self._tick, self.watchdog = tick, self

    def look(self, now):
        self.said.append("look")
        self._tick(self)

    def failed(self):
        return self.why

    def unfinished(self):
        return self.left

    def has_last_words(self):
        return self.words > 0

    def drain(self):
        self.said.append("drain")

    def end_pause(self):
        paused, self.paused = self.paused, False
        return paused

    def quiet_s(self):
        return self.quiet

    def leave_routers(self):
        self.said.append("leave_routers")

    def end_all(self):
        self.said.append("end_all")

    def close(self):
        self.said.append("close")
        return self.words


class FakeHttp:
    alive = True

    def stop(self):
        self.alive = False


def ended(
    node,
    http=None,
    asked=("SIGTERM",),
    within_s=WAIT_S,
    linger_s=0.0,
    before=lambda failure: None,
    events=(),
    registry=None,
):
    """(exit code, the line "ended", what was done without the looks)"""
    text, request, http = io.StringIO(), EndRequest(), http or FakeHttp()
    for by in asked:
        request.ask(by)
    failure = Failure(node, http, registry)
    before(failure)
    code = end(node, http, request, failure, ServerLog(text), Patience(within_s, linger_s))
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["draining", *events, "ended"] and not http.alive
    request.close()
    return code, lines[-1], [said for said in node.said if said != "look"]


GENTLE = ["drain", "leave_routers", "close"]
FORCED = ["drain", "leave_routers", "end_all", "close"]


def finishes(node):
    node.left -= 1


def dies(node):
    node.why = "the scheduler thread has died"


def test_a_server_that_is_asked_finishes_what_it_has_and_ends_with_code_0():
    code, line, done = ended(FakeNode(3, finishes))
    assert (code, line["cut_off"], done) == (0, 0, GENTLE)


def test_what_is_left_when_the_time_is_over_is_ended_and_counted(monkeypatch):
    monkeypatch.setattr(ending, "LAST_WORDS_S", 0.05)
    code, line, done = ended(FakeNode(3), within_s=0.05)
    assert (code, line["cut_off"], done) == (0, 3, FORCED)


def test_a_thread_that_dies_during_the_drain_is_code_1_and_its_peers_are_told():
    """Its requests would never end: waiting for them is over at once, and they are no requests that have ended."""
    code, line, done = ended(FakeNode(3, dies))
    assert (code, line["cut_off"], done) == (1, 3, FORCED)
    assert line["seconds"] < WAIT_S / 2


def test_a_thread_that_dies_at_the_last_words_is_code_1():
    node = FakeNode(tick=dies)
    node.words = 1
    assert ended(node, within_s=0.2)[0] == 1


@pytest.mark.parametrize("asked", [(), ("SIGTERM",)])
def test_a_failed_server_ends_with_code_1_whoever_else_asks_it_to(asked):
    node = FakeNode(2)
    dies(node)
    code, line, done = ended(node, asked=asked, before=Failure.seen)
    assert (code, line["cut_off"], done) == (1, 2, FORCED)


def test_an_http_server_that_has_died_is_a_failure_and_one_that_is_stopped_is_none(monkeypatch):
    said = []
    monkeypatch.setattr(ending.log, "error", lambda text, *given: said.append(text % given))
    monkeypatch.setattr(ending, "LAST_WORDS_S", 0.05)
    http = FakeHttp()
    http.alive = False
    assert ended(FakeNode(1), http)[0] == 1
    assert said == ["this process ends: the HTTP server has ended"]
    assert ended(FakeNode())[0] == 0


def test_a_registry_inside_that_has_died_ends_the_process_with_code_1(monkeypatch):
    """Else P would go on without being found, and tell nobody."""
    said = []
    monkeypatch.setattr(ending.log, "error", lambda text, *given: said.append(text % given))
    registry = HTTPBootstrapServer(port=0)
    registry.start()
    assert ended(FakeNode(), registry=registry)[0] == 0 and said == []
    registry.stop()
    code, _, done = ended(FakeNode(), registry=registry)
    assert (code, done) == (1, FORCED)
    assert said == ["this process ends: the registry of --with-bootstrap has ended"]


def test_the_watchdog_looks_during_a_drain():
    """What is stuck then is what the end waits for."""
    node = FakeNode(3, finishes)
    ended(node)
    assert node.said.count("look") == 3


def gets_quieter(node):
    node.quiet += 1.0


def is_asked_without_end(node):
    node.quiet = 0.0


def test_a_drained_server_lingers_until_nobody_has_asked_for_a_while():
    node = FakeNode(tick=gets_quieter)
    node.quiet = 0.0
    code, line, done = ended(node, linger_s=3.0)
    assert (code, line["cut_off"], done, node.said.count("look")) == (0, 0, GENTLE, 3)
    at_once = FakeNode(tick=is_asked_without_end)
    at_once.quiet = 0.0
    ended(at_once)
    assert at_once.said.count("look") == 0


def test_whoever_goes_on_asking_holds_a_server_until_its_time_is_over():
    node = FakeNode(tick=is_asked_without_end)
    node.quiet = 0.0
    code, line, done = ended(node, within_s=0.2, linger_s=1.0)
    assert (code, line["cut_off"], done) == (0, 0, GENTLE) and 0.2 <= line["seconds"] < WAIT_S / 2


def test_a_second_signal_ends_a_server_that_lingers(monkeypatch):
    node = FakeNode(tick=is_asked_without_end)
    node.quiet = 0.0
    monkeypatch.setattr(EndRequest, "urgent", property(lambda self: node.said.count("look") >= 2))
    code, _, done = ended(node, linger_s=1.0)
    assert (code, done, node.said.count("look")) == (0, GENTLE, 2)


def test_a_failed_server_does_not_linger():
    node = FakeNode(tick=dies)
    node.quiet = 0.0
    assert ended(node, linger_s=1.0)[0] == 1 and node.said.count("look") == 1


def test_a_pause_ends_with_the_drain_and_the_log_says_so():
    node = FakeNode()
    node.paused = True
    assert ended(node, events=["pause_ended"])[0] == 0 and not node.paused
