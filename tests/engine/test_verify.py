"""P's sample of checksums and D's comparison meet: what P has stated, D looks at."""

import itertools

import msgspec
import pytest

from pdjax.core.pools import PoolTransferSpec, plan_parts
from pdjax.engine.jax_transfer.verify import to_check
from pdjax.engine.kernels.checksum import chosen

POOL = PoolTransferSpec("kv", "kv", "float32", (64, 16, 1024), 24, 65536)


def stated(n_pages, mode, turn):
    """Parts as P's runner states them at its hand-off number ``turn``."""
    parts = plan_parts([POOL], n_pages)
    picked = chosen(len(parts), mode, turn)
    return [msgspec.structs.replace(p, checksum=7) if i in picked else p for i, p in enumerate(parts)]


@pytest.mark.parametrize("n_pages", [1, 2, 8, 32])
def test_whatever_p_sampled_is_compared(n_pages):
    for turn, pull_id in itertools.product(range(8), range(8)):
        parts = stated(n_pages, "sampled", turn)
        picked = {i for i, p in enumerate(parts) if p.checksum}
        assert picked
        assert to_check(parts, "sampled", pull_id) == to_check(parts, "all", pull_id) == picked


def test_of_everything_that_p_stated_a_sample_is_compared_in_turn():
    parts = stated(32, "all", 0)
    samples = [to_check(parts, "sampled", pull_id) for pull_id in range(8)]
    assert set().union(*samples) == set(range(len(parts)))
    assert all(0 < len(sample) <= len(parts) // 8 + 1 for sample in samples)
    assert to_check(parts, "all", 3) == set(range(len(parts)))


@pytest.mark.parametrize(("ours", "theirs"), [("off", "all"), ("all", "off"), ("sampled", "off")])
def test_off_on_either_side_compares_nothing(ours, theirs):
    assert to_check(stated(32, theirs, 0), ours, 5) == set()
