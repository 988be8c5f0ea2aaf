"""Who holds which page of the pool: a free list, and for every page that is taken how many tokens hold it.

A page is free exactly when nobody holds it. A page with one holder is that holder's own and may be written; a page
with several (a shared prefix) is only read. Must never hand out page 0 (padding is written there), never hand out a
page that anybody holds, and never forget a wrong call: freeing twice, or freeing what was never taken, raises
(S1, S3; incidents B16, B36, B43).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PageError(RuntimeError):
    """The program broke the ownership rules: always a bug of the caller, never of a client or a peer."""


class PageAllocator:
    """Pages 1 … num_pages-1 of a pool. For one thread (the scheduler's).

    A token names one attempt of one request, or a prefix cache. A request takes all its pages at once and gives them
    all back at once, because nothing is retracted (protocol §6).
    """

    def __init__(
        self, num_pages: int, on_change: Callable[[str, int, Sequence[int]], None] | None = None
    ) -> None:
        """on_change("pages_taken", "pages_shared" or "pages_freed", token, pages) writes the event log.

        pages_taken: nobody held these pages; pages_shared: somebody does; pages_freed: this token does no more.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} must be at least 2: page 0 is reserved")
        self.num_pages = num_pages
        self._on_change = on_change or (lambda event, token, pages: None)
        # Last freed, first taken: a write into a page that was given back is seen soonest (incident B26).
        self._free = list(range(num_pages - 1, 0, -1))
        self._held: dict[int, dict[int, None]] = {}  # token → its pages, in the order in which it got them
        self._holders: dict[int, int] = {}  # page → how many tokens hold it

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return len(self._holders)

    @property
    def capacity(self) -> int:
        """Pages that can be held at once."""
        return self.num_pages - 1

    def alloc(self, n: int, token: int) -> list[int] | None:
        """n ≥ 1 pages of token's own, or None when fewer are free (then nothing is taken).

        Raises PageError if the token holds pages already.
        """
        if n < 1:
            raise PageError(f"alloc of {n} pages for token {token}: at least 1")
        if token in self._held:
            raise PageError(f"token {token} owns {len(self._held[token])} pages already: free them first")
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._held[token] = dict.fromkeys(pages)
        for page in pages:
            self._holders[page] = 1
        self._on_change("pages_taken", token, pages)
        return pages

    def share(self, token: int, pages: Sequence[int]) -> None:
        """Token holds these pages, too. Raises PageError if nobody holds one of them, or token does already."""
        if not pages:
            return
        held = self._held.get(token, {})
        for page in pages:
            if page in held or page not in self._holders:
                why = "it holds already" if page in held else "is free"
                raise PageError(f"token {token} shares page {page}, which {why}")
        self._held.setdefault(token, held).update(dict.fromkeys(pages))
        for page in pages:
            self._holders[page] += 1
        self._on_change("pages_shared", token, pages)

    def free(self, token: int) -> int:
        """End every hold of token; returns how many there were. Raises PageError if there is none."""
        if token not in self._held:
            raise PageError(f"token {token} owns no pages: freed twice, or never taken")
        pages = self.held(token)
        self.give_up(token, pages)
        return len(pages)

    def give_up(self, token: int, pages: Sequence[int]) -> None:
        """End token's hold of these pages. Raises PageError if it does not hold one of them."""
        if not pages:
            return
        held = self._held.get(token, {})
        for page in pages:
            if page not in held:
                raise PageError(f"token {token} gives up page {page}, which it does not hold")
        if len(pages) == len(held):
            del self._held[token]
        for page in reversed(pages):
            del held[page]
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)
        self._on_change("pages_freed", token, pages)

    def owns(self, token: int, pages: Sequence[int]) -> bool:
        """Token alone holds every one of these pages now: it may write them.

        False for no pages at all: that proves nothing.
        """
        held = self._held.get(token, {})
        return bool(pages) and all(page in held and self._holders[page] == 1 for page in pages)

    def held(self, token: int) -> tuple[int, ...]:
        """The pages that token holds, in the order in which it got them."""
        return tuple(self._held.get(token, ()))

    def holders(self, page: int) -> int:
        """How many tokens hold this page."""
        return self._holders.get(page, 0)

    def check(self) -> None:
        """Every page but 0 is either free or counted by as many tokens as hold it. Raises PageError.

        Costs the size of the pool.
        """
        counted: dict[int, int] = {}
        for pages in self._held.values():
            for page in pages:
                counted[page] = counted.get(page, 0) + 1
        if counted != self._holders:
            wrong = sorted(
                p for p in counted.keys() | self._holders.keys() if counted.get(p) != self.holders(p)
            )
            raise PageError(f"pages {wrong} are held by other numbers of tokens than is counted")
        if sorted([*self._holders, *self._free]) != list(range(1, self.num_pages)):
            raise PageError(
                f"{len(self._holders)} held and {len(self._free)} free pages are not pages 1…{self.capacity}"
            )
        if not all(self._held.values()):
            raise PageError("a token is listed that holds nothing")
