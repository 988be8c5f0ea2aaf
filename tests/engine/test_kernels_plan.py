"""Which page ids a kernel may be given: every refusal has its own message, and padding never touches a live page."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.errors import ConfigError
from pdjax.core.pools import PoolTransferSpec, page_bucket, plan_parts
from pdjax.engine.kernels.mover import make_mover
from pdjax.engine.kernels.plan import RESERVED_PAGE, PlanError, check_parts, gather_ids, scatter_ids

NUM_PAGES = 32
POOL = PoolTransferSpec("kv", "kv", "float32", (NUM_PAGES, 4, 8), 3, 4 * 8 * 4)


@settings(deadline=None)  # a shared machine may stall
@given(st.lists(st.integers(1, NUM_PAGES - 1), min_size=1, unique=True))
def test_ids_are_padded_to_the_bucket(pages: list[int]) -> None:
    n, size = len(pages), page_bucket(len(pages))
    source, destination = gather_ids(pages, NUM_PAGES), scatter_ids(pages, NUM_PAGES)
    assert source.dtype == destination.dtype == np.int32
    assert source.tolist() == pages + [pages[-1]] * (size - n), "only the request's own bytes may be sent"
    assert destination.tolist() == pages + [RESERVED_PAGE] * (size - n), (
        "padding may be written to page 0 only"
    )


def test_a_source_may_repeat_and_may_be_numpy() -> None:
    assert gather_ids(np.array([5, 5, 2]), NUM_PAGES).tolist() == [5, 5, 2]
    assert scatter_ids([np.int64(5), 2], NUM_PAGES).tolist() == [5, 2]


@pytest.mark.parametrize("ids", [gather_ids, scatter_ids])
@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([], "no .* page is given"),
        ([1, NUM_PAGES], "page 32 is out of range: the pool has pages 1 to 31"),
        ([-1], "page -1 is out of range"),
        ([3, 0], "page 0 is reserved"),
        ([1.0], "page 1.0 is not an integer but a float"),
        ([True], "page True is not an integer but a bool"),
        (["1"], "page '1' is not an integer but a str"),
        ([None], "page None is not an integer"),
    ],
)
def test_bad_ids_are_refused(ids: object, pages: list[object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ids(pages, NUM_PAGES)  # type: ignore[operator]


def test_a_duplicate_destination_is_refused() -> None:
    with pytest.raises(PlanError, match="destination page 7 is listed more than once"):
        scatter_ids([1, 7, 3, 7], NUM_PAGES)


def test_parts_must_be_those_of_the_pages() -> None:
    parts = plan_parts([POOL], 5)
    check_parts([POOL], 5, parts, len(parts))
    summed = [msgspec.structs.replace(part, checksum=9) for part in parts]
    check_parts([POOL], 6, summed, len(parts))  # 5 and 6 share a bucket; a checksum does not matter
    for count, arrays, stated, message in [
        (5, len(parts) + 1, parts, "parts are stated but"),
        (5, 0, (), "need 1 parts but 0 are given"),
        (8, len(parts), parts, "part 0 is .* but 8 pages need"),
        (5, len(parts), [msgspec.structs.replace(parts[0], dtype="bfloat16")], "bfloat16"),
        (5, len(parts), [msgspec.structs.replace(parts[0], layer=1)], "part 0 is"),
    ]:
        with pytest.raises(PlanError, match=message):
            check_parts([POOL], count, stated, arrays)


def test_an_unknown_mover_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown page mover 'fast'"):
        make_mover("fast")
