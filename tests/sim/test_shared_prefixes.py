"""Prompts that begin alike in the simulated world: what P computes once, and each way to share wrongly is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdjax.sched.pages import PageAllocator
from pdjax.sched.radix_cache import RadixCache
from pdjax.sim import mutate
from pdjax.sim.draw import draw
from pdjax.sim.replay import Run
from pdjax.sim.trace_file import parse
from pdjax.sim.view.ladder import rows_of

EVENTS = 3000  # more than a whole run has
TRACES = Path(__file__).parents[1] / "traces"


def trace(name):
    return json.loads((TRACES / f"{name}.json").read_text())


def run_out(raw):
    run = Run(parse(raw))
    run.go()
    result = run.finish()
    cached = {
        rid: {c.request.cached_tokens for leg in r.all_legs for c in leg.clients if c.request}
        for rid, r in result.records.items()
    }
    return result, cached, run.world.nodes["p0"].scheduler


@pytest.mark.parametrize(
    ("name", "cached"),
    [
        # c evicts what a and b had in common, e what c and d had, and f finds one page of it.
        ("prefix-in-a-pool-that-cannot-keep-it", {"a": 0, "b": 32, "c": 0, "d": 40, "e": 0, "f": 4}),
        ("prefix-left-by-an-abort", {"a": 0, "b": 40, "c": 60}),
        ("prefix-and-pages-taken-away", {"a": 0, "b": 36, "c": 36, "d": 0, "e": 36}),
        ("prefix-of-a-life-that-is-gone", {"a": 0, "b": 36, "c": 0, "d": 36}),
    ],
)
def test_how_much_is_served_from_the_cache(name, cached):
    """Both sides say the same number: D has it from P."""
    raw = trace(name)
    result, found, scheduler = run_out(raw)
    assert result.ok, (result.broken, result.mismatches)
    assert found == {rid: {n} for rid, n in cached.items()}
    assert result.coverage["moments"].get("prefix_shared")
    cache = scheduler.cache
    assert cache.flush() > 0 and cache.allocator.free_pages == cache.capacity()
    raw["world"]["flags"]["disable-radix-cache"] = True
    off, found, _ = run_out(raw)
    assert off.ok and set().union(*found.values()) == {0}
    assert {k: o.tokens for k, o in off.outcomes.items()} == {k: o.tokens for k, o in result.outcomes.items()}


def test_the_ladder_tells_what_is_read_kept_and_dropped():
    result, _, _ = run_out(trace("prefix-in-a-pool-that-cannot-keep-it"))
    told = [text for row in rows_of(result) for text in row.cells.get("p0", ())]
    for words in ("cache keeps 10 pages", "reads 8 pages", "cache drops 9 pages"):
        assert words in told, told


def uncounted(old):
    def share(self, token, pages):
        old(self, token, pages)
        for page in pages:
            self._holders[page] -= 1

    return share


def too_soon(old):
    def acquire(self, token, prompt_ids, n_pages, max_cached_tokens=None):
        got = old(self, token, prompt_ids, n_pages, max_cached_tokens)
        if got is not None and prompt_ids:
            self.insert(token, prompt_ids)
        return got

    return acquire


def first_token_alone(old):
    return lambda self, ids, i: tuple(old(self, ids, i)[:1])


def locked_for_ever(old):
    def release(self, token, kv_ids):
        old(self, token, kv_ids)
        for node in self._root.children.values():
            self._lock([node])

    return release


@pytest.mark.parametrize(
    ("broken", "name", "prop"),
    [
        ((PageAllocator, "share", uncounted), "prefix-in-a-pool-that-cannot-keep-it", "S1"),
        ((RadixCache, "acquire", too_soon), "prefix-in-a-pool-that-cannot-keep-it", "S1"),
        ((RadixCache, "_key", first_token_alone), "prefix-in-a-pool-that-cannot-keep-it", "S13"),
        ((RadixCache, "release", locked_for_ever), "prefix-in-a-pool-that-cannot-keep-it", "S3"),
    ],
    ids=["not counted", "before it is computed", "other tokens", "never unlocked"],
)
def test_each_way_to_share_wrongly_is_noticed(broken, name, prop):
    owner, attribute, change = broken
    raw = trace(name)
    raw["steps"][1]["request"]["prefix"]["tokens"] = 34  # differs from a in the middle of a page
    assert run_out(raw)[0].ok
    with mutate.attribute(owner, attribute, change(owner.__dict__[attribute])):
        run = Run(parse(raw), conformance=False)
        for _ in range(EVENTS):  # not to its end: a scheduler that raises makes no progress
            run.world.step()
        run.monitor.at_end()
    assert prop in run.monitor.violated(), [str(v) for v in run.monitor.violations]


def test_the_fuzzer_draws_shared_prompts_with_the_cache_on_and_off():
    drawn = [draw(seed) for seed in range(60)]
    off = [t["world"]["flags"].get("disable-radix-cache", False) for t in drawn]
    assert 5 < sum(off) < 40
    shared = [t for t in drawn if sum("prefix" in s.get("request", {}) for s in t["steps"]) > 1]
    assert len(shared) > 20
    assert any("chunked-prefill-size" in t["world"]["flags"] for t in shared)
