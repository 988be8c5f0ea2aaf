"""A campaign that is told to end ends the processes that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PLAIN = Path(__file__).parent.parent / "traces" / "plain.json"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_campaign_that_is_told_to_end_leaves_no_process_behind():
    campaign = subprocess.Popen(
        [sys.executable, "-m", "pdjax.campaign", "files", str(PLAIN)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while (
            len(found := children_of(campaign.pid)) < 5
        ):  # the guardian, the reference, the registry, P and D
            assert campaign.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        campaign.send_signal(signal.SIGTERM)
        assert campaign.wait(60) == 128 + signal.SIGTERM
    finally:
        campaign.kill()
    deadline = time.monotonic() + 20
    while left := [child for child in found if is_there(child)]:  # the guardian ends after its parent
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
