"""RadixCache: examples, and any order of calls against a dict of token prefixes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pdjax.core.pools import pages_for
from pdjax.sched.chunk_cache import PrefixMatch
from pdjax.sched.pages import PageAllocator, PageError
from pdjax.sched.radix_cache import CACHE_TOKEN, RadixCache


def make(num_pages=17, page_size=4, on_change=None):
    return RadixCache(PageAllocator(num_pages, on_change), page_size)


def fill(cache, token, ids, n_pages=None):
    """A request that comes, is computed, and ends; how many of its tokens were cached."""
    got = cache.acquire(token, ids, n_pages or pages_for(len(ids), cache.page_size))
    cache.release(token, ids)
    cache.check()
    return got.cached_tokens


def test_a_prefix_is_found_by_whole_pages_and_never_to_the_last_token():
    cache, ids = make(), list(range(100, 110))
    assert fill(cache, 1, ids) == 0
    assert cache.cached_pages == 2  # of 10 tokens, 8 fill pages of 4
    assert cache.match_prefix(ids).n_tokens == 8
    for n, cached in ((10, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        assert cache.match_prefix(ids[:n]).n_tokens == cached, n
    assert cache.match_prefix([*ids[:7], 1, 2, 3]).n_tokens == 4
    assert cache.match_prefix([1, *ids]) == PrefixMatch((), 0)
    assert cache.match_prefix([]) == PrefixMatch((), 0)


def test_two_requests_read_the_same_pages_and_write_their_own():
    cache, ids = make(), list(range(8))
    fill(cache, 1, ids)
    a = cache.acquire(2, [*ids, 50, 51], 3)
    b = cache.acquire(3, [*ids, 60], 4)
    assert a.cached_tokens == b.cached_tokens == 8
    assert a.pages[:2] == b.pages[:2] and not set(a.pages[2:]) & set(b.pages[2:])
    assert cache.owns(2, a.pages[2:]) and not cache.owns(2, a.pages[:1]) and not cache.owns(3, a.pages[2:])
    cache.release(2, [*ids, 50, 51])
    assert cache.owns(3, b.pages[2:]) and cache.available_pages() == 16 - 4
    cache.release(3, ())
    assert cache.available_pages() == 16 and cache.cached_pages == 2
    cache.check()


def test_at_most_so_many_tokens_are_taken_from_the_cache():
    cache, ids = make(), list(range(13))
    fill(cache, 1, ids)
    for limit, cached in ((None, 12), (100, 12), (12, 12), (11, 8), (4, 4), (3, 0), (0, 0)):
        got = cache.acquire(2, ids, 4, limit)
        assert got.cached_tokens == cached
        cache.release(2, ids)
        cache.check()
    assert cache.cached_pages == 3  # what was computed again was there already: its pages went back


def test_pages_are_shared_only_once_they_are_computed():
    cache, ids = make(), list(range(12))
    cache.acquire(1, ids, 4)
    assert cache.match_prefix(ids).n_tokens == 0
    cache.insert(1, ids[:6])  # a chunk of 6 tokens completes one page
    assert cache.match_prefix(ids).n_tokens == 4
    cache.insert(1, ids)
    cache.insert(1, ids)
    assert cache.match_prefix([*ids, 1]).n_tokens == 12 and cache.cached_pages == 3
    cache.check()
    cache.release(1, ())  # whatever went wrong after that: what was right stays right
    assert cache.match_prefix([*ids, 1]).n_tokens == 12 and cache.available_pages() == 16
    fill(cache, 2, [7] * 9, 3)
    cache.acquire(3, [8] * 9, 3)
    cache.release(3, ())
    assert cache.match_prefix([8] * 9).n_tokens == 0  # nothing of it can be trusted


def test_the_second_of_two_equal_prefills_keeps_its_own_pages_until_its_end():
    cache, ids = make(), list(range(9))
    a, b = cache.acquire(1, ids, 3), cache.acquire(2, ids, 3)
    cache.insert(1, ids)
    cache.insert(2, ids)
    cache.check()
    assert cache.match_prefix(ids).pages == tuple(a.pages[:2])
    assert cache.owns(2, b.pages) and cache.cached_pages == 2
    cache.release(1, ids)
    assert cache.available_pages() == 16 - 3 - 2  # the second holds its copy and the path that it is on
    cache.release(2, [*ids, 9, 10, 11])
    assert cache.match_prefix([*ids, 9, 10, 11, 0]).pages == (*a.pages[:2], b.pages[2])
    assert cache.available_pages() == 16
    cache.check()


def test_the_least_recently_used_leaf_goes_first():
    cache = make(num_pages=9, page_size=2)
    a, b, c = [1, 1, 1, 1, 0], [2, 2, 0], [1, 1, 3, 3, 0]
    for token, ids in enumerate((a, b, c), 1):
        fill(cache, token, ids)
    assert cache.cached_pages == 4 and cache.available_pages() == 8
    evictions = []
    for token in range(10, 14):
        got = cache.acquire(token, [token] * 9, 5 + token - 10)
        evictions.append([cache.match_prefix(ids).n_tokens for ids in (a, b, c)])
        cache.release(token, ())
        assert got is not None
    # 1-1 is used by c, too: its other leaf is the oldest, then b, then c's leaf, and the root of both last.
    assert evictions == [[2, 2, 4], [2, 0, 4], [2, 0, 2], [0, 0, 0]]
    assert cache.evicted_pages == 4 and cache.cached_pages == 0


def test_a_request_that_reads_a_path_keeps_it():
    cache = make(num_pages=7, page_size=2)
    fill(cache, 1, [1, 1, 2, 2, 3])
    reader = cache.acquire(2, [1, 1, 2, 2, 3], 3)
    assert cache.available_pages() == 3
    assert cache.acquire(3, [9] * 7, 4) is None
    assert cache.match_prefix([1, 1, 2, 2, 3]).pages == tuple(reader.pages[:2])
    assert cache.flush() == 0
    cache.release(2, ())
    assert cache.available_pages() == 6
    cache.check()


def test_what_is_matched_is_not_evicted_for_the_rest_of_its_own_table():
    cache = make(num_pages=7, page_size=2)
    old, new = [1, 1, 2, 2], [3, 3, 4, 4]
    fill(cache, 1, old)
    fill(cache, 2, new)
    kept = cache.match_prefix([*old, 0]).pages
    longer = cache.acquire(3, [*old, *[9] * 7], 6)
    assert longer.cached_tokens == 4 and tuple(longer.pages[:2]) == kept
    assert cache.match_prefix([*new, 0]).n_tokens == 0
    cache.release(3, ())
    assert cache.acquire(4, [5] * 5, 3) is not None
    assert cache.available_pages() == 3 and cache.match_prefix([*old, 0]).pages == kept
    # Two of the three are the path itself: what is missing cannot be had.
    assert cache.acquire(5, [*old, *[9] * 4], 4) is None
    cache.check()


def test_a_request_as_large_as_the_pool_is_never_locked_out():
    """Everything is cached and nothing is free: whoever fits into the pool gets in (no admission deadlock)."""
    cache = make(num_pages=9, page_size=2)
    for token in range(1, 5):
        fill(cache, token, [token] * 4)
    assert cache.allocator.free_pages == 0 and cache.available_pages() == cache.capacity() == 8
    assert cache.acquire(20, [4, 4, *range(100, 114)], 8).cached_tokens == 2
    assert cache.available_pages() == 0
    assert cache.acquire(21, [1], 1) is None
    cache.check()


def test_flush_drops_what_no_request_reads():
    cache = make()
    fill(cache, 1, list(range(9)))
    assert cache.flush() == 2 and cache.cached_pages == 0
    assert cache.allocator.free_pages == cache.capacity() and cache.flush() == 0
    cache.check()


def test_wrong_calls_raise_and_change_nothing():
    cache, ids = make(), list(range(9))
    for wrong in (lambda: cache.release(1, ids), lambda: cache.insert(1, ids)):
        with pytest.raises(PageError, match="holds no page table"):
            wrong()
    cache.acquire(1, ids, 3)
    with pytest.raises(PageError, match="already"):
        cache.acquire(1, ids, 3)
    with pytest.raises(PageError, match="already"):
        cache.acquire(CACHE_TOKEN, ids, 3)
    with pytest.raises(PageError, match="do not fit"):
        cache.insert(1, list(range(16)))
    cache.insert(1, ids)
    with pytest.raises(PageError, match="another history"):
        cache.insert(1, [9, *ids])
    with pytest.raises(PageError, match="cannot hold a prompt"):
        cache.acquire(2, ids, 2)
    cache.check()
    cache.release(1, ids)
    assert cache.available_pages() == 16


@pytest.mark.parametrize("damage", ["page", "lock", "order", "unlisted", "child", "hold", "path"])
def test_check_sees_damage_of_the_tree(damage):
    cache, ids = make(), list(range(9))
    fill(cache, 1, ids)
    if damage in ("lock", "hold", "path"):
        cache.acquire(2, ids, 3)
    first = next(iter(cache._root.children.values()))
    if damage == "page":
        first.page = 16
    elif damage == "lock":
        first.locks = 2
    elif damage == "order":
        cache._unlocked.move_to_end(first, last=False)
    elif damage == "unlisted":
        cache._unlocked.pop(first)
    elif damage == "child":
        first.children.clear()
    elif damage == "hold":
        cache._holds[2].pages.pop()
    else:
        cache._holds[2].path.pop(0)
    with pytest.raises(PageError):
        cache.check()


# ---------------------------------------------------------------- against a naive reference


class Entry:
    """A cached prefix: when its last reader left, and who reads it now."""

    def __init__(self, page):
        self.page, self.tick, self.readers = page, 0, set()


class RadixMachine(RuleBasedStateMachine):
    """The reference: a dict of token prefix → Entry, searched and sorted anew for every question.

    Pages have content here, as in a pool: each slot holds the whole history up to it. What the cache gives out must hold
    the history that was asked for, and a page is only ever written by the one who owns it.
    """

    live = Bundle("live")

    @initialize(num_pages=st.integers(2, 9), page_size=st.integers(1, 2))
    def begin(self, num_pages, page_size):
        self.cache, self.page = make(num_pages, page_size), page_size
        self.content = {}  # (page, slot) → history
        self.entries, self.tables, self.tick = {}, {}, 0

    # the reference

    def longest(self, ids, limit):
        n = 0
        while n + self.page <= min(limit, len(ids) - 1) and tuple(ids[: n + self.page]) in self.entries:
            n += self.page
        return n

    def prefixes(self, ids):
        """The page-aligned prefixes of ids, shortest first."""
        return [tuple(ids[:n]) for n in range(self.page, len(ids) + 1, self.page)]

    def evictable(self):
        """Cached prefixes that nobody reads, in the order in which they would go."""
        rest, order = {p: e for p, e in self.entries.items() if not e.readers}, []
        while rest:
            leaves = [p for p in rest if not any(q != p and q[: len(p)] == p for q in rest)]
            order.append(min(leaves, key=lambda p: rest[p].tick))
            del rest[order[-1]]
        return order

    def free(self):
        owned = {p for t in self.tables.values() for p in t["pages"]} | {
            e.page for e in self.entries.values()
        }
        return self.cache.capacity() - len(owned)

    def publish(self, token, ids):
        table = self.tables[token]
        for i, prefix in enumerate(self.prefixes(ids)):
            self.entries.setdefault(prefix, Entry(table["pages"][i])).readers.add(token)

    # the calls

    @rule(
        target=live,
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        more=st.integers(0, 3),
        limit=st.one_of(st.none(), st.integers(0, 9)),
    )
    def acquire(self, ids, more, limit):
        self.tick += 1
        token, n_pages = self.tick, pages_for(len(ids), self.page) + more
        n = self.longest(ids, len(ids) if limit is None else limit)
        path = self.prefixes(ids[:n])
        missing = n_pages - len(path) - self.free()
        victims = [p for p in self.evictable() if p not in path]
        got = self.cache.acquire(token, ids, n_pages, limit)
        assert (got is None) == (missing > len(victims))
        if got is None:
            return token
        for prefix in victims[: max(missing, 0)]:
            del self.entries[prefix]
        assert got.cached_tokens == n and len(got.pages) == len(set(got.pages)) == n_pages
        assert got.pages[: len(path)] == [self.entries[p].page for p in path]
        for prefix in path:
            self.entries[prefix].readers.add(token)
        self.tables[token] = {"pages": got.pages, "ids": ids, "computed": n}
        for page in got.pages[len(path) :]:
            for slot in range(self.page):
                self.content[page, slot] = None
        return token

    @rule(token=live, n=st.integers(1, 6), insert=st.booleans())
    def compute(self, token, n, insert):
        """Some more positions, of the prompt and then of what follows it."""
        table = self.tables.get(token)
        if table is None:
            return
        stop = min(table["computed"] + n, len(table["pages"]) * self.page)
        table["ids"] = [*table["ids"], *(i % 2 for i in range(stop - len(table["ids"])))]
        for at in range(table["computed"], stop):
            page = table["pages"][at // self.page]
            assert self.cache.owns(token, [page]), "a page that others read is written"
            self.content[page, at % self.page] = tuple(table["ids"][: at + 1])
        table["computed"] = stop
        if insert:
            self.cache.insert(token, table["ids"][:stop])
            self.publish(token, table["ids"][:stop])

    @rule(token=consumes(live), trusted=st.booleans())
    def release(self, token, trusted):
        if token not in self.tables:
            with pytest.raises(PageError):
                self.cache.release(token, ())
            return
        table = self.tables[token]
        known = table["ids"][: table["computed"]] if trusted else []
        self.cache.release(token, known)
        self.publish(token, known)
        del self.tables[token]
        self.tick += 1
        for entry in self.entries.values():
            if token in entry.readers:
                entry.readers.discard(token)
                entry.tick = self.tick if not entry.readers else entry.tick

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def serve(self, ids):
        """A whole request: this is how a cache fills."""
        token = self.acquire(ids, 0, None)
        self.compute(token, len(ids), False)
        self.release(token, True)

    @rule()
    def flush(self):
        gone = self.evictable()
        assert self.cache.flush() == len(gone)
        for prefix in gone:
            del self.entries[prefix]

    @invariant()
    def same_as_the_reference(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check()
        assert cache.allocator.free_pages == self.free()
        assert cache.available_pages() == self.free() + len(self.evictable())
        assert cache.cached_pages == len(self.entries)
        for prefix, entry in self.entries.items():
            assert cache.match_prefix([*prefix, 0]).pages[-1] == entry.page
            for slot in range(self.page):
                assert self.content[entry.page, slot] == prefix[: len(prefix) - self.page + slot + 1]
        for table in self.tables.values():
            for at in range(table["computed"]):
                page = table["pages"][at // self.page]
                assert self.content[page, at % self.page] == tuple(table["ids"][: at + 1])


RadixMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRadixMachine = RadixMachine.TestCase
