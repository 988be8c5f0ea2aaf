"""Aborts and disconnects in every queue and state, on either side: freed within one round trip plus one step.

P's bytes are free once the pull has settled (protocol §6). Must never count the time that a pull is made slow on purpose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdjax.campaign import states
from pdjax.campaign.client import HttpRouter, Record
from pdjax.campaign.fleet import FAILURES, POLL_S, Fleet, failure
from pdjax.campaign.logs import Logs
from pdjax.campaign.matrix import SETTINGS, SLACK_S, plan
from pdjax.campaign.plans import FleetPlan
from pdjax.campaign.reference import Reference
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
CHUNK_S = 16 * states.PREFILL_PER_TOKEN_S
STEP_S = {
    "prefilling": CHUNK_S,
    "decoding": states.DECODE_STEP_S,
    "to recompute": CHUNK_S,  # of the one before it
    "recomputing": CHUNK_S,
}
FIRST_ROOM = 300  # prompts go by their room, and the matrix has the first ones
# Some states take settings of their own; a fleet for each.
OTHER_SETTINGS = {
    "gated": replace(SETTINGS, prefill_gate="gated"),
    "to recompute": replace(SETTINGS, on_failure="recompute"),
    "recomputing": replace(SETTINGS, on_failure="recompute"),
}
# A state with another request before it → the state in which that is, and its output: both prompts have pages at D.
BEFORE = {"budget": ("registered", states.OUTPUT_TOKENS), "to recompute": ("recomputing", 1)}
RID, OTHER = "a", "other"
END_S = states.REACH_S + 60.0  # of one cell, whose request may go on
ROUND_TRIP_S = 0.3  # HTTP, side channel, and the look of this harness, on a loaded machine

Held = Mapping[str, Mapping[str, int]]  # node → what → how much


@dataclass
class Abort:
    """One way out of one state. free_s: from the abort until both sides were as at the start."""

    state: str
    way: str
    outcome: str = ""
    free_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def can_be(state: str, way: str) -> bool:
    """A connection that the router has not opened cannot close."""
    kind, sides = WAYS[way]
    return kind == "abort" or states.LATE_LEG.get(state) not in sides


ALL = [(state, way) for state in states.QUEUE_OF for way in WAYS if can_be(state, way)]


async def run_aborts(
    cells: Sequence[tuple[str, str]], directory: Path, say: Callable[[str], None]
) -> list[Abort]:
    """cells: (state, way)."""
    plans: dict[FleetPlan, list[tuple[str, str]]] = {}
    for cell in cells:
        plans.setdefault(plan(OTHER_SETTINGS.get(cell[0], SETTINGS)), []).append(cell)
    found: list[Abort] = []
    async with Reference() as reference:
        for number, (one, here) in enumerate(plans.items()):
            await _on_fleets(one, here, directory / str(number), reference, say, found)
    return found


async def _on_fleets(
    one: FleetPlan,
    left: Sequence[tuple[str, str]],
    directory: Path,
    reference: Reference,
    say: Callable[[str], None],
    found: list[Abort],
) -> None:
    """Cells of one plan. After a failure of the fleet itself the rest goes on with a new one."""
    lives = 0
    while left:
        lives += 1
        n_before = len(found)
        try:
            async with Fleet(one, directory / str(lives)) as fleet:
                await abort_each(left, fleet, reference, say, found)
                found[-1].wrong += await fleet.end()
        except FAILURES as error:
            if len(found) == n_before:
                raise  # it never served
            found[-1].wrong.append(failure(error))
            say(f"{name_of(found[-1].state, found[-1].way)}: {found[-1].wrong[-1]}")
        left = left[len(found) - n_before :]


async def abort_each(
    cells: Sequence[tuple[str, str]],
    fleet: Fleet,
    reference: Reference,
    say: Callable[[str], None],
    found: list[Abort],
) -> None:
    """cells: (state, way), on a fleet of ``matrix.plan`` with the settings that they need. found: gets each as it begins."""
    logs = Logs(fleet)
    for number, (state, way) in enumerate(cells):
        found.append(abort := Abort(state, way))
        router = HttpRouter(fleet, RouterSpec(), 1.0, lambda event, room: None)
        before = logs.more()
        try:
            await _Cell(abort, fleet, reference, router).run(FIRST_ROOM + 2 * number)
        finally:
            await router.close()
        abort.wrong += router.errors
        logs.more()
        abort.wrong += logs.breaches(before) + fleet.wrong_ends()
        verdict = "; ".join(abort.wrong) or "as promised"
        say(f"{name_of(state, way)}: {abort.outcome}, free after {abort.free_s:.2f} s: {verdict}")


def name_of(state: str, way: str) -> str:
    return f"{state}, {way}"


def finds_nothing(state: str, way: str) -> bool:
    """P's leg ends when its KV is ready, its hand-off when D has it (protocol §7): an abort at P alone may be late."""
    if WAYS[way][1] != ("prefill",) or states.QUEUE_OF[state][0] != "d0":
        return False
    return WAYS[way][0] == "disconnect" or state in ("decoding", *states.LOST)


