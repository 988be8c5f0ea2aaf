"""What every process of the model owes all the time: timers, answers, and an end to what an older life left.

Written from the prose of protocol §3, §4 and §7, never from the rows. Each function gives the breaches that ``props``
reports. Must never decide what is reachable.
"""

from __future__ import annotations

from typing import Any

from pdjax.core import transitions as t
from pdjax.core.room import Transition
from pdjax.sim.explore import process as pr
from pdjax.sim.explore.parts import LIVE, B, F, Move, N, State, T
from pdjax.sim.explore.world import World

EXPIRES = {"request", "lease", "bootstrap", "transfer"}
ROOM_TIMERS = EXPIRES | {"hello", "tombstone"}
ENDS = {"abort_local", "engine_error"} | {f"expire_{kind}" for kind in EXPIRES}
ANSWERS = {
    "hello": {"unknown", "pending", "ready", "failed", "done_ack"},
    "done": {"done_ack"},
    "abort": {"failed"},
}


def of_sender(world: World, before: State, name: str, move: Move) -> list[str]:
    """Everything that one step of a P must not leave undone."""
    found = [x for line in move.lines for x in untold(world, before, line, move)] + expired(move)
    if move.action[0] in ("deliver", "copy"):
        found += unanswered(world, before, move) + rebound(world, before, name, move)
    if move.action[0] in ("deliver", "copy", "stamp"):
        found += reborn(world, before, move.action[1], name, move)
    return found


def sender_timers(world: World, r: tuple[Any, ...]) -> set[str]:
    """Protocol §7, column "rule", for P."""
    state, bound = r[pr.S_STATE], bool(r[pr.S_PEER])
    if state not in LIVE:
        return {"tombstone"}
    lease = {"lease"} if bound or state == T else set()
    gated = {"bootstrap"} if world.config.gated and state == B and not bound else set()
    return {"request"} | lease | gated


def receiver_timers(r: tuple[Any, ...]) -> set[str]:
    """Protocol §7, column "rule", and §3 for hello: from the first candidate on, until the room ends."""
    state = r[pr.R_STATE]
    if state not in LIVE:
        return {"tombstone"}
    own = {B: {"bootstrap"}, T: {"transfer"}}.get(state, set())
    return {"request"} | own | ({"hello"} if r[pr.R_CANDIDATES] else set())


def wrong_timers(name: str, room: int, armed: tuple[str, ...], due: set[str]) -> list[str]:
    """V10: no timer of §7 is missing, and none runs where it has nothing to end."""
    wrong = sorted((set(armed) & ROOM_TIMERS) ^ due)
    return [
        f"V10: the {kind} timer of room {room} on {name} is {'armed' if kind in armed else 'missing'}"
        for kind in wrong
    ]


def expired(move: Move) -> list[str]:
    """V10: a timer that fires ends the room (that it may fire at all is what arms it)."""
    if move.action[0] != "timer" or move.action[3] not in EXPIRES:
        return []
    _, name, room, kind = move.action
    if any(x.room == room and x.event == f"expire_{kind}" and x.target == F for x in move.lines):
        return []
    return [f"V10: the {kind} timer of room {room} on {name} fires and the room goes on"]


def unanswered(world: World, before: State, move: Move) -> list[str]:
    """V7: P answers every done and abort, and every hello but that of an attempt that is over (protocol §3)."""
    _, src, dst, (epoch, message) = move.action
    node = world.node(before, dst)
    if message[0] not in ANSWERS or epoch < dict(node[pr.LINKS]).get(src, 0):
        return []  # what is of a life that is over is dropped before it is read
    kinds = ANSWERS[message[0]]
    if message[0] == "hello":
        kinds = _answers_to_hello(world, pr.room_of(node, message[1]), dst, node[pr.LIFE], message)
    said = any((a, b) == (dst, src) and m[0] in kinds and m[2] == message[2] for a, b, m in move.sent)
    return [] if said or not kinds else [f"V7: {dst} does not answer {message[0]} of room {message[1]}"]


