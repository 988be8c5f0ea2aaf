"""A node as operators see it: its numbers, and its rooms with what each waits for.

From any thread, while the node serves. Must never hold the manager's lock for more than a few rooms, and must never
show a prompt or a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pdjax.core.outlook import RoomView
from pdjax.sched.disaggregation import Place, RoomTable
from pdjax.serve.numbers import Numbers

if TYPE_CHECKING:
    from pdjax.serve.node import Node


def numbers_of(node: Node) -> Numbers:
    stats = node.scheduler.stats()
    oldest_s = node.scheduler.oldest_s()
    queues = {name: stats[name] for name in oldest_s}
    counters: dict[str, Mapping[str, int]] = {
        "scheduler": {**node.scheduler.counts, "evicted_pages": stats["evicted_pages"]}
    }
    if node.router is not None:
        counters["router"] = dict(node.router.counters)
    if node.watchdog is not None:
        counters["watchdog"] = dict(node.watchdog.counters)
    shared: dict[str, Any] = {
        "instance_id": node.instance_id,
        "epoch": node.epoch,
        "queued": stats["queued"],
        "queues": queues,
        "oldest_s": oldest_s,
        "used_pages": stats["used_pages"],
        "free_pages": stats["free_pages"],
        "cached_pages": stats["cached_pages"],
        "page_tokens": node.args.page_size,
        "counters": counters,
    }
    manager, transport, channel, registry = node.manager, node.transport, node.channel, node.registry
    if manager is None or transport is None or channel is None or registry is None:
        return Numbers(**shared)
    moved = transport.counters()
    counters |= {
        "driver": dict(manager.counters.counts),
        "transport": moved,
        "channel": channel.counters.as_dict(),
        "registry": dict(registry.counters),
    }
    budget, slots = manager.sender.budget, manager.host_slots
    return Numbers(
        **shared,
        tally=manager.tally,
        budget_bytes=(budget.charged_bytes, budget.limit_bytes),
        host_slot_bytes={"held": slots.held_bytes, "free": slots.free_bytes} if slots is not None else {},
        limbo_entries=len(manager.sender.limbo),
        early_entries=manager.sender.n_early,
        tombstones=len(manager.rooms) - manager.n_live,
        pulls=moved["pulls_live"],
        registered_bytes=moved["registered_bytes"],
        graveyard_bytes=moved["graveyard_bytes"],
        compatible_peers=registry.membership.compatible or 0,
        driver_longest_turn_s=manager.longest_turn_s,
    )


def rooms_of(node: Node, limit: int, room: int | None) -> dict[str, Any]:
    """The body of /debug/rooms. room: only that one, also when it has ended."""
    manager = node.manager
    about = {"role": node.role, "instance_id": node.instance_id, "epoch": str(node.epoch)}
    if manager is None or not isinstance(node.scheduler, RoomTable):
        return {**about, "rooms": [], "live": 0, "left_out": 0}
    if room is not None:
        found = manager.view(room)
        shown = [] if found is None else [_described(found, node.scheduler.place(room))]
        return {**about, "rooms": shown}
    views, n_live = manager.views(limit)
    budget = manager.sender.budget
    return {
        **about,
        "live": n_live,
        "left_out": max(n_live - limit, 0),
        "rooms": [_described(view, node.scheduler.place(view.room)) for view in views],
        **manager.remains(limit),
        "unpulled": {"charged_bytes": budget.charged_bytes, "limit_bytes": budget.limit_bytes},
        "pages": {name: node.scheduler.stats()[f"{name}_pages"] for name in ("used", "free", "cached")},
    }


def _described(view: RoomView, place: Place | None) -> dict[str, Any]:
    """place is None when the request has left the scheduler (P: its first token is out) or never was there."""
    stands = (
        None
        if place is None
        else {"queue": place.queue, "queue_s": round(place.queue_s, 3), "pages": place.pages}
    )
    return {"says": sentence(view, place), "scheduler": stands, **view.to_json()}


def sentence(view: RoomView, place: Place | None) -> str:
    """One line for a person: what would take the room on, what that lacks, and which timer ends it."""
    waits = []
    for wait in view.waits_for:
        lacks = f" ({'; '.join(wait.needs.values())})" if wait.needs else ""
        waits.append(f"{wait.event} → {wait.to}{lacks}")
    asks = f"asks {', '.join(view.asking)}" if view.asking else "no peer yet"
    text = f"{view.state}{f' ({view.reason})' if view.reason else ''} for {view.state_s:g} s"
    text += f", waits for {' or '.join(waits) or 'nothing'}; {f'peer {view.peer}' if view.peer else asks}"
    if place is not None:
        text += f"; stands in {place.queue} for {place.queue_s:.3g} s"
    if view.ends is not None:
        reason = f" ({view.ends.reason})" if view.ends.reason else ""
        text += f"; in {view.ends.in_s:g} s timer {view.ends.timer} → {view.ends.to}{reason}: {view.ends.why}"
    return text
