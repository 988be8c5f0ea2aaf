"""Where a request's pages come from: the interface of a prefix cache, and ChunkCache, which shares nothing.

The scheduler takes and gives back pages only through BasePrefixCache, so that RadixCache can take ChunkCache's place.
Must never touch the pools or know what a request is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pdjax.sched.pages import PageAllocator


@dataclass(frozen=True)
class PrefixMatch:
    """Pages that hold the KV of the first n_tokens tokens of a prompt already (a multiple of the page size)."""

    pages: tuple[int, ...] = ()
    n_tokens: int = 0


@dataclass(frozen=True)
class Acquired:
    """A page table: its first cached_tokens positions need no prefill, and their pages are only read."""

    pages: list[int]
    cached_tokens: int


class BasePrefixCache(ABC):
    """What a scheduler needs of a cache. One token (an attempt) holds one page table at a time."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.evicted_pages = 0  # since the start, flushed ones included

    @abstractmethod
    def match_prefix(self, prompt_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix; always shorter than the prompt, whose last token is computed anew."""

    @abstractmethod
    def acquire(
        self, token: int, prompt_ids: Sequence[int], n_pages: int, max_cached_tokens: int | None = None
    ) -> Acquired | None:
        """A page table of n_pages for token, the matched prefix first; None: not enough pages now.

        n_pages holds at least the prompt. max_cached_tokens: at most so many tokens are taken from the cache (a request
        that wants logprobs of its prompt must have computed them). Raises PageError if token holds a table already.
        """

    @abstractmethod
    def insert(self, token: int, kv_ids: Sequence[int]) -> None:
        """Token's first pages hold the KV of kv_ids, the whole history from position 0: others may read it from now on.

        Raises PageError if token holds nothing.
        """

    @abstractmethod
    def release(self, token: int, kv_ids: Sequence[int]) -> None:
        """End token's hold. kv_ids: the tokens whose KV its pages hold rightly; a cache may keep those pages.

        Empty when the content cannot be trusted. Raises PageError if token holds nothing.
        """

    @abstractmethod
    def flush(self) -> int:
        """Drop what is cached and held by no request; returns how many pages became free."""

    @abstractmethod
    def available_pages(self) -> int:
        """Pages that acquire could give now, evictable ones included."""

    @property
    @abstractmethod
    def cached_pages(self) -> int:
        """Pages that the cache holds, whether a request reads them now or not."""

    def owns(self, token: int, pages: Sequence[int]) -> bool:
        """Token may write these pages now."""
        return self.allocator.owns(token, pages)

    def capacity(self) -> int:
        """Pages that one request could ever get."""
        return self.allocator.capacity

    def check(self) -> None:
        """Raises PageError when the bookkeeping contradicts itself. Costs the size of the pool: for tests."""
        self.allocator.check()


class ChunkCache(BasePrefixCache):
    """Pages live and die with their request; a look-up always misses (RFC-2 §5.4, §6.3: D's cache)."""

    def match_prefix(self, prompt_ids: Sequence[int]) -> PrefixMatch:
        return PrefixMatch()

    def acquire(
        self, token: int, prompt_ids: Sequence[int], n_pages: int, max_cached_tokens: int | None = None
    ) -> Acquired | None:
        pages = self.allocator.alloc(n_pages, token)
        return None if pages is None else Acquired(pages, 0)

    def insert(self, token: int, kv_ids: Sequence[int]) -> None:
        """Nothing is shared."""

    def release(self, token: int, kv_ids: Sequence[int]) -> None:
        self.allocator.free(token)

    def flush(self) -> int:
        return 0

    def available_pages(self) -> int:
        return self.allocator.free_pages

    @property
    def cached_pages(self) -> int:
        return 0