def _answers_to_hello(
    world: World, record: tuple[Any, ...] | None, p: str, life: int, message: tuple[Any, ...]
) -> set[str]:
    """By what P has of the room. A hello that acknowledges another life, or is of another request, must hear failed."""
    _, _, attempt, ack, digest, fingerprint = message
    if record is None:
        return {"unknown"} if ack == 0 else {"failed"}
    other = digest != record[pr.S_DIGEST] or (record[pr.S_PEER] and attempt != record[pr.S_ATTEMPT])
    if record[pr.S_STATE] in LIVE:
        if fingerprint != world.ps.fingerprint(p) or ack not in (0, world.ps.epoch(p, life)):
            return {"failed"}
        if record[pr.S_PEER] and digest == record[pr.S_DIGEST] and attempt < record[pr.S_ATTEMPT]:
            return set()  # of an attempt that is over
        return {"failed"} if other else {"ready"} if record[pr.S_STATE] == T else {"pending"}
    return {"failed"} if other or record[pr.S_STATE] == F else {"done_ack"}


def reborn(world: World, before: State, src: str, dst: str, move: Move) -> list[str]:
    """V2, V7: the first frame of a newer life ends what belonged to the older one."""
    old, new = world.node(before, dst), world.node(move.state, dst)
    known, epoch = dict(old[pr.LINKS]).get(src, 0), dict(new[pr.LINKS]).get(src, 0)
    if not known or known == epoch or move.errors:
        return []
    if new[pr.ROLE] == t.RECEIVER:
        rooms = [r for r in new[pr.ROOMS] if r[pr.R_BOUND] == src and 0 < r[pr.R_BOUND_EPOCH] < epoch]
        found = [
            f"V7: room {r[0]} of {dst} waits for a life of P that is over" for r in rooms if r[1] in LIVE
        ]
        held = [r[0] for r in new[pr.ROOMS] for n in r[pr.R_NOTICES] if n[0] == src and 0 < n[2] < epoch]
        return found + [
            f"V2: {dst} repeats its notice of room {room} to a life of P that is over" for room in held
        ]
    rooms = [r for r in new[pr.ROOMS] if r[pr.S_PEER] == src and r[pr.S_PEER_EPOCH] < epoch]
    found = [f"V7: room {r[0]} of {dst} works for a life of D that is over" for r in rooms if r[1] in LIVE]
    kept = [x for x in new[pr.LIMBO] if x[1] == src and x[3] < epoch]
    return found + [f"V2: {dst} keeps bytes of room {x[0]} for a life of D that is over" for x in kept]


def untold(world: World, before: State, line: Transition, move: Move) -> list[str]:
    """V7: P tells its D of an end that D has not brought about, and of a leg that a D has asked for early (protocol §3, §4)."""
    name = move.action[1]
    told = {(to, m[2]) for a, to, m in move.sent if a == name and m[1] == line.room}
    if line.event in ENDS and line.target == F and line.source in LIVE:
        record = pr.room_of(world.node(before, name), line.room)
        if record and record[pr.S_PEER] and (record[pr.S_PEER], record[pr.S_ATTEMPT]) not in told:
            return [f"V7: {name} does not tell {record[pr.S_PEER]} that room {line.room} has failed"]
    if line.event.startswith("leg") and line.source == N:
        early = dict(world.node(before, name)[pr.EARLY]).get(line.room, ())
        digest = next(
            (r[pr.S_DIGEST] for r in world.node(move.state, name)[pr.ROOMS] if r[0] == line.room), ""
        )
        newest = max((e for e in early if e[4] == digest), key=lambda e: e[3], default=None)
        if newest is not None and newest[0] == "hello" and (newest[1], newest[3]) not in told:
            return [f"V7: {name} does not tell {newest[1]}, which asked early, of room {line.room}"]
    return []


def rebound(world: World, before: State, name: str, move: Move) -> list[str]:
    """S5: a room of P that is bound to an attempt stays with it until it ends."""
    old, new = world.node(before, name), world.node(move.state, name)
    found = []
    for r in old[pr.ROOMS]:
        after = pr.room_of(new, r[pr.S_ROOM])
        if not r[pr.S_PEER] or after is None or after[pr.S_STATE] not in LIVE:
            continue
        if (after[pr.S_PEER], after[pr.S_ATTEMPT]) != (r[pr.S_PEER], r[pr.S_ATTEMPT]):
            found.append(f"S5: room {r[pr.S_ROOM]} of {name} goes over to another attempt")
    return found
