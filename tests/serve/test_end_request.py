"""Commands that run until a signal: they end whenever it comes, and end otherwise when what they serve with has died."""

import subprocess
import sys

import pytest

WAIT_S = 60.0
# The signal comes in the middle of the wait, where an event would hold its lock.
DURING_A_WAIT = """
import os, resource, signal, sys, threading
from pdjax.serve import cli, demo, local
from pdjax.serve.end_request import EndRequest

WAITS = (threading.Condition.wait.__code__, EndRequest.wait.__code__)
sent = []

def look(frame, event, arg):
    if event == "call" and frame.f_code in WAITS and not sent:
        sent.append(frame.f_code)
        os.kill(os.getpid(), signal.SIGTERM)

def serves(*_, **__):
    sys.setprofile(look)

def starts(fleet):
    serves()
    fleet._await("nothing", lambda: False)

command, *options = sys.argv[1:]
FEW = 256
resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
cli.print_ready = serves
local.Fleet.start = starts
code = demo.main(options) if command == "demo" else cli.run([command, *options])
sys.setprofile(None)
assert sent
assert (resource.getrlimit(resource.RLIMIT_NOFILE)[0] > FEW) == (command == "bootstrap"), "of its own servers only"
sys.exit(code)
"""


def run(code, *options):
    return subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=WAIT_S
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["bootstrap", "--port", "0"], 0),
        (["up", "--model", "m", "--router", "none"], 0),
        (["demo", "--model", "m"], 130),
    ],
)
def test_a_signal_in_the_middle_of_a_wait_ends_it(command, code):
    done = run(DURING_A_WAIT, *command)
    assert done.returncode == code, done.stderr


DIES = """
import sys
from pdjax.engine.bootstrap.closing import ClosingServer
from pdjax.serve import cli

def run(server, sockets):
    raise RuntimeError("broken on purpose")

ClosingServer.run = run
sys.exit(cli.run(["bootstrap", "--port", "0"]))
"""


def test_a_registry_whose_server_has_died_says_so_and_ends_with_code_1():
    """2 would tell a supervisor that it cannot be started like this."""
    done = run(DIES)
    assert done.returncode == 1
    assert (
        "pdjax: the registry ends: its HTTP server has died (RuntimeError('broken on purpose'))"
        in done.stderr
    )
