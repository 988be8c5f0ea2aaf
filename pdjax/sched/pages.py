"""Who owns which page of the pool: a free list and one owner (a token) for every page that is taken.

Must never hand out page 0 (padding is written there), never give a page to two owners, and never forget a
wrong call: freeing twice, or freeing what was never taken, raises (S1, S3; incidents B16, B36, B43).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PageError(RuntimeError):
    """The program broke the ownership rules: always a bug of the caller, never of a client or a peer."""


class PageAllocator:
    """Pages 1 … num_pages-1 of a pool. For one thread (the scheduler's).

    A token names one attempt of one request. It takes all its pages at once and gives them all back at once,
    because nothing is retracted (protocol §6).
    """

    def __init__(
        self, num_pages: int, on_change: Callable[[str, int, Sequence[int]], None] | None = None
    ) -> None:
        """on_change("pages_taken" or "pages_freed", token, pages) writes the event log."""
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} must be at least 2: page 0 is reserved")
        self.num_pages = num_pages
        self._on_change = on_change
        # Last freed, first taken: a write into a page that was given back is seen soonest (incident B26).
        self._free = list(range(num_pages - 1, 0, -1))
        self._owned: dict[int, tuple[int, ...]] = {}
        self._owner: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return len(self._owner)

    @property
    def capacity(self) -> int:
        """Pages that can be owned at once."""
        return self.num_pages - 1

    def alloc(self, n: int, token: int) -> list[int] | None:
        """n ≥ 1 pages for token, or None when fewer are free (then nothing is taken).

        Raises PageError if the token owns pages already.
        """
        if n < 1:
            raise PageError(f"alloc of {n} pages for token {token}: at least 1")
        if token in self._owned:
            raise PageError(f"token {token} owns {len(self._owned[token])} pages already: free them first")
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._owned[token] = tuple(pages)
        for page in pages:
            self._owner[page] = token
        if self._on_change is not None:
            self._on_change("pages_taken", token, pages)
        return pages

    def free(self, token: int) -> int:
        """Take back every page of token; returns how many. Raises PageError if it owns none."""
        pages = self._owned.pop(token, None)
        if pages is None:
            raise PageError(f"token {token} owns no pages: freed twice, or never taken")
        for page in pages:
            del self._owner[page]
        self._free.extend(reversed(pages))
        if self._on_change is not None:
            self._on_change("pages_freed", token, pages)
        return len(pages)

    def owns(self, token: int, pages: Sequence[int]) -> bool:
        """Every one of these pages belongs to token now. False for no pages at all: that proves nothing."""
        return bool(pages) and all(self._owner.get(page) == token for page in pages)

    def check(self) -> None:
        """Every page but 0 is free or has exactly one owner. Raises PageError. Costs the size of the pool."""
        owned = [page for pages in self._owned.values() for page in pages]
        if sorted(owned + self._free) != list(range(1, self.num_pages)):
            raise PageError(
                f"{len(owned)} owned and {len(self._free)} free pages are not pages 1…{self.capacity}"
            )
        if any(self._owner.get(page) != token for token, pages in self._owned.items() for page in pages):
            raise PageError("a page is listed under one token and owned by another")
        if len(self._owner) != len(owned):
            raise PageError(f"{len(self._owner)} pages have an owner, {len(owned)} are listed")
