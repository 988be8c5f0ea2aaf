"""One deployment for all tests that leave it unharmed; those that hurt one make their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleets import Deployment
from shims import Shim

TINY = ("--context-length", "512", "--num-pages", "256", "--chunked-prefill-size", "64")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    """2P + 2D + a plain server on the tiny model, with rust and mini over all four and, without a bootstrap port, over one pair.

    One P stages its KV on the host and one does not: every test that goes through both compares them with the plain server.
    """
    with Deployment(
        tmp_path_factory.mktemp("logs"), "tiny", *TINY, prefill=2, decode=2, plain=1, staged=("prefill-1",)
    ) as deployment:
        deployment.start()
        deployment.add_router("rust", "rust")
        deployment.add_router("mini", "mini")
        for kind in ("rust", "mini"):
            deployment.add_router(f"{kind}-1p1d", kind, ["prefill-0"], ["decode-0"], port=None)
        yield deployment


# --request-timeout-secs of the routers in front of the shims. The hasty ones are for tests of that limit, with canned
# workers; a real hand-off must never meet it, however slow the machine is.
PATIENT_S, HASTY_S = 60, 2


@pytest.fixture(scope="session")
def shimmed(fleet):
    """(fleet, P's shim, D's shim): rust and mini see one pair of the fleet through shims, each patient and hasty.

    The hasty rust never tries again.
    """
    shims = {"shim-p": Shim(fleet.url("prefill-0")), "shim-d": Shim(fleet.url("decode-0"))}
    fleet.addresses |= {name: shim.url for name, shim in shims.items()}
    for name, kind, limit_s, options in (
        ("rust-shim", "rust", PATIENT_S, ["--disable-circuit-breaker"]),
        ("rust-hasty", "rust", HASTY_S, ["--disable-circuit-breaker", "--disable-retries"]),
        ("mini-shim", "mini", PATIENT_S, []),
        ("mini-hasty", "mini", HASTY_S, []),
    ):
        limit = ("--request-timeout-secs", str(limit_s))
        fleet.add_router(name, kind, ["shim-p"], ["shim-d"], *limit, *options)
    yield fleet, shims["shim-p"], shims["shim-d"]
    for shim in shims.values():
        shim.close()


@pytest.fixture
def shims(shimmed):
    """The same, with nothing planned and nothing seen yet."""
    for shim in shimmed[1:]:
        shim.reset()
    yield shimmed
    for shim in shimmed[1:]:
        shim.reset()


@pytest.fixture(autouse=True)
def left_free(request):
    """After each test on the shared deployment everything is free."""
    yield
    if {"fleet", "shims"} & set(request.fixturenames):
        request.getfixturevalue("fleet").await_free()


@pytest.fixture(autouse=True, scope="module")
def logged_right(request):
    """After each module the logs so far are right: reading them takes longer the more there is."""
    yield
    if any("fleet" in item.fixturenames for item in request.session.items if item.path == request.path):
        request.getfixturevalue("fleet").check_logs()
