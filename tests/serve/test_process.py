"""The process of a server: whatever ends it, it leaves by its own way out and never through the interpreter's teardown."""

import os
import subprocess
import sys

import pytest

WAIT_S = 100.0

PROCESS = """
import atexit, os, resource, signal, sys, threading
from pdjax.serve import process
from pdjax.serve.args import ServeArgs

atexit.register(print, "teardown", flush=True)
where = sys.argv[1]
FEW = 256
resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def ended_now(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()  # it would take for ever

def broken(*_):
    raise RuntimeError("broken on purpose")

class Registry(process.HTTPBootstrapServer):
    def stop(self):
        super().stop()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0] > FEW
        print("registry stopped,", "more files allowed" if raised else "few files allowed", flush=True)

class Node:
    instance_id = "p0"
    def __init__(self, *args, **more): pass
    def start(self): threading.Thread(target=ended_now, daemon=True).start()
    def loaded(self, wait_s): return threading.Event().wait(wait_s)

process.HTTPBootstrapServer, process.Node = Registry, Node
process.load = {"load": ended_now, "compile": lambda args: "a model", "broken": broken}[where]
args = ServeArgs("tiny", port=0, disaggregation_mode="prefill", with_bootstrap=True, bootstrap_port=0)
process.run_server(args)
"""


def run(where):
    return subprocess.run(
        [sys.executable, "-c", PROCESS, where], capture_output=True, text=True, timeout=WAIT_S, env=os.environ
    )


@pytest.mark.parametrize("where", ["load", "compile"])
def test_one_signal_ends_a_server_that_is_not_ready_and_its_registry_in_order(where):
    done = run(where)
    assert (done.stdout, done.returncode) == ("registry stopped, more files allowed\n", 0), done.stderr
    assert '"event": "ended", "reason": "SIGTERM"' in done.stderr


def test_an_error_that_nobody_expects_is_logged_and_ends_the_process_with_code_1():
    """Threads of libraries run: an ordinary exit could crash, or never come (facts/transfer row 16)."""
    done = run("broken")
    assert (done.stdout, done.returncode) == ("", 1), done.stderr
    assert "RuntimeError: broken on purpose" in done.stderr and '"event": "log"' in done.stderr
