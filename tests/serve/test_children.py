"""Children: ready lines, forwarded output, and an end within a bound."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pdjax.serve import children
from pdjax.serve.children import Child, ChildError, end_all
from pdjax.serve.guardian import Guardian
from pdjax.serve.ready import parse_ready, print_ready

WAIT_S = 60.0


class Lines:
    def __init__(self):
        self.got, self.changed = [], threading.Condition()

    def __call__(self, line):
        with self.changed:
            self.got.append(line)
            self.changed.notify_all()

    def wait(self, text):
        with self.changed:
            assert self.changed.wait_for(lambda: any(text in line for line in self.got), WAIT_S), self.got


def start(code, name="child"):
    lines = Lines()
    return Child(name, [sys.executable, "-u", "-c", code], os.environ, lines), lines


def test_the_ready_line_goes_around(capsys):
    print_ready(url="http://127.0.0.1:5", role="prefill", zmq="", bootstrap=None)
    line = capsys.readouterr().out.strip()
    assert parse_ready(line) == {"pdjax": "ready", "url": "http://127.0.0.1:5", "role": "prefill"}


@pytest.mark.parametrize(
    "line", ["", "ready", '{"pdjax"', '{"pdjax": "ready"}', '{"pdjax": "no", "url": "x"}', "[]"]
)
def test_other_lines_are_not_ready(line):
    assert parse_ready(line) is None


def test_output_is_forwarded_with_the_name_and_the_ready_line_is_kept():
    code = """
import sys
from pdjax.serve.ready import print_ready
print("out"); print("err", file=sys.stderr); print_ready(url="http://x"); input()
"""
    child, lines = start(code, "p-0")
    for text in ("[p-0] out", "[p-0] err", "[p-0] {"):
        lines.wait(text)
    assert child.join(WAIT_S), "stdin is closed, so input() ends it"
    assert child.ready == {"pdjax": "ready", "url": "http://x"}


@pytest.mark.parametrize(
    ("code", "says", "exit_code"),
    [
        ("raise SystemExit(3)", "p-0 ended with code 3", 1),
        ("raise SystemExit(2)", "p-0 ended with code 2", 2),
        ("import os; os.kill(os.getpid(), 9)", "p-0 was ended by SIGKILL", 1),
    ],
)
def test_an_ended_child_says_how(code, says, exit_code):
    child, _ = start(code, "p-0")
    assert child.join(WAIT_S)
    with pytest.raises(ChildError, match=says) as caught:
        child.check()
    assert caught.value.code == exit_code


def test_a_child_that_ends_by_itself_is_not_forced():
    child, lines = start("import signal; print('up'); signal.pause()")
    lines.wait("up")
    child.check()
    assert end_all([child], WAIT_S) == []
    assert child.process.returncode == -15


def test_a_child_that_still_drains_is_asked_once_more():
    code = """
import signal
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1) or len(asked) > 1 and exit(0))
print("up")
while True:
    signal.pause()
"""
    child, lines = start(code)
    lines.wait("up")
    assert end_all([child], 0.5) == []
    assert child.process.returncode == 0


def test_a_deaf_child_and_its_own_child_are_killed():
    code = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); print('inner up', flush=True); signal.pause()"])
print("inner", inner.pid); signal.pause()
"""
    child, lines = start(code)
    lines.wait("inner up")
    lines.wait("[child] inner ")
    assert end_all([child], 0.2) == ["child"]
    # The pipe ends only when the last process that holds it is gone.
    for reader in child._readers:
        reader.join(WAIT_S)
        assert not reader.is_alive()


PARENT = """
import os, sys, time
from pdjax.serve.children import Child
over = Child("over", [sys.executable, "-c", "pass"], os.environ, print)
assert over.join(60)
child = Child("child", [sys.executable, "-c", "import time; time.sleep(600)"], os.environ, print)
print("group", child.process.pid, "over", over.process.pid, flush=True)
time.sleep(600)
"""


def gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def test_a_parent_that_is_killed_leaves_no_child():
    parent = subprocess.Popen([sys.executable, "-u", "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent.stdout as lines:
        words = next(line for line in lines if line.startswith("group")).split()
        group, over = int(words[1]), int(words[3])
        assert not gone(group) and gone(over)
        guardians = [p for p in Path("/proc").iterdir() if p.name.isdigit() and parent_of(p) == parent.pid]
        parent.kill()
        parent.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while not (gone(group) and all(gone(int(p.name)) for p in guardians)):
            assert time.monotonic() < deadline, "left behind"
            time.sleep(0.02)


def parent_of(entry):
    try:
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def looks(child):
    while child.alive:
        time.sleep(0.01)


def checks(child):
    with pytest.raises(ChildError, match="ended with code 0"):
        while True:
            child.check()
            time.sleep(0.01)


@pytest.mark.parametrize("notices", [looks, checks, lambda child: child.join(WAIT_S)])
def test_whoever_notices_a_childs_end_has_its_number_forgotten(notices):
    """It may be another process's by the time the guardian ends what is left."""
    child, _ = start("pass")
    assert child.process.pid in children._guardian._groups
    notices(child)
    assert child.process.pid not in children._guardian._groups
    assert child.join(WAIT_S)


def test_a_guardian_that_was_killed_is_replaced_with_all_that_it_watched(monkeypatch):
    guardian, said = Guardian(), []
    guardian.watch(2**30)  # no such group
    first = guardian._process
    first.kill()
    first.wait(WAIT_S)
    monkeypatch.setattr(guardian, "_say", said.append)
    guardian.watch(2**30 + 1)
    assert guardian._process is not first and sorted(said) == [f"+{2**30}", f"+{2**30 + 1}"]
    guardian.forget(2**30)
    guardian.forget(7)
    assert said[2:] == [f"-{2**30}"]
    for process in (first, guardian._process):
        process.stdin.close()
        process.wait(WAIT_S)
