"""What makes a process's own work hard: pages that others hold, and pieces of work that raise once.

The same for a simulated node and a real one: both have these parts. Must never be called but on the thread that owns
the pages (``PageHold``) or before the work begins (``arm_error``).
"""

from __future__ import annotations

from typing import Any, Protocol

INJECTED = "injected by the trace"
STOLEN_TOKEN = 1 << 62  # owner of the pages that a ``pages`` step holds


class Injected(RuntimeError):
    """The error that an ``error`` step raises."""


class Parts(Protocol):
    """What one process, simulated or real, has of its own."""

    @property
    def runner(self) -> Any: ...

    @property
    def scheduler(self) -> Any: ...

    @property
    def manager(self) -> Any: ...


class Workplace(Parts, Protocol):
    """Those parts with the transport as the manager sees it."""

    @property
    def transport(self) -> Any: ...


class PageHold:
    """Pages of one pool that are taken away from its requests. taken: how many."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._holds = 0
        self.taken = 0

    def until(self, free: int | None) -> bool:
        """Take pages until ``free`` remain; None: give them back. False: nothing to do."""
        if free is None:
            return self._give_back()
        n = self._cache.available_pages() - free
        if n <= 0:
            return False
        self._cache.acquire(STOLEN_TOKEN + self._holds, (), n)  # like any request: what is cached makes room
        self._holds += 1
        self.taken += n
        return True

    def _give_back(self) -> bool:
        if not self.taken:
            return False
        for i in range(self._holds):
            self._cache.release(STOLEN_TOKEN + i, ())
        self.taken = self._holds = 0
        return True


def arm_error(place: Workplace, where: str, room: int | None) -> None:
    """The next piece of that work (for that room) raises, once."""
    owner = place.transport if where in ("register", "pull") else place.runner
    name = {"register": "offer"}.get(where, where)
    original = getattr(owner, name)
    armed = True

    def work(*args: Any, **kwargs: Any) -> Any:
        nonlocal armed
        if armed and (room is None or room in _rooms_of(place, where, args)):
            armed = False
            raise Injected(f"{INJECTED}: {where}")
        return original(*args, **kwargs)

    setattr(owner, name, work)


def _rooms_of(place: Workplace, where: str, args: tuple[Any, ...]) -> list[int]:
    """The rooms that this piece of work is for."""
    scheduler, manager = place.scheduler, place.manager
    if where in ("prefill", "gather"):
        head = scheduler.prefilling.head()
        return [head.req.room] if head is not None and head.req.room is not None else []
    if where == "register":
        return [r.room for r in list(manager.sender.rooms.values()) if r.uuid == args[1]]
    if where == "pull":
        return rooms_pulling(manager, args[2])
    if where == "scatter":
        pages = list(args[0])
        return [s.req.room for s in scheduler.in_flight if list(s.req.pages[: len(pages)]) == pages]
    return [s.req.room for s in scheduler.running if s.req.room is not None]


def rooms_pulling(manager: Any, uuid: int) -> list[int]:
    """D: the rooms whose accepted manifest names this registration."""
    rooms = list(manager.receiver.rooms.values())
    return [r.room for r in rooms if r.manifest is not None and r.manifest.uuid == uuid]
