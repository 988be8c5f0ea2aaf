from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pdjax.sched.chunk_cache import ChunkCache, PrefixMatch
from pdjax.sched.pages import PageAllocator, PageError


def test_page_0_is_never_given():
    allocator = PageAllocator(5)
    pages = allocator.alloc(4, 1)
    assert sorted(pages) == [1, 2, 3, 4]
    assert allocator.alloc(1, 2) is None
    assert allocator.free_pages == 0 and allocator.used_pages == allocator.capacity == 4


def test_alloc_is_all_or_nothing():
    allocator = PageAllocator(5)
    allocator.alloc(2, 1)
    assert allocator.alloc(3, 2) is None
    assert allocator.free_pages == 2
    with pytest.raises(PageError, match="token 2 owns no pages"):
        allocator.free(2)
    allocator.check()


def test_double_and_foreign_frees_raise():
    allocator = PageAllocator(5)
    allocator.alloc(2, 7)
    assert allocator.free(7) == 2
    with pytest.raises(PageError, match="freed twice"):
        allocator.free(7)
    with pytest.raises(PageError, match="never taken"):
        allocator.free(99)
    allocator.check()
    assert allocator.free_pages == 4


def test_a_token_takes_pages_once():
    allocator = PageAllocator(9)
    allocator.alloc(2, 7)
    with pytest.raises(PageError, match="owns 2 pages already"):
        allocator.alloc(1, 7)
    with pytest.raises(PageError, match="at least 1"):
        allocator.alloc(0, 8)
    with pytest.raises(ValueError, match="page 0 is reserved"):
        PageAllocator(1)


def test_owns_means_every_page_and_now():
    allocator = PageAllocator(9)
    mine, other = allocator.alloc(2, 1), allocator.alloc(2, 2)
    assert allocator.owns(1, mine) and allocator.owns(1, mine[:1])
    assert not allocator.owns(1, [*mine, other[0]])
    assert not allocator.owns(1, []) and not allocator.owns(1, [0])
    allocator.free(1)
    assert not allocator.owns(1, mine)
    allocator.alloc(2, 3)  # the same pages, another owner
    assert not allocator.owns(1, mine) and allocator.owns(3, mine)


def test_a_shared_page_is_free_when_its_last_holder_is_gone():
    seen = []
    allocator = PageAllocator(9, lambda *change: seen.append((*change[:2], list(change[2]))))
    pages = allocator.alloc(3, 1)
    allocator.share(2, pages[:2])
    assert not allocator.owns(1, pages) and not allocator.owns(2, pages[:2]) and allocator.owns(1, pages[2:])
    assert [allocator.holders(page) for page in [*pages, 8]] == [2, 2, 1, 0]
    assert allocator.free(1) == 3 and allocator.free_pages == 6
    assert allocator.owns(2, pages[:2]) and allocator.held(2) == tuple(pages[:2])
    allocator.give_up(2, pages[:1])
    assert allocator.free_pages == 7 and allocator.held(2) == (pages[1],)
    allocator.free(2)
    assert allocator.free_pages == allocator.capacity and allocator.held(2) == ()
    a, b, c = pages
    assert seen == [
        ("pages_taken", 1, [a, b, c]), ("pages_shared", 2, [a, b]), ("pages_freed", 1, [a, b, c]),
        ("pages_freed", 2, [a]), ("pages_freed", 2, [b]),
    ]  # fmt: skip
    allocator.check()


def test_wrong_shares_raise_and_change_nothing():
    allocator = PageAllocator(9)
    [mine], [free] = allocator.alloc(1, 1), allocator.alloc(1, 2)
    allocator.free(2)
    for token, page, why in ((1, mine, "holds already"), (3, free, "is free"), (3, 0, "is free")):
        with pytest.raises(PageError, match=why):
            allocator.share(token, [page])
    for token, page in ((1, free), (3, mine)):
        with pytest.raises(PageError, match="does not hold"):
            allocator.give_up(token, [page])
    allocator.share(3, [])
    allocator.give_up(3, [])
    allocator.check()
    assert allocator.holders(mine) == 1 and allocator.used_pages == 1


@pytest.mark.parametrize("damage", ["lost", "twice", "holder", "count", "extra", "empty"])
def test_check_sees_damage(damage):
    allocator = PageAllocator(9)
    pages = allocator.alloc(3, 1)
    if damage == "lost":
        allocator._free.pop()
    elif damage == "twice":
        allocator._free.append(pages[0])
    elif damage == "holder":
        allocator._held[2] = {pages[0]: None}
    elif damage == "count":
        allocator._holders[pages[0]] = 2
    elif damage == "extra":
        allocator._holders[allocator._free[0]] = 1
    else:
        allocator._held[2] = {}
    with pytest.raises(PageError):
        allocator.check()


@given(st.integers(2, 40), st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=60))
def test_pages_are_conserved(num_pages, steps):
    allocator, live = PageAllocator(num_pages), {}
    for token, (n, free_one) in enumerate(steps):
        if free_one and live:
            victim = min(live)
            assert allocator.free(victim) == len(live.pop(victim))
        pages = allocator.alloc(n, token)
        free = num_pages - 1 - sum(map(len, live.values()))
        assert (pages is None) == (n > free)
        if pages is not None:
            taken = {page for held in live.values() for page in held}
            assert len(set(pages)) == n and not taken & set(pages) and 0 not in pages
            live[token] = pages
        allocator.check()
    for token in live:
        allocator.free(token)
    assert allocator.free_pages == num_pages - 1


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of right and wrong calls: wrong ones raise and change nothing."""

    held = Bundle("held")

    @initialize(num_pages=st.integers(2, 20))
    def begin(self, num_pages):
        self.allocator, self.model, self.tokens = PageAllocator(num_pages), {}, 0

    @rule(target=held, n=st.integers(1, 8))
    def alloc(self, n):
        self.tokens += 1
        pages = self.allocator.alloc(n, self.tokens)
        if pages is not None:
            self.model[self.tokens] = pages
        return self.tokens

    @rule(token=consumes(held))
    def free(self, token):
        if token in self.model:
            assert self.allocator.owns(token, self.model[token])
            self.allocator.free(token)
            del self.model[token]
        with pytest.raises(PageError):
            self.allocator.free(token)

    @rule(token=held, n=st.integers(1, 3))
    def alloc_twice(self, token, n):
        if token in self.model:
            with pytest.raises(PageError):
                self.allocator.alloc(n, token)

    @invariant()
    def sound(self):
        self.allocator.check()
        assert self.allocator.used_pages == sum(map(len, self.model.values()))


TestAllocatorMachine = AllocatorMachine.TestCase


def test_chunk_cache_always_misses_and_gives_pages_back():
    cache = ChunkCache(PageAllocator(9))
    prompt = list(range(10))
    first = cache.acquire(1, prompt, 3)
    assert first.cached_tokens == 0 and len(first.pages) == 3 and cache.owns(1, first.pages)
    cache.release(1, prompt)
    assert cache.match_prefix(prompt) == PrefixMatch((), 0)
    assert cache.available_pages() == cache.capacity() == 8
    assert cache.acquire(2, prompt, 9) is None
    with pytest.raises(PageError):
        cache.release(1, prompt)
