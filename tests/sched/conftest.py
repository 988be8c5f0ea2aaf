"""The pair of schedulers that the PD tests drive. Another manager joins in by another ``make_pair``."""

from __future__ import annotations

import pytest
from sched_pair import Pair


@pytest.fixture
def make_pair():
    return Pair
