"""What each action of a file means on real processes (trace-format, steps). The scenario says when.

Must never hurt a process that the fleet did not start, nor act on one that is not there: such a step finds no target.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from pdjax.campaign.client import HttpRouter
from pdjax.campaign.express import senders
from pdjax.campaign.fleet import REGISTRY, Fleet, Seat
from pdjax.campaign.reference import Reference
from pdjax.campaign.remote import Remote
from pdjax.sim.router import SIDES
from pdjax.sim.trace_types import Trace


class Actions(ABC):
    """One coroutine for each action: (index of the step, its value) → False when it found no target."""

    trace: Trace
    fleet: Fleet
    router: HttpRouter
    reference: Reference
    slower: float
    _rules: dict[str, list[tuple[int, Mapping[str, Any]]]]

    @abstractmethod
    def now_ms(self) -> float: ...

    @abstractmethod
    async def _until(self, at_ms: float) -> None: ...

    @abstractmethod
    def _soon(self, work: Any) -> None: ...

    @abstractmethod
    def _stand(self) -> None: ...

    @abstractmethod
    def _move_on(self) -> None: ...

    @abstractmethod
    def noted(self, event: str, room: int | None, node: str) -> None: ...

    @abstractmethod
    async def prepare(self, seat: Seat) -> None: ...

    @abstractmethod
    async def _send_rules(self, remote: Remote, messages: list[Any], transfers: list[Any]) -> None: ...

    def _remote(self, name: str) -> Remote | None:
        """None: the process is dead."""
        seat = self.fleet.seats[name]
        return seat.remote if seat.alive else None

    async def _request(self, index: int, value: Mapping[str, Any]) -> None:
        prompt, sampling, right = await self.reference.of(value, self.trace)
        self.router.request(value, prompt, sampling, right)

    async def _abort(self, index: int, value: Mapping[str, Any]) -> bool:
        return await self.router.abort(value["rid"], tuple(value.get("to", SIDES)))

    async def _disconnect(self, index: int, value: Mapping[str, Any]) -> bool:
        return self.router.disconnect(value["rid"], tuple(value.get("to", SIDES)))

    async def _message(self, index: int, value: Mapping[str, Any]) -> None:
        await self._rule("message", index, value, senders(self.trace, value["match"]))

    async def _transfer(self, index: int, value: Mapping[str, Any]) -> None:
        names = [name for name in self.fleet.instances if name[0] == "p"]
        await self._rule("transfer", index, value, [n for n in names if value["match"].get("from", n) == n])

    async def _rule(self, kind: str, index: int, value: Mapping[str, Any], names: list[str]) -> None:
        rule = (index, value)
        if rule in self._rules[kind]:
            return  # of time 0: it was there before the first request
        self._rules[kind].append(rule)
        for name in names:
            remote = self._remote(name)
            if remote is not None:
                rules = {"message": [], "transfer": [], kind: [rule]}
                await self._send_rules(remote, rules["message"], rules["transfer"])

    async def _inject(self, index: int, value: Mapping[str, Any]) -> bool:
        if value["to"] == REGISTRY:
            return await self._inject_registry(bytes.fromhex(value["bytes"]))
        to = self._remote(value["to"])
        if to is None:
            return False
        source = self._remote(value["from"]) if "from" in value else None
        if "bytes" in value:
            frame = value["bytes"]
        elif source is None:
            return False
        else:
            frame = await source.do("forge", to=value["to"], message=value["message"])
        if source is not None and value["from"][0] != value["to"][0]:
            is_d = value["from"][0] == "d"
            sender = await to.do("address_of", peer=value["from"]) if is_d else await source.do("address")
        elif value["to"][0] == "p":
            sender = "stranger:1"
        else:
            first = next(name for name in self.fleet.instances if name[0] == "p")
            remote = self._remote(first)
            sender = await remote.do("address") if remote is not None else "127.0.0.1:1"
        await to.do("inject", sender=sender, frame=frame)
        return True

    async def _inject_registry(self, data: bytes) -> bool:
        url = self.fleet.seats[REGISTRY].url
        await self.fleet.http.put(f"{url}/route", content=data, headers={"content-type": "application/json"})
        return True

    async def _error(self, index: int, value: Mapping[str, Any]) -> bool:
        remote = self._remote(value["node"])
        if remote is None:
            return False
        await remote.do("error", where=value["in"], room=value.get("room"))
        return True

    async def _pages(self, index: int, value: Mapping[str, Any]) -> bool:
        remote = self._remote(value["node"])
        return bool(remote is not None and await remote.do("pages", free=value["free"]))

    async def _crash(self, index: int, name: str) -> bool:
        killed = await asyncio.to_thread(self.fleet.kill, name)
        if killed:
            self.noted("crashed", None, name)
        return killed

    async def _restart(self, index: int, name: str) -> bool:
        seat = self.fleet.seats[name]
        if seat.alive:
            return False
        self._stand()
        try:
            await self.fleet.start(name)
            if name != REGISTRY:
                await self.prepare(seat)
                await self.fleet.listed(name)  # no time at all in the simulator
        finally:
            self._move_on()
        self.noted("restarted", None, name)
        return True

    async def _stop(self, index: int, value: Mapping[str, Any]) -> bool:
        name = value["node"]
        if not self.fleet.stop(name):
            return False
        self._soon(self._go_on(name, self.now_ms() + value["for"]))
        return True

    async def _go_on(self, name: str, at_ms: float) -> None:
        try:
            await self._until(at_ms)
        finally:
            self.fleet.go_on(name)

    async def _drain(self, index: int, value: Mapping[str, Any]) -> bool:
        """POST /drain; what has not ended ``within`` ms is cut off, as by a supervisor's second signal."""
        name = value["node"]
        if not self.fleet.seats[name].alive:
            return False
        await self.fleet.drain(name)
        if "within" in value:
            # The supervisor's first, which changes nothing. Not later: two signals at once can come as one.
            self.fleet.terminate(name)
            self._soon(self._cut_off(name, self.now_ms() + value["within"]))
        return True

    async def _cut_off(self, name: str, at_ms: float) -> None:
        await self._until(at_ms)
        self.fleet.terminate(name)

    async def _partition(self, index: int, value: Mapping[str, Any]) -> None:
        for name, peer in (value["between"], value["between"][::-1]):
            remote = self._remote(name)
            if remote is not None:
                await remote.do("cut", peer=peer, for_s=value["for"] * self.slower / 1000)
