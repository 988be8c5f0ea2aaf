"""What a process may do next by itself: scheduler, aborts, timers. Which of it the world allows is ``world.py``'s.

Must never look beyond the one process.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdjax.sim.explore import process as pr
from pdjax.sim.explore.config import Config
from pdjax.sim.explore.parts import END, FAULT, LIVE, TIMER, WORK, Action, B, W
from pdjax.sim.explore.process import Op


def _ends(config: Config, side: str, name: str, room: int) -> Iterator[tuple[Action, str, Op]]:
    if side in config.aborts:
        yield ("abort_local", name, room), END, ("local", room, "abort_local")
    if side in config.errors:
        yield ("engine_error", name, room), FAULT, ("local", room, "engine_error")


def _timers(config: Config, name: str, room: int, armed: tuple[str, ...]) -> Iterator[tuple[Action, str, Op]]:
    for kind in armed:
        if kind in config.timers:
            yield ("timer", name, room, kind), TIMER, ("timer", room, kind)
        if kind == "notice" and "notice_life" in config.timers:
            yield ("timer", name, room, "notice_life"), TIMER, ("notice_life", room)


def sender_ops(config: Config, name: str, node: pr.Frozen) -> Iterator[tuple[Action, str, Op]]:
    for r in node[pr.ROOMS]:
        room, state = r[pr.S_ROOM], r[pr.S_STATE]
        if state == B:
            yield ("admit", name, room), WORK, ("admit", room)
        if state == W:
            yield ("kv_ready", name, room), WORK, ("kv_ready", room)
        if state in LIVE:
            yield from _ends(config, "p", name, room)
        yield from _timers(config, name, room, r[pr.S_TIMERS])
    if "early" in config.timers:
        for room, entries in node[pr.EARLY]:
            for _, peer, _, attempt, digest in entries:
                yield ("early", name, room), TIMER, ("early", room, (peer, attempt, digest))
    if "limbo" in config.timers:
        for room, peer, attempt, *_ in node[pr.LIMBO]:
            yield ("limbo", name, room, peer, attempt), TIMER, ("limbo", room, peer, attempt)


def receiver_ops(config: Config, name: str, node: pr.Frozen) -> Iterator[tuple[Action, str, Op]]:
    known: set[str] = set()
    for r in node[pr.ROOMS]:
        room, state = r[pr.R_ROOM], r[pr.R_STATE]
        known |= {c[0] for c in r[pr.R_CANDIDATES]} | {n[0] for n in r[pr.R_NOTICES]} | {r[pr.R_BOUND]}
        if state == W and r[pr.R_MANIFEST]:
            yield ("start", name, room), WORK, ("start", room)
        if state in LIVE:
            yield from _ends(config, "d", name, room)
        yield from _timers(config, name, room, r[pr.R_TIMERS])
    if "silence" in config.timers:
        for peer, waiting, _ in node[pr.PEERS]:
            if waiting:
                yield ("silence", name, peer), TIMER, ("down", peer, "peer_silence")
    for peer in sorted(known - {""}):
        if any(p == peer for p, _ in config.crashes):
            yield ("refused", name, peer), WORK, ("down", peer, "refused")
