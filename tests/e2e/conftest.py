"""One deployment for all tests that leave it unharmed; those that hurt one make their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleets import Deployment

TINY = ("--context-length", "512", "--num-pages", "256", "--chunked-prefill-size", "64")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    """2P + 2D + a plain server on the tiny model, with rust and mini over all four and over one pair."""
    with Deployment(
        tmp_path_factory.mktemp("logs"), "tiny", *TINY, prefill=2, decode=2, plain=1
    ) as deployment:
        deployment.start()
        deployment.add_router("rust", "rust")
        deployment.add_router("mini", "mini")
        deployment.add_router("rust-1p1d", "rust", ["prefill-0"], ["decode-0"])
        deployment.add_router("mini-1p1d", "mini", ["prefill-0"], ["decode-0"])
        yield deployment


@pytest.fixture(autouse=True)
def left_free(request):
    """After each test on the shared deployment: everything is free, and the logs so far are right."""
    yield
    if "fleet" in request.fixturenames:
        fleet = request.getfixturevalue("fleet")
        fleet.await_free()
        fleet.check_logs()
