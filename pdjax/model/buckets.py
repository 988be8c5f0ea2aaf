"""Buckets: the few shapes that programs are compiled for, so that a request's own sizes never cause a compile.

Pure arithmetic on sizes; must never import JAX.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from pdjax.core.errors import ConfigError
from pdjax.core.pools import page_bucket, pages_for


@dataclass(frozen=True)
class Buckets:
    """Ascending sizes. tokens: of a prefill chunk; pages: of a page table; batch: rows of a decode step."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def chunk_tokens(self) -> int:
        """Most tokens that one prefill call takes."""
        return self.tokens[-1]

    @property
    def max_batch(self) -> int:
        return self.batch[-1]

    @property
    def max_pages(self) -> int:
        """Most pages that one request's table holds."""
        return self.pages[-1]

    def prefill_shapes(self, max_tokens: int, page_size: int) -> Iterator[tuple[int, int]]:
        """(token bucket, page bucket) of every chunk that a prompt of at most max_tokens can meet."""
        for i, t in enumerate(self.tokens):
            fewest = 1 if i == 0 else self.tokens[i - 1] + 1
            if fewest > max_tokens:
                return
            for p in self._page_buckets(pages_for(fewest, page_size), pages_for(max_tokens, page_size)):
                yield t, p

    def decode_shapes(self, max_tokens: int, page_size: int) -> Iterator[tuple[int, int]]:
        """(batch bucket, page bucket) of every decode step of requests of at most max_tokens."""
        for b in self.batch:
            for p in self._page_buckets(1, pages_for(max_tokens, page_size)):
                yield b, p

    @staticmethod
    def transfer_shapes(max_tokens: int, page_size: int) -> list[int]:
        """Page buckets of every gather and scatter of a prompt of at most max_tokens."""
        return sorted({page_bucket(n) for n in range(1, pages_for(max_tokens, page_size) + 1)})

    def _page_buckets(self, fewest: int, most: int) -> tuple[int, ...]:
        return self.pages[bisect_left(self.pages, fewest) : bisect_left(self.pages, most) + 1]


def bucket(sizes: tuple[int, ...], n: int, what: str) -> int:
    """Smallest of ascending ``sizes`` that holds n. ValueError when none does: the caller must not ask for it."""
    i = bisect_left(sizes, n)
    if n < 1 or i == len(sizes):
        raise ValueError(f"{what}: {n} is not between 1 and {sizes[-1]}")
    return sizes[i]


def make_buckets(*, chunk_tokens: int, max_batch: int, max_pages: int) -> Buckets:
    """Powers of two: tokens from 16, batch from 2, pages by fours from 8, each up to the given limit exactly.

    A decode batch of one row is never used: XLA CPU compiles it 8 to 160 times slower (facts/model §0.3).
    """
    for name, value in (("chunk_tokens", chunk_tokens), ("max_batch", max_batch), ("max_pages", max_pages)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    return Buckets(
        tokens=_steps(16, 2, max(chunk_tokens, 16)),
        pages=_steps(8, 4, max_pages),
        batch=_steps(2, 2, max(max_batch, 2)),
    )


def _steps(first: int, ratio: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= ratio
    return (*sizes, last)
