"""How large a trace file may be, so that no file can fill the memory or run for ever. Every bound is named here.

The schema says what a file means; these bounds say what one machine can run. Must never change what a file within
them means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdjax.sim.schema import TraceError, join, show

MAX_FILE_BYTES: Final = 64 << 20
MAX_DEPTH: Final = 32  # of lists and objects in each other; the format needs 6
MAX_DIGITS: Final = 40  # of a number: below what int() refuses, above every limit of the format
MAX_MS: Final = 1e8  # of virtual time in one value, 28 hours
MAX_CLOCK_MS: Final = 1e11  # that a wall clock may be wrong by, 3 years
MAX_STEPS: Final = 100_000
MAX_NODES: Final = 64  # P and D together
MAX_POOLS: Final = 64
MAX_SAMPLES: Final = 1024  # n of one request
MAX_TOKENS: Final = 1 << 22  # prompts and outputs of all requests together
MAX_POOL_TOKENS: Final = 1 << 22  # pages × page_size of one node
MAX_COUNT: Final = 1 << 31  # every other whole number

_MS: Final = frozenset(
    ("at", "after", "by", "for", "within", "delay", "timeout", "quiescent_within", "link", "jitter",
     "prefill_per_token", "decode_step", "pull_per_page", "loop")
)  # fmt: skip
_COUNTS: Final = frozenset(("nth", "times", "retries", "part", "free", "page_size", "ranks", "eos", "tokens"))


def check_size(raw: Mapping[str, Any]) -> None:
    """A file that the schema has taken. Raises TraceError with the key that is too large."""
    world, steps = raw.get("world", {}), raw["steps"]
    _number("seed", raw.get("seed", 0), 10**MAX_DIGITS)
    _number("steps", len(steps), MAX_STEPS, "steps")
    n_nodes = sum(len(world.get(side, ("",))) for side in ("prefill", "decode"))
    _number("world", n_nodes, MAX_NODES, "nodes")
    _number("world.pools", len(world.get("pools", ())), MAX_POOLS, "pools")
    for name, value in world.get("clock_offset", {}).items():
        _number(f"world.clock_offset.{name}", abs(value), MAX_CLOCK_MS)
    _numbers({k: world[k] for k in ("page_size", "ranks", "router", "timing") if k in world}, "world")
    n_tokens = 0
    for i, step in enumerate(steps):
        path = f"steps[{i}]"
        _numbers(step, path)
        if "clock" in step:
            _number(f"{path}.clock.jump", abs(step["clock"]["jump"]), MAX_CLOCK_MS)
        request = step.get("request")
        if request is not None:
            n_samples = request.get("n", 1)
            _number(f"{path}.request.n", n_samples, MAX_SAMPLES)
            n_tokens += (request["prompt"] + request["output"]) * n_samples
            _number(f"{path}.request", n_tokens, MAX_TOKENS, "tokens of all requests up to this one")
    expect = raw.get("expect", {})
    _number("expect.quiescent_within", expect.get("quiescent_within", 0), MAX_MS)
    for rid, outcome in expect.get("outcomes", {}).items():
        if isinstance(outcome, dict):
            _numbers(outcome, f"expect.outcomes.{rid}")


def check_pool(name: str, num_pages: int, page_size: int) -> None:
    """The pages of one node."""
    _number(f"world.pages.{name}", num_pages * page_size, MAX_POOL_TOKENS, "tokens in its pages")


def _numbers(value: Mapping[str, Any], path: str) -> None:
    """Times and counts by their names, wherever they stand."""
    for key, item in value.items():
        if key in _MS:
            if not isinstance(item, (dict, list)):
                _number(join(path, key), item, MAX_MS, "ms")
        elif key in _COUNTS and item is not None:
            _number(join(path, key), item, MAX_COUNT)
        elif (
            isinstance(item, dict) and key != "inject"
        ):  # a frame may say what it likes: servers must stand it
            _numbers(item, join(path, key))


def _number(path: str, value: float, most: float, what: str = "") -> None:
    if value > most:
        text = f"at most {most:,.0f} {what}".rstrip()
        raise TraceError(path, f"{text} can be simulated, {show(value)} found")


def too_deep(value: Any) -> bool:
    """More than MAX_DEPTH lists and objects in each other. Needs no stack."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
    return False


def sayable(text: str) -> bool:
    """Half of a surrogate pair is no text: nothing could write it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