def goes_on(state: str, way: str) -> bool:
    """The abort reaches nobody that has the request: its leg is over there, or has not come yet."""
    return finds_nothing(state, way) or WAYS[way][1] == (states.LATE_LEG.get(state),)


def p_has_answered(state: str) -> bool:
    """P's leg is over in this state."""
    return states.QUEUE_OF[state][0] == "d0" and states.LATE_LEG.get(state) != "prefill"


def bound_s(state: str) -> float:
    """One round trip and one step; in a pull, also what is left of it."""
    pull_s = states.PULL_LATE_MS / 1000 if state == "pulling" else 0.0
    return ROUND_TRIP_S + STEP_S.get(state, 0.0) + pull_s


@dataclass
class _Cell:
    """One abort: what is wrong with it goes into ``abort.wrong``."""

    abort: Abort
    fleet: Fleet
    reference: Reference
    router: HttpRouter

    async def run(self, room: int) -> None:
        """room: this one and the next are free."""
        await states.hold(self.fleet, self.abort.state)
        if late := states.LATE_LEG.get(self.abort.state):
            self.router.hold_back(late)
        try:
            async with asyncio.timeout(END_S):
                if self.abort.state in BEFORE:
                    await self._post_before(room + 1, *BEFORE[self.abort.state])
                await self._abort_one(room)
                await self._let_go()
                await self._ends()
        except TimeoutError:
            self.abort.wrong.append(f"no end within {END_S:g} s")
        finally:
            await self._let_go()
        _, left = await self.fleet.until_free(bound_s("pulling") + SLACK_S)
        if left:
            self.abort.wrong.append(f"never free: {left}")

    async def _let_go(self) -> None:
        self.router.let_through()
        await states.let_go(self.fleet)

    async def _post(self, rid: str, room: int, n_out: int = states.OUTPUT_TOKENS) -> Record:
        return await self.router.post(self.reference, rid, room, ("p0", "d0"), states.prompt(room), n_out)

    async def _post_before(self, room: int, state: str, n_out: int) -> None:
        """Another request, whose KV takes all that may wait at P or which D is recomputing."""
        other = await self._post(OTHER, room, n_out)
        if not await states.reached(self.fleet, state, other.ended.is_set):
            self.abort.wrong.append(f"the request before it never was {state}")
        while (await self.fleet.held("p0")).get("requests"):  # its leg at P is over
            await asyncio.sleep(POLL_S)

    async def _abort_one(self, room: int) -> None:
        abort, fleet = self.abort, self.fleet
        before = await fleet.held_by_all()
        record = await self._post(RID, room)
        if not await states.reached(fleet, abort.state, record.ended.is_set):
            abort.wrong.append(f"the request never was {abort.state}")
        if p_has_answered(abort.state) and (task := record.legs["prefill"].task):
            await asyncio.wait([task])  # D may know before the router has read it
        kind, sides = WAYS[abort.way]
        began_s = time.monotonic()
        if kind == "abort":
            await self.router.abort(RID, sides)
        else:
            self.router.disconnect(RID, sides)
        if not goes_on(abort.state, abort.way):
            abort.free_s, left = await _until_free(fleet, before, began_s, bound_s(abort.state) + SLACK_S)
            if left:
                abort.wrong.append(f"not free {abort.free_s:.2f} s after the abort: {left}")

    async def _ends(self) -> None:
        """The aborted request as its client sees it, and that the other one, if there is one, has not noticed."""
        for rid, record in self.router.records.items():
            await record.ended.wait()
            want = "ok" if rid == OTHER or goes_on(self.abort.state, self.abort.way) else "aborted"
            if record.outcome != want:
                seen = f"{record.outcome} ({record.reason or record.status})"
                self.abort.wrong.append(f"the client sees {seen}{' of the other request' * (rid == OTHER)}")
        self.abort.outcome = self.router.records[RID].outcome


async def _until_free(fleet: Fleet, before: Held, began_s: float, within_s: float) -> tuple[float, Held]:
    """(seconds since began_s, what is held beyond ``before``: {} when it is all free).

    Requests, rooms, bytes and pulls; pages are held by the harness itself, and looked at once it has let go.
    """
    while True:
        left = beyond(await fleet.held_by_all(), before)
        took_s = time.monotonic() - began_s
        if not left or took_s > within_s:
            return took_s, left
        await asyncio.sleep(POLL_S)


def beyond(held: Held, before: Held) -> Held:
    """What is held now and was not before, without pages."""
    more = {
        name: {
            k: v for k, n in what.items() if k != "pages" and (v := n - before.get(name, {}).get(k, 0)) > 0
        }
        for name, what in held.items()
    }
    return {name: rest for name, rest in more.items() if rest}
