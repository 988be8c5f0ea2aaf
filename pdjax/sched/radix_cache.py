"""RadixCache: prompts that begin alike share the pages of what they have in common (RFC-2 D2).

A tree whose edges are whole pages of tokens: a path from the root is a history from position 0, and each node has the
page with the KV of its last page_size tokens. Edges are found by comparing the tokens themselves, so two histories are
never taken for each other. The cache holds every page of the tree under a token of its own (requests count from 1, no
attempt is 0), requests hold the paths that they read; what only the cache holds is evicted when pages are needed, least
recently used first, leaves before what they hang on.

Must never give out a page whose content has not been computed, never give a page of the tree away while a request
holds it, and never read a clock: the order of calls alone decides what is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pdjax.core.trace import CACHE_TOKEN
from pdjax.sched.chunk_cache import Acquired, BasePrefixCache, PrefixMatch
from pdjax.sched.pages import PageAllocator, PageError


@dataclass(eq=False, slots=True)
class _Node:
    """One cached page. locks: how many requests hold it now, besides the cache."""

    key: tuple[int, ...]
    page: int
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    locks: int = 0


@dataclass(eq=False, slots=True)
class _Hold:
    """What one token has: its page table, and the path of the tree that it keeps from eviction."""

    pages: list[int]
    path: list[_Node]


class RadixCache(BasePrefixCache):
    """For one thread (the scheduler's), like its allocator, of which it is the only user.

    Locks are closed towards the root: whoever holds a node holds the path to it. So everything below an unlocked node
    is unlocked, and every unlocked node can be evicted.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        super().__init__(allocator)
        self.page_size = page_size
        self._root = _Node((), 0, None)
        self._holds: dict[int, _Hold] = {}
        # Least recently used first. A path is appended from its end to its beginning whenever its lock goes, so every
        # node comes after all that hang on it, and the first of all is a leaf.
        self._unlocked: OrderedDict[_Node, None] = OrderedDict()

    # ------------------------------------------------------------ BasePrefixCache

    def match_prefix(self, prompt_ids: Sequence[int]) -> PrefixMatch:
        path = self._match(prompt_ids, None)
        return PrefixMatch(tuple(node.page for node in path), len(path) * self.page_size)

    def acquire(
        self, token: int, prompt_ids: Sequence[int], n_pages: int, max_cached_tokens: int | None = None
    ) -> Acquired | None:
        if token in self._holds or token == CACHE_TOKEN:
            raise PageError(f"token {token} holds a page table already: release it first")
        path = self._match(prompt_ids, max_cached_tokens)
        n_own = n_pages - len(path)
        if n_own < 1:
            raise PageError(
                f"token {token}: {n_pages} pages cannot hold a prompt of {len(prompt_ids)} tokens"
            )
        evictable = len(self._unlocked) - sum(not node.locks for node in path)
        n_missing = n_own - self.allocator.free_pages
        if n_missing > evictable:
            return None
        self._lock(path)  # before anything is evicted for the rest of the table
        self._evict(max(n_missing, 0))
        own = self.allocator.alloc(n_own, token)
        assert own is not None, "eviction made the room that was counted"
        shared = [node.page for node in path]
        self.allocator.share(token, shared)
        self._holds[token] = _Hold([*shared, *own], path)
        return Acquired([*shared, *own], len(shared) * self.page_size)

    def insert(self, token: int, kv_ids: Sequence[int]) -> None:
        """Complete pages become nodes. Where another request was first, its page serves and token keeps its own copy."""
        hold = self._hold(token)
        path, n_full = hold.path, len(kv_ids) // self.page_size
        if n_full > len(hold.pages):
            raise PageError(f"token {token}: {len(kv_ids)} tokens do not fit in its {len(hold.pages)} pages")
        if 0 < len(path) <= n_full and path[-1].key != self._key(kv_ids, len(path) - 1):
            raise PageError(f"token {token} holds the pages of another history than it says")
        node = path[-1] if path else self._root
        met, added = [], []  # in this order: below a new node everything is new
        for i in range(len(path), n_full):
            key = self._key(kv_ids, i)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, hold.pages[i], node)
                added.append(child)
            else:
                met.append(child)
            node = child
        self._lock([*met, *added])
        path += [*met, *added]
        self.allocator.share(token, [node.page for node in met])
        self.allocator.share(CACHE_TOKEN, [node.page for node in added])

    def release(self, token: int, kv_ids: Sequence[int]) -> None:
        """The path becomes the most recently used one."""
        self.insert(token, kv_ids)
        hold = self._holds.pop(token)
        self.allocator.free(token)
        for node in reversed(hold.path):
            node.locks -= 1
            if not node.locks:
                self._unlocked[node] = None

    def flush(self) -> int:
        n = len(self._unlocked)
        self._evict(n)
        return n

    def available_pages(self) -> int:
        return self.allocator.free_pages + len(self._unlocked)

    @property
    def cached_pages(self) -> int:
        return len(self.allocator.held(CACHE_TOKEN))

    # ------------------------------------------------------------ the tree

    def _key(self, ids: Sequence[int], i: int) -> tuple[int, ...]:
        """The tokens of page i."""
        return tuple(ids[i * self.page_size : (i + 1) * self.page_size])

    def _match(self, prompt_ids: Sequence[int], max_cached_tokens: int | None) -> list[_Node]:
        """The path of the longest usable prefix. The prompt's last token is computed anew: it gives the first output."""
        n_tokens = len(prompt_ids) - 1
        if max_cached_tokens is not None:
            n_tokens = min(n_tokens, max_cached_tokens)
        node, path = self._root, []
        for i in range(n_tokens // self.page_size):
            child = node.children.get(self._key(prompt_ids, i))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _hold(self, token: int) -> _Hold:
        hold = self._holds.get(token)
        if hold is None:
            raise PageError(f"token {token} holds no page table: released twice, or never acquired")
        return hold

    def _lock(self, nodes: Iterable[_Node]) -> None:
        for node in nodes:
            node.locks += 1
            self._unlocked.pop(node, None)

    def _evict(self, n_pages: int) -> None:
        evicted = [self._unlocked.popitem(last=False)[0] for _ in range(n_pages)]
        for node in evicted:
            assert node.parent is not None and not node.children, "a leaf goes before what it hangs on"
            del node.parent.children[node.key]
        self.allocator.give_up(CACHE_TOKEN, [node.page for node in evicted])
        self.evicted_pages += n_pages

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check(self) -> None:
        """Tree, locks and allocator tell the same story. Raises PageError. Costs the size of the pool."""
        super().check()
        nodes = list(self._nodes())
        if sorted(node.page for node in nodes) != sorted(self.allocator.held(CACHE_TOKEN)):
            raise PageError("the pages of the tree are not those that the cache holds")
        locks = dict.fromkeys(nodes, 0)
        for token, hold in self._holds.items():
            if set(self.allocator.held(token)) != {*hold.pages, *(node.page for node in hold.path)}:
                raise PageError(f"token {token} holds other pages than its table and its path")
            for node, parent in zip(hold.path, [self._root, *hold.path], strict=False):
                if node not in locks or node.parent is not parent:
                    raise PageError(f"token {token} holds a path that is not in the tree")
                locks[node] += 1
        for node, n in locks.items():
            if not node.locks == n == self.allocator.holders(node.page) - 1:
                raise PageError(f"page {node.page} is locked {node.locks} times and held by {n} requests")
            if (n == 0) != (node in self._unlocked) or len(node.key) != self.page_size:
                raise PageError(f"page {node.page} of the tree is not where it belongs")
        place = {node: i for i, node in enumerate(self._unlocked)}
        if any(place.get(x, len(place)) > i for node, i in place.items() for x in node.children.values()):
            raise PageError("a page would be evicted before one that hangs on it")
