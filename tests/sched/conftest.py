"""The pairs of schedulers that the PD tests drive."""

from __future__ import annotations

import pytest
from sched_pair import Pair
from sched_real_pair import RealPair


@pytest.fixture
def make_pair():
    """Over the fake manager, whose every event the test orders."""
    return Pair


@pytest.fixture(params=[Pair, RealPair], ids=["fake", "real"])
def make_any_pair(request):
    """Over either manager: for tests that only submit, step and settle."""
    return request.param
