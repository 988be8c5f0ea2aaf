"""The worker processes of the hardware suite, on the CPU: what they said is kept, and none outlives the suite."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import tpu_hardware
import tpu_suite
import tpu_worker
from tpu_hardware import WORKER, Hardware, lifeline, worker_command
from tpu_suite import PAGES, Suite

# Each test starts processes of its own, which on a busy machine takes its time.
pytestmark = pytest.mark.timeout(400)

CPU = Hardware("cpu", "cpu", 1, {})
ENDS_WITHIN_S = 60.0

SLOW = """
import sys
print('{"figure": {"check": "x", "name": "gather", "value": 2.5, "unit": "GB/s"}}\\n{"figure": {"che', end="", flush=True)
sys.stdin.read()
"""


def test_a_check_that_times_out_keeps_the_figures_that_it_has_printed(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(SLOW)
    monkeypatch.setattr(tpu_hardware, "WORKER", worker)
    monkeypatch.setattr(tpu_suite, "CHECK_TIMEOUT_S", 5.0)
    suite = Suite(CPU, "rehearsal", tmp_path)
    outcome = suite.run(PAGES[1])
    assert (outcome.status, outcome.detail) == ("failed", "did not end within 5 s")
    assert "| pages-rate | gather | 2.5 GB/s | – | – |" in suite.report.to_markdown()


def test_a_worker_is_held_by_its_lifeline_alone(tmp_path, monkeypatch):
    """It waits as long as the suite is there and needs no word from it."""
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; print(sys.stdin.read() == '')")
    monkeypatch.setattr(tpu_hardware, "WORKER", worker)
    with lifeline() as stdin:
        process = subprocess.Popen(worker_command(), stdin=stdin, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    assert process.communicate(timeout=ENDS_WITHIN_S) == ("True\n", None)


PARENT = """
import pathlib, sys
from tpu_hardware import Hardware
from tpu_suite import HOSTS, Suite
suite = Suite(Hardware("cpu", "cpu", 1, {}), "rehearsal", pathlib.Path("."), peer=sys.argv[1])
if suite.peer:
    suite.run(HOSTS)
with suite.offering(suite.environ("0")) as address:
    print(address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent():
    """Starts a suite in a process of its own."""
    started = []

    def start(peer=""):
        path = os.pathsep.join([str(WORKER.parent), *sys.path])
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PARENT, peer],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(connection):
    """The process behind it: its kernel closes it, with a reset if something was unread."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_check_ends_with_a_suite_that_is_killed(parent):
    """In the middle of it: the worker has asked, and waits for its peer's answer."""
    with socket.create_server(("127.0.0.1", 0)) as peer:
        suite = parent(f"127.0.0.1:{peer.getsockname()[1]}")
        peer.settimeout(300)
        worker, _ = peer.accept()
        with worker:
            worker.settimeout(ENDS_WITHIN_S)
            assert b"describe" in worker.recv(100)
            suite.send_signal(signal.SIGKILL)
            assert ends(worker)


def test_an_offering_process_ends_with_a_suite_that_is_killed(parent):
    suite = parent()
    host, port = suite.stdout.readline().split(":")
    with socket.create_connection((host, int(port)), timeout=ENDS_WITHIN_S) as worker:
        suite.send_signal(signal.SIGKILL)
        assert ends(worker)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nonsense", "--offer: address 'nonsense' must be ip:port"),
        ("127.0.0.1:99999", "--offer: address '127.0.0.1:99999' must be ip:port"),
        (
            "somewhere:0",
            "--offer: address 'somewhere:1' has no numeric ip",
        ),
        ("192.0.2.1:0", "--offer 192.0.2.1:0: Cannot assign requested address"),
        ("0.0.0.0:0", "host 0.0.0.0 is a wildcard"),
        ("", "--offer: address '' must be ip:port"),
    ],
)
def test_an_address_that_cannot_be_offered_is_one_line_and_code_2(monkeypatch, capsys, where, said):
    monkeypatch.setattr(sys, "argv", ["tpu_worker.py", "--offer", where])
    assert tpu_worker.main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    "call", [[], ["--check", "transfer,pages"], ["--describe", "--offer", "127.0.0.1:0"]]
)
def test_a_worker_does_one_thing(monkeypatch, capsys, call):
    monkeypatch.setattr(sys, "argv", ["tpu_worker.py", *call])
    with pytest.raises(SystemExit) as ended:
        tpu_worker.main()
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err
