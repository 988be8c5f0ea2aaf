"""How often a process was asked to end, and what each time means."""

import os
import subprocess
import sys

import pytest

from pdjax.serve.ending import EndRequest

WAIT_S = 60.0

SIGNALLED = """
import os, signal, sys
from pdjax.serve.ending import EndRequest
request = EndRequest()
request.listen()
request.serving = True
for step in sys.argv[1:]:
    if step == "drain":
        request.ask("POST /drain")
    elif step == "load":
        request.serving = False
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
        (["load", "SIGTERM"], "load False False ", 0),
    ],
)
def test_signals_and_requests_to_end(steps, last, code):
    """The first drains, the second signal makes it urgent, the third ends the process; before it serves any one does."""
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
    for end in (request._read, request._write):
        os.close(end)
