"""The hardware suite. Only `make tpu` runs it: a plain run of the tests leaves out what is marked tpu."""

import os
from pathlib import Path

import pytest
from tpu_hardware import tpu_of_this_machine
from tpu_suite import CHECKS, PEER_VARIABLE, Suite

pytestmark = [pytest.mark.tpu, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """One run with one report, written to tpu-report in the current folder."""
    found, why = tpu_of_this_machine()
    if found is None:
        pytest.skip(why)
    suite = Suite(found, "full", tmp_path_factory.mktemp("logs"), peer=os.environ.get(PEER_VARIABLE, ""))
    yield suite
    print("\nwritten to", *suite.report.write(Path.cwd() / "tpu-report"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_this_hardware(suite, check):
    outcome = suite.run(check)
    if outcome.status == "not run":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", outcome.detail
