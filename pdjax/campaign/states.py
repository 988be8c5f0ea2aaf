"""One request brought into a state of the hand-off and kept there, so that a fault meets it in exactly that state.

What keeps it there is what keeps requests there in production: no free page, KV of others that nobody pulls, a leg that is late,
a long prompt, a slow network, a long answer.
Must never leave a hold behind: ``let_go`` ends them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pdjax.campaign.fleet import POLL_S, Fleet
from pdjax.campaign.reference import SPECIAL, VOCABULARY

STATES = ("idle", "queued", "prefilling", "registered", "pulling", "decoding")
REACH_S = 60.0
PROMPT_TOKENS, OUTPUT_TOKENS = 96, 40
PREFILL_PER_TOKEN_S = 0.03  # of a prompt in chunks: some 3 s, with a turn of the scheduler every half second
DECODE_STEP_S = 0.15
PULL_LATE_MS = 6000.0

# state → (node whose queue holds the request, the queue)
QUEUE_OF: dict[str, tuple[str, str]] = {
    "gated": ("p0", "gate"),
    "budget": ("p0", "budget_queue"),
    "queued": ("p0", "waiting"),
    "prefilling": ("p0", "prefilling"),
    "bootstrapping": ("d0", "bootstrapping"),
    "registered": ("d0", "page_queue"),
    "pulling": ("d0", "in_flight"),
    "decoding": ("d0", "running"),
    "to recompute": ("d0", "recompute"),
    "recomputing": ("d0", "prefilling"),
}
# With --disaggregation-on-failure recompute, after a hand-off that has failed: P's part in it is over
LOST = ("to recompute", "recomputing")
# With both sides in it: a P whose D has said nothing yet has no lease, which begins with the KV (protocol §7)
BOUND = ("queued", "prefilling")
# state → the side whose leg has not come yet, which is what the other one waits for
LATE_LEG = {"gated": "decode", "bootstrapping": "prefill"}


def prompt(number: int) -> list[int]:
    """Token ids of the tiny model, for each number others."""
    return [SPECIAL + (number * 31 + i * i) % (VOCABULARY - SPECIAL) for i in range(PROMPT_TOKENS)]


async def hold(fleet: Fleet, state: str) -> None:
    """Before the request is posted: make it stay in that state once it is there.

    Whoever posts it holds back the leg of ``LATE_LEG``; "budget" needs another request of its size before it, whose KV
    then takes all of P's budget, and "to recompute" another one that D is recomputing.
    """
    p, d = fleet.remote("p0"), fleet.remote("d0")
    if state == "queued":
        await p.do("pages", free=0)
    elif state == "prefilling":
        await p.do("pace", prefill_per_token_s=PREFILL_PER_TOKEN_S, decode_step_s=0.0)
    elif state in ("budget", "registered"):
        await d.do("pages", free=0)
    elif state == "pulling":
        slow: Mapping[str, Any] = {"match": {}, "do": "slow", "by": PULL_LATE_MS, "times": None}
        await p.do("rules", messages=[], transfers=[[0, slow]], ms_s=0.001)
    elif state in LOST:
        fails: Mapping[str, Any] = {"match": {}, "do": "fail", "times": None}
        await p.do("rules", messages=[], transfers=[[0, fails]], ms_s=0.001)
        await d.do("pace", prefill_per_token_s=PREFILL_PER_TOKEN_S, decode_step_s=0.0)
    elif state == "decoding":
        await d.do("pace", prefill_per_token_s=0.0, decode_step_s=DECODE_STEP_S)


async def reached(fleet: Fleet, state: str, ended: Callable[[], bool]) -> bool:
    """Until the request stands in the queue of that state; False: it has ended, or it never came there."""
    if state == "idle":
        return True
    node, queue = QUEUE_OF[state]

    async def there() -> bool:
        return await _queued(fleet, [node], queue) and (state not in BOUND or await _bound(fleet, node))

    return await _comes(there, ended)


async def stands_in(fleet: Fleet, nodes: Sequence[str], queue: str, ended: Callable[[], bool]) -> bool:
    """Until a request stands in that queue of one of the nodes; False: ended() says that it cannot any more, or it never did."""
    return await _comes(lambda: _queued(fleet, nodes, queue), ended)


async def _queued(fleet: Fleet, nodes: Sequence[str], queue: str) -> bool:
    return any([(await fleet.state(node))[queue] for node in nodes])


async def _comes(there: Callable[[], Awaitable[bool]], ended: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + REACH_S
    while not await there():
        if ended() or time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def _bound(fleet: Fleet, node: str) -> bool:
    rooms = (await fleet.http.get(f"{fleet.seats[node].url}/debug/rooms")).json()["rooms"]
    return bool(rooms) and all(room["peer"] for room in rooms)


async def let_go(fleet: Fleet) -> None:
    """Nothing is held any more on a process that lives and runs."""
    for name in fleet.instances:
        seat = fleet.seats[name]
        if seat.alive and not seat.stopped:
            await fleet.remote(name).do("reset")
