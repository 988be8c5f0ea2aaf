"""Random prompts that begin alike, for the prefix cache of P: drawn over a trace that is drawn already.

Its random numbers are its own, so that a seed's requests and faults stay what they are. Must never change an outcome
that a trace states: every request is answered right or not at all, shared pages or none.
"""

from __future__ import annotations

import random
from typing import Any

Trace = dict[str, Any]


def share_prefixes(trace: Trace, seed: int) -> None:
    """Let requests of the trace begin like others, on pools that may be too small to keep all of it; cache on or off."""
    rng = random.Random(f"prefixes {seed}")
    requests = [step["request"] for step in trace["steps"] if "request" in step]
    world = trace["world"]
    if rng.random() < 0.3:
        world["flags"]["disable-radix-cache"] = True
    if rng.random() < 0.4 or len(requests) < 2:
        return
    if rng.random() < 0.7:  # one P sees them all
        home = rng.choice(world["prefill"])
        for request in requests:
            if request["rid"].startswith("r"):
                request["prefill"] = home
    for i, request in enumerate(requests):
        if "prefix" not in request and i and rng.random() < 0.7:
            other = rng.choice(requests[:i])
            longest = min(request["prompt"], other["prompt"])
            request["prefix"] = {
                "rid": other["rid"],
                "tokens": rng.choice([longest, longest, rng.randint(1, longest)]),
            }
    if rng.random() < 0.5:
        world["flags"]["chunked-prefill-size"] = rng.choice([1, 3, 8])
    if rng.random() < 0.5:  # what one request needs, and a little more
        need = max(-(-(r["prompt"] + r["output"]) // world["page_size"]) for r in requests)
        for name in world["prefill"]:
            world["pages"][name] = need + rng.choice([0, 1, 2])
