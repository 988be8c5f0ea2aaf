"""Host-side plan of a page move: which page ids a kernel may be given, and how they are padded to a bucket.

A device kernel cannot refuse: an id out of range is clamped to some other page, and two rows with one destination
leave whichever came last (both measured). So every id is checked here, on the host, before anything is dispatched.
Must never import JAX or look at an array's content.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdjax.core.pools import Part, PoolTransferSpec, page_bucket, plan_parts

RESERVED_PAGE = 0  # holds what belongs to nobody: padding tokens and padding rows are written there

Ids = npt.NDArray[np.int32]


class PlanError(ValueError):
    """Page ids or packed arrays that a kernel must not be given. Nothing was dispatched, the pools are unchanged."""


def gather_ids(pages: Sequence[int], num_pages: int) -> Ids:
    """Source ids of a gather, int32 [page_bucket(len(pages))], padded with the request's own last page.

    Padding rows are sent to the peer, so they must hold nothing but this request's bytes (core.pools.page_bucket).
    """
    ids = _checked(pages, num_pages, "source")
    return _padded(ids, ids[-1])


def scatter_ids(pages: Sequence[int], num_pages: int) -> Ids:
    """Destination ids of a scatter, int32 [page_bucket(len(pages))], padded with the reserved page.

    Repeating the reserved page is harmless; repeating any other page would leave one of two contents.
    """
    ids = _checked(pages, num_pages, "destination")
    if len(set(ids)) != len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})
        raise PlanError(
            f"destination page {twice[0]} is listed more than once: its content would depend on the device"
        )
    return _padded(ids, RESERVED_PAGE)


def check_parts(
    pools: Sequence[PoolTransferSpec], n_pages: int, parts: Sequence[Part], n_arrays: int
) -> None:
    """Raise PlanError unless ``parts`` are exactly those that carry n_pages pages of ``pools``, one array each."""
    if len(parts) != n_arrays:
        raise PlanError(f"{len(parts)} parts are stated but {n_arrays} arrays are given")
    expected = plan_parts(pools, n_pages)
    if len(parts) != len(expected):
        raise PlanError(f"{n_pages} pages need {len(expected)} parts but {len(parts)} are given")
    for i, (want, got) in enumerate(zip(expected, parts, strict=True)):
        if _place(want) != _place(got):
            raise PlanError(f"part {i} is {_place(got)} but {n_pages} pages need {_place(want)}")


def _place(part: Part) -> tuple[object, ...]:
    """What decides where a part belongs: everything but rank, sharding text and checksum."""
    return (part.pool, part.layer, part.layer_stop, part.page, part.page_stop, tuple(part.shape), part.dtype)


def _checked(pages: Sequence[int], num_pages: int, what: str) -> list[int]:
    if len(pages) == 0:
        raise PlanError(f"no {what} page is given")
    for page in pages:
        if isinstance(page, (bool, np.bool_)) or not isinstance(page, numbers.Integral):
            raise PlanError(f"{what} page {page!r} is not an integer but a {type(page).__name__}")
    ids = [int(page) for page in pages]
    for page in ids:
        if page == RESERVED_PAGE:
            raise PlanError(f"{what} page {RESERVED_PAGE} is reserved for padding and belongs to no request")
        if not 0 < page < num_pages:
            raise PlanError(f"{what} page {page} is out of range: the pool has pages 1 to {num_pages - 1}")
    return ids


def _padded(ids: list[int], filler: int) -> Ids:
    padded = np.full(page_bucket(len(ids)), filler, np.int32)
    padded[: len(ids)] = ids
    return padded
