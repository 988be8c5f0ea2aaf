"""What a turn of the driver and a step of the scheduler cost must not grow with the requests that wait.

Counted in Python bytecodes, so that the machine does not matter: a scan of all rooms in a loop or a comprehension would
multiply the count by a hundred here.
"""

import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FEW, MANY = 10, 1000


@pytest.fixture(scope="module")
def crowds():
    paths = [str(HERE.parents[1] / "benchmarks"), str(HERE.parent / "sched")]
    sys.path[:0] = paths
    try:
        from bench_rooms import Crowd
        from sched_opcodes import opcodes
    finally:
        for path in paths:
            sys.path.remove(path)
    made = {n: Crowd() for n in (FEW, MANY)}
    for n, crowd in made.items():
        crowd.fill(n)
        assert crowd.waiting == n - 1
    return made, opcodes


@pytest.mark.parametrize("what", ["beat", "come_and_go", "release"])
def test_a_turn_costs_the_same_however_many_wait(crowds, what):
    made, opcodes = crowds
    counts = {}
    for n, crowd in made.items():
        most = defaultdict(int)

        def measure(name, call, most=most):
            most[name] = max(most[name], opcodes(call))

        for _ in range(5):
            getattr(crowd, what)(measure)
        counts[n] = dict(most)
    assert counts[FEW].keys() == counts[MANY].keys() and counts[FEW]
    for name, few in counts[FEW].items():
        assert counts[MANY][name] <= 1.5 * few + 50, (name, few, counts[MANY][name])
