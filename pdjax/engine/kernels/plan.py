"""Host-side plan of a page move: which page ids a kernel may be given, and how they are padded to a bucket.

A device kernel cannot refuse: an id out of range is clamped to some other page, and two rows with one destination
leave whichever came last (both measured). So every id is checked here, on the host, before anything is dispatched.
A kernel that copies runs of pages gets them from ``copy_plan``. Must never import JAX or look at an array's content.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from pdjax.core.pools import Part, PoolTransferSpec, page_bucket, plan_parts

RESERVED_PAGE = 0  # holds what belongs to nobody: padding tokens and padding rows are written there

# Three int32 a page of the largest plan lie in a TPU core's 1 MiB of scalar memory (facts/kernels §1).
MAX_BUCKET = 65_536  # pages

Ids = npt.NDArray[np.int32]
# (layer, layer_stop, page, page_stop) of each part of a program: what it is specialised for, beside the shapes.
Layout = tuple[tuple[int, int, int, int], ...]


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
        twice = min(page for page, n in Counter(ids).items() if n > 1)
        raise PlanError(
            f"destination page {twice} is listed more than once: its content would depend on the device"
        )
    return _padded(ids, RESERVED_PAGE)


@dataclass(frozen=True)
class CopyPlan:
    """A move of one pool's pages as runs of neighbours, for a kernel that is compiled once a bucket.

    Run k copies length[k] pages between pool[k]… of a layer and row packed[k]… of the bucket; all three are int32
    [bucket], zero beyond the last run. A run lies within one part: those of part i are first[i] … stop[i] (int32
    [parts]).
    """

    pool: Ids
    packed: Ids
    length: Ids
    first: Ids
    stop: Ids

    @property
    def words(self) -> Ids:
        """All of it as one int32 vector, the form in which a kernel is given it: one transfer to the device."""
        return np.concatenate([self.pool, self.packed, self.length, self.first, self.stop])


def copy_plan(ids: Ids, parts: Sequence[Part], *, keep_reserved: bool) -> CopyPlan:
    """The runs of bucketed ``ids`` within the page ranges of one pool's ``parts``.

    keep_reserved: whether rows of the reserved page are copied, too. A gather sends every row of the bucket; a
    scatter leaves padding out: copies into one page at the same time would be a race. Raises PlanError when the parts
    carry another number of pages than ids has.
    """
    check_bucket(ids, parts)
    live = np.full(len(ids), True) if keep_reserved else ids != RESERVED_PAGE
    begins = live.copy()
    begins[1:] &= ~live[:-1] | (ids[1:] != ids[:-1] + 1)
    for cut in {part.page for part in parts}:
        begins[cut] = live[cut]
    starts = np.flatnonzero(begins)
    pool, packed, length = np.zeros((3, len(ids)), np.int32)
    pool[: len(starts)], packed[: len(starts)] = ids[starts], starts
    length[: len(starts)] = np.bincount(np.cumsum(begins)[live] - 1, minlength=len(starts))
    pages = np.array([(part.page, part.page_stop) for part in parts], np.int32)
    first, stop = np.searchsorted(starts, pages.T).astype(np.int32)
    return CopyPlan(pool, packed, length, first, stop)


def by_pool(parts: Sequence[Part]) -> Iterator[tuple[int, list[Part]]]:
    """(pool, its parts) in the order in which they are stated: parts of one pool follow each other."""
    for pool, group in groupby(parts, key=lambda part: part.pool):
        yield pool, list(group)


def layout_of(parts: Sequence[Part], first: int = 0) -> Layout:
    """The layout of one pool's parts, with layers counted from ``first``."""
    return tuple((p.layer - first, p.layer_stop - first, p.page, p.page_stop) for p in parts)


def check_bucket(ids: Ids, parts: Sequence[Part]) -> None:
    """Raise PlanError unless one pool's parts carry as many pages as ``ids`` has: the rest would be left out in silence."""
    carried = max((part.page_stop for part in parts), default=0)
    if carried != len(ids):
        raise PlanError(f"the plan has {len(ids)} pages but the packed arrays carry {carried}")


def check_arrays(parts: Sequence[Part], arrays: Sequence[Any]) -> None:
    """Raise PlanError unless each array has the shape and the dtype that its part states."""
    for part, array in zip(parts, arrays, strict=True):
        if tuple(array.shape) != tuple(part.shape) or str(array.dtype) != part.dtype:
            raise PlanError(
                f"part {part.chunk} of pool {part.pool} is stated as {part.dtype}{list(part.shape)} "
                f"but its array is {array.dtype}{list(array.shape)}"
            )


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
    if len(pages) > MAX_BUCKET:
        raise PlanError(f"{len(pages)} {what} pages are more than the {MAX_BUCKET} of the largest plan")
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
