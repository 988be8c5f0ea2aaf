"""Which page ids a kernel may be given: every refusal has its own message, and padding never touches a live page."""

from __future__ import annotations

import time
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.pools import Part, PoolTransferSpec, page_bucket, plan_parts
from pdjax.engine.kernels.plan import (
    MAX_BUCKET,
    RESERVED_PAGE,
    PlanError,
    check_arrays,
    check_parts,
    copy_plan,
    gather_ids,
    scatter_ids,
)

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
    # The scheduler waits for the refusal of the largest plan, too: looking each page up in turn took a minute.
    began = time.process_time()
    with pytest.raises(PlanError, match="destination page 7 is listed more than once"):
        scatter_ids([*range(1, MAX_BUCKET), 7], MAX_BUCKET + 1)
    assert time.process_time() - began < 5


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


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Pages of a move, often neighbours, and where its part is cut along them."""
    runs = draw(st.lists(st.tuples(st.integers(1, NUM_PAGES - 1), st.integers(1, 6)), min_size=1, max_size=8))
    pages = [page for first, n in runs for page in range(first, min(first + n, NUM_PAGES))]
    pages = list(dict.fromkeys(pages))
    cuts = draw(st.sets(st.integers(1, page_bucket(len(pages)))))
    return pages, sorted(cuts)


def parts_of(bucket: int, cuts: list[int]) -> list[Part]:
    """Two layers: one part that is cut at ``cuts``, and one whole."""
    edges = [0, *(cut for cut in cuts if cut < bucket), bucket]
    whole = [(0, 1, a, b) for a, b in pairwise(edges)] + [(1, 2, 0, bucket)]
    return [
        Part(0, 0, i, layer, layer_stop, page, stop, (1, stop - page, 4, 8), "float32", (stop - page) * 128)
        for i, (layer, layer_stop, page, stop) in enumerate(whole)
    ]


@settings(deadline=None)
@given(moves(), st.booleans())
def test_runs_copy_each_row_of_a_part_once_and_no_other(
    move: tuple[list[int], list[int]], keep_reserved: bool
) -> None:
    pages, cuts = move
    ids = (gather_ids if keep_reserved else scatter_ids)(pages, NUM_PAGES)
    parts = parts_of(len(ids), cuts)
    plan = copy_plan(ids, parts, keep_reserved=keep_reserved)
    for part, first, stop in zip(parts, plan.first, plan.stop, strict=True):
        copied: dict[int, int] = {}
        for k in range(first, stop):
            assert plan.length[k] > 0
            for i in range(plan.length[k]):
                row = int(plan.packed[k]) + i
                assert row not in copied, "two copies into one row would be a race"
                copied[row] = int(plan.pool[k]) + i
        rows = range(part.page, part.page_stop)
        assert copied == {row: ids[row] for row in rows if keep_reserved or ids[row] != RESERVED_PAGE}
    edges = {part.page for part in parts}
    for k in range(1, max(plan.stop)):
        joined = plan.pool[k] == plan.pool[k - 1] + plan.length[k - 1]
        touching = plan.packed[k] == plan.packed[k - 1] + plan.length[k - 1]
        assert not (joined and touching) or plan.packed[k] in edges, "neighbours travel in one copy"
    assert not plan.length[max(plan.stop) :].any()


def test_a_plan_has_one_shape_a_bucket() -> None:
    parts = parts_of(12, [5])
    one, other = (
        copy_plan(gather_ids(p, NUM_PAGES), parts, keep_reserved=True)
        for p in ([*range(1, 12)], [*range(12, 0, -1)])
    )
    assert one.words.dtype == np.int32 and one.words.shape == other.words.shape == (3 * 12 + 2 * 3,)
    assert one.stop[-1] == 3 and other.stop[-1] == 12


def test_a_plan_must_match_its_packed_arrays() -> None:
    with pytest.raises(PlanError, match="the plan has 4 pages but the packed arrays carry 3"):
        copy_plan(gather_ids([1, 2, 3, 4], NUM_PAGES), parts_of(3, []), keep_reserved=True)
    with pytest.raises(PlanError, match=r"part 2 of pool 0 is stated as .* but its array is"):
        check_arrays(parts_of(2, [1]), [np.zeros((1, 1, 4, 8), np.float32)] * 3)


def test_a_plan_that_no_kernel_can_hold_is_refused() -> None:
    with pytest.raises(PlanError, match="65537 source pages are more than the 65536"):
        gather_ids(range(1, MAX_BUCKET + 2), MAX_BUCKET + 2)
