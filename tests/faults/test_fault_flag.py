"""The fault socket exists where its flag says so, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdjax.core.errors import ConfigError
from pdjax.faults.port import FaultPort, Watch
from pdjax.serve.args import ServeArgs

IMPORTS = "import sys, pdjax.serve.process; print([m for m in sys.modules if m.startswith('pdjax.faults')])"


def test_a_server_without_the_flag_does_not_even_import_it():
    told = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=100)
    assert told.stdout.strip() == "[]", told.stderr[-1000:]


def test_a_server_without_pd_has_no_faults():
    with pytest.raises(ConfigError, match="fault-socket without a mode"):
        ServeArgs(model="tiny", fault_socket="x.sock").check()


def test_a_socket_that_cannot_be_made_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        FaultPort(str(tmp_path / "nowhere" / "x.sock"), "p0", b"").start()


def test_only_its_user_may_connect(tmp_path):
    path = tmp_path / "x.sock"
    port = FaultPort(str(path), "p0", b"")
    port.start()
    try:
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        port.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ({"event": "failed", "room": 7}, True),
        ({"event": "failed", "room": "7"}, True),
        ({"event": "failed", "room": 8}, False),
        ({"event": "failed"}, False),
        ({"event": "failed", "room": 7, "role": "receiver"}, False),  # the message of that name, to the table
        ({"event": "landed", "room": 7}, False),
    ],
)
def test_a_watch_sees_the_milestone_of_its_room(line, seen):
    assert Watch("failed", 7, "").sees(line) == seen
