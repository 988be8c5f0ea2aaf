"""What makes a node's own work hard: pages that others hold, and pieces of work that raise once."""

from __future__ import annotations

from typing import Any

from pdjax.sim.node import Node

INJECTED = "injected by the trace"
STOLEN_TOKEN = 1 << 62  # owner of the pages that a ``pages`` step holds


class Injected(RuntimeError):
    """The error that an ``error`` step raises."""


def hold_pages(node: Node, free: int | None) -> bool:
    """Take pages until ``free`` remain; None: give them back. False: nothing to do."""
    cache = node.scheduler.cache
    if free is None:
        if not node.pages_taken:
            return False
        for i in range(node.page_holds):
            cache.release(STOLEN_TOKEN + i, ())
        node.pages_taken = node.page_holds = 0
        node.wake_scheduler()
        return True
    n = cache.available_pages() - free
    if n <= 0:
        return False
    cache.acquire(STOLEN_TOKEN + node.page_holds, (), n)  # like any request: what is cached makes room
    node.page_holds += 1
    node.pages_taken += n
    return True


def arm_error(node: Node, where: str, room: int | None) -> None:
    """The next piece of that work (for that room) raises, once."""
    owner: Any = node.transport if where in ("register", "pull") else node.runner
    name = {"register": "offer"}.get(where, where)
    original = getattr(owner, name)
    armed = True

    def work(*args: Any, **kwargs: Any) -> Any:
        nonlocal armed
        if armed and (room is None or room in _rooms_of(node, where, args)):
            armed = False
            raise Injected(f"{INJECTED}: {where}")
        return original(*args, **kwargs)

    setattr(owner, name, work)


def _rooms_of(node: Node, where: str, args: tuple[Any, ...]) -> list[int]:
    """The rooms that this piece of work is for."""
    scheduler, manager = node.scheduler, node.manager
    if where in ("prefill", "gather"):
        head = scheduler.prefilling.head()
        return [head.req.room] if head is not None and head.req.room is not None else []
    if where == "register":
        return [r.room for r in manager.sender.rooms.values() if r.uuid == args[1]]
    if where == "pull":
        return [
            r.room
            for r in manager.receiver.rooms.values()
            if r.manifest is not None and r.manifest.uuid == args[2]
        ]
    if where == "scatter":
        pages = list(args[0])
        queue = scheduler.in_flight  # type: ignore[attr-defined]
        return [s.req.room for s in queue if list(s.req.pages[: len(pages)]) == pages]
    return [s.req.room for s in scheduler.running if s.req.room is not None]
