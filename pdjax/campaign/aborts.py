"""Aborts and disconnects in every queue and state, on either side: freed within one round trip plus one step.

P's bytes are free once the pull has settled (protocol §6). Must never count the time that a pull is made slow on purpose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdjax.campaign import states
from pdjax.campaign.client import HttpRouter
from pdjax.campaign.fleet import POLL_S, Fleet
from pdjax.campaign.matrix import SLACK_S, plan
from pdjax.campaign.reference import Reference
from pdjax.campaign.replay import Logs
from pdjax.sim.trace_types import Router as RouterSpec

WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "abort at P": ("abort", ("prefill",)),
    "abort at D": ("abort", ("decode",)),
    "abort at both": ("abort", ("prefill", "decode")),
    "P's connection closes": ("disconnect", ("prefill",)),
    "D's connection closes": ("disconnect", ("decode",)),
    "both connections close": ("disconnect", ("prefill", "decode")),
}
# The device step that is under way when the abort comes, as states.hold makes it.
STEP_S = {
    "prefilling": 16 * states.PREFILL_PER_TOKEN_S,  # one chunk
    "decoding": states.DECODE_STEP_S,
}
FIRST_ROOM = 300  # prompts go by number, and the matrix has the first ones
END_S = 30.0  # of a request that goes on
ROUND_TRIP_S = 0.3  # HTTP, side channel, and the look of this harness, on a loaded machine


@dataclass
class Abort:
    """One way out of one state. free_s: from the abort until both sides were as at the start."""

    state: str
    way: str
    outcome: str = ""
    free_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


ALL = [(state, way) for state in states.QUEUE_OF for way in WAYS]


async def run_aborts(directory: Path, say: Callable[[str], None]) -> list[Abort]:
    async with Reference() as reference, Fleet(plan(), directory / "aborts") as fleet:
        return await abort_each(ALL, fleet, reference, say)


async def abort_each(
    cells: Sequence[tuple[str, str]], fleet: Fleet, reference: Reference, say: Callable[[str], None]
) -> list[Abort]:
    """cells: (state, way), on a fleet of ``matrix.plan``."""
    found: list[Abort] = []
    logs = Logs(fleet)
    for number, (state, way) in enumerate(cells):
        abort = Abort(state, way)
        await _one(fleet, reference, logs, FIRST_ROOM + number, abort)
        found.append(abort)
        verdict = "; ".join(abort.wrong) or "as promised"
        say(f"{state}, {way}: {abort.outcome}, free after {abort.free_s:.2f} s: {verdict}")
    return found


def finds_nothing(state: str, way: str) -> bool:
    """P's leg ends when its KV is ready, its hand-off when D has it (protocol §7): an abort at P alone may be late."""
    if WAYS[way][1] != ("prefill",) or states.QUEUE_OF[state][0] != "d0":
        return False
    return WAYS[way][0] == "disconnect" or state == "decoding"


def bound_s(state: str) -> float:
    """One round trip and one step; in a pull, also what is left of it."""
    pull_s = states.PULL_LATE_MS / 1000 if state == "pulling" else 0.0
    return ROUND_TRIP_S + STEP_S.get(state, 0.0) + pull_s


async def _one(fleet: Fleet, reference: Reference, logs: Logs, number: int, abort: Abort) -> None:
    before = logs.more()
    router = HttpRouter(fleet, RouterSpec(), 1.0, lambda event, room: None)
    prompt = states.prompt(number)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": states.OUTPUT_TOKENS, "ignore_eos": True}
    right = await reference.tokens(prompt, sampling)
    await states.hold(fleet, abort.state)
    try:
        value = {"rid": "a", "room": number, "prefill": "p0", "decode": "d0"}
        router.request(value, prompt, sampling, right)
        record = router.records["a"]
        if not await states.reached(fleet, abort.state, record.ended.is_set):
            abort.wrong.append(f"the request never was {abort.state}")
        kind, sides = WAYS[abort.way]
        began_s = time.monotonic()
        if kind == "abort":
            await router.abort("a", sides)
        else:
            router.disconnect("a", sides)
        want = "aborted"
        if finds_nothing(abort.state, abort.way):
            want = "ok"
            await states.let_go(fleet)
        else:
            abort.free_s, left = await _until_free(fleet, began_s, bound_s(abort.state) + SLACK_S)
            if left:
                abort.wrong.append(f"not free {bound_s(abort.state):.2f} s after the abort: {left}")
        await asyncio.wait_for(record.ended.wait(), END_S)
        abort.outcome = record.outcome
        if record.outcome != want:
            abort.wrong.append(f"the client sees {record.outcome} ({record.reason or record.status})")
    except TimeoutError:
        abort.wrong.append("the client never heard of it")
    finally:
        await router.close()
        await states.let_go(fleet)
    abort.wrong += router.errors
    _, left = await fleet.until_free(bound_s("pulling") + SLACK_S)
    if left:
        abort.wrong.append(f"never free: {left}")
    logs.more()
    abort.wrong += logs.breaches(before)


async def _until_free(fleet: Fleet, began_s: float, within_s: float) -> tuple[float, dict[str, Any]]:
    """Requests, rooms, bytes and pulls; pages are held by the harness itself, and looked at once it has let go."""
    while True:
        held = await fleet.held_by_all()
        left = {
            name: rest
            for name, what in held.items()
            if (rest := {k: v for k, v in what.items() if k != "pages"})
        }
        took_s = time.monotonic() - began_s
        if not left or took_s > within_s:
            return took_s, left
        await asyncio.sleep(POLL_S)
