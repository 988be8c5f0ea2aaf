"""What makes a process's own work hard: pages that others hold, and pieces of work that raise once.

The same for a simulated node and a real one: both have these parts. Must never touch pages but on the thread that owns
them (``PageHold``), nor raise twice for an error that was armed once (``ArmedErrors``).
"""

from __future__ import annotations

import threading
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


class ArmedErrors:
    """Pieces of one process's work that will raise, each once. From any thread.

    However many are armed, each kind of work is wrapped once: a wrapper for each error would stay for ever, and a
    thousand of them are deeper than Python's stack.
    """

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._armed: list[tuple[str, int | None]] = []  # work, room
        self._wrapped: set[str] = set()

    def arm(self, where: str, room: int | None) -> None:
        """The next piece of that work (for that room; None: for any) raises Injected."""
        with self._lock:
            self._armed.append((where, room))
            if where not in self._wrapped:
                self._wrapped.add(where)
                self._wrap(where)

    def clear(self) -> None:
        """Nothing raises any more."""
        with self._lock:
            self._armed.clear()

    def _wrap(self, where: str) -> None:
        owner = self._place.transport if where in ("register", "pull") else self._place.runner
        name = {"register": "offer"}.get(where, where)
        original = getattr(owner, name)

        def work(*args: Any, **kwargs: Any) -> Any:
            if self._take(where, args):
                raise Injected(f"{INJECTED}: {where}")
            return original(*args, **kwargs)

        setattr(owner, name, work)

    def _take(self, where: str, args: tuple[Any, ...]) -> bool:
        """Whether this piece of work raises: the error armed last that fits is used up."""
        with self._lock:
            for armed in reversed(self._armed):
                kind, room = armed
                if kind == where and (room is None or room in _rooms_of(self._place, where, args)):
                    self._armed.remove(armed)
                    return True
        return False


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
