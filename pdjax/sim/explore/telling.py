"""What D owes the P that it has to do with: a word of its end, of another choice, of a room that it does not have (V7).

Written from the prose of protocol §3 and §5, never from the rows. Each function gives the breaches that ``props``
reports. Must never decide what is reachable.
"""

from __future__ import annotations

from typing import Any

from pdjax.core.room import Transition
from pdjax.sim.explore import process as pr
from pdjax.sim.explore.parts import LIVE, B, F, Move, N, S, State, T, W
from pdjax.sim.explore.upkeep import expired, reborn
from pdjax.sim.explore.world import World

UNTOLD_ENDS = {"peer_reborn", "no_candidate"}  # nobody is there to be told


def of_receiver(world: World, before: State, name: str, move: Move) -> list[str]:
    """Everything that one step of a D must not leave undone."""
    found = [x for line in move.lines for x in of_a_line(world, before, line, move)] + expired(move)
    if move.action[0] in ("deliver", "copy"):
        found += of_a_message(world, before, move)
    if move.action[0] in ("deliver", "copy", "stamp"):
        found += reborn(world, before, move.action[1], name, move)
    return found


def of_a_line(world: World, before: State, line: Transition, move: Move) -> list[str]:
    """One decision of a D: whom it must have told when the process is done."""
    name = _actor(move)
    old = pr.room_of(world.node(before, name), line.room)
    new = pr.room_of(world.node(move.state, name), line.room)
    if old is None or new is None or old[pr.R_ATTEMPT] != new[pr.R_ATTEMPT]:
        return []
    found = []
    told = {to for a, to, m in move.sent if a == name and m[0] in ("abort", "done") and m[1] == line.room}
    if line.source in LIVE and line.target in (S, F) and not _known_there(line, move):
        found += [
            f"V7: {name} does not tell {p} that room {line.room} has ended" for p in _concerned(new) - told
        ]
    if line.source == B and new[pr.R_BOUND] and line.event in ("pending", "ready"):
        others = _asked(new) - {new[pr.R_BOUND]}
        found += [f"V7: {name} does not tell {p} that another has room {line.room}" for p in others - told]
    if line.event == "peer_reborn" and line.target == F != line.source and new[pr.R_BOUND] != move.action[1]:
        found.append(f"S5: a new life of {move.action[1]} ends room {line.room} of {name}, which another has")
    if line.event in ("refused", "peer_silence"):
        peer = str(move.action[2])
        found += _gone(name, line, new, peer, dropped=peer in _asked(old) - _asked(new))
    if line.source == B and line.target == F and line.event in ("failed", "refused", "peer_silence"):
        left = _asked(new) - {move.action[2] if line.event != "failed" else move.action[1]}
        found += [f"V10: {name} gives room {line.room} up, which {p} may have" for p in left]
    if line.source == line.target == B and line.event in ("failed", "refused", "peer_silence"):
        left = _asked(new) & _asked(old) & {move.action[2] if line.event != "failed" else move.action[1]}
        mine = line.event != "failed" or new[pr.R_ATTEMPT] == move.action[3][1][2]
        found += [f"V7: {name} still asks {p}, which is out of the question" for p in left if mine]
    return found


def _gone(name: str, line: Transition, record: tuple[Any, ...], peer: str, dropped: bool) -> list[str]:
    """Nobody is there any more: a room that is bound to it ends, and a notice to a former candidate does. The one that
    is dropped by this very event is told: it may only be unheard."""
    if line.source in (W, T) and record[pr.R_BOUND] == peer:
        return [] if line.target == F else [f"V7: room {line.room} of {name} waits for {peer}, which is gone"]
    if dropped and line.target == B:
        told = any(n[0] == peer for n in record[pr.R_NOTICES])
        return [] if told else [f"V7: {name} does not tell {peer} that room {line.room} goes on without it"]
    fresh = line.source in LIVE and line.target == F
    if any(n[0] == peer for n in record[pr.R_NOTICES]) and not fresh:
        return [f"V2: {name} repeats its notice of room {line.room} to {peer}, which is gone"]
    return []


def _actor(move: Move) -> str:
    return str(move.action[2] if move.action[0] in ("deliver", "copy", "stamp") else move.action[1])


def _asked(record: tuple[Any, ...]) -> set[str]:
    return {c[0] for c in record[pr.R_CANDIDATES] if not c[2]}


def _concerned(record: tuple[Any, ...]) -> set[str]:
    return {record[pr.R_BOUND]} if record[pr.R_BOUND] else _asked(record)


def _known_there(line: Transition, move: Move) -> bool:
    """The end came from P, which knows that D is quiet; or nobody can be told."""
    if line.event in UNTOLD_ENDS:
        return True
    return line.event == "failed" and bool(move.action[3][1][3])


def of_a_message(world: World, before: State, move: Move) -> list[str]:
    """A message of P to a D that does not have this attempt, or has it with another P, or has left it."""
    _, src, dst, (epoch, message) = move.action
    node = world.node(before, dst)
    if epoch < dict(node[pr.LINKS]).get(src, 0):
        return []  # of a life that is over: dropped before it is read
    kind, room, attempt = message[:3]
    record = pr.room_of(node, room)
    told = {m[0] for a, to, m in move.sent if (a, to) == (dst, src) and m[1:3] == (room, attempt)}
    about = f"{kind} of room {room}, attempt {attempt:x}"
    if record is None or record[pr.R_ATTEMPT] != attempt:
        missing = _works(message) and "abort" not in told
        return [f"V7: {dst} does not tell {src} that it has no such room: {about}"] if missing else []
    state = record[pr.R_STATE]
    if told and _is_answer(message) and _state_after(world, move, dst, room) == state:
        return [f"S12: {dst} answers what is an answer of {src}: {about}"]
    if kind == "unknown" and state == B:
        return _unknown(world, record, dst, src, epoch, move)
    if kind in ("ready", "pending") and state in (B, W) and not _stranger(record, src):
        return _not_taken(world, record, dst, src, message, move)
    repeated = kind == "ready" and state == T and _same_offer(record, src, message)
    if repeated and _state_after(world, move, dst, room) == F:
        return [f"S18: {dst} ends its pull on a repetition of what it pulls: {about}"]
    if state == S and src == record[pr.R_BOUND] and "abort" in told:
        return [f"S6: {dst} has succeeded and tells its own {src} to forget: {about}"]
    missing_word = _missing_word(record, src, message) - told
    if missing_word:
        return [f"V7: {dst} does not say {missing_word.pop()} to {src}: {about}"]
    return _ended_notice(world, record, dst, src, message, move)


def _works(message: tuple[Any, ...]) -> bool:
    """P works, or has worked, for a room that it believes D to have."""
    return message[0] in ("ready", "pending") or (message[0] == "failed" and not message[3])


def _is_answer(message: tuple[Any, ...]) -> bool:
    """What protocol §3 says is never answered."""
    return message[0] in ("unknown", "done_ack") or (message[0] == "failed" and bool(message[3]))


def _state_after(world: World, move: Move, name: str, room: int) -> int:
    record = pr.room_of(world.node(move.state, name), room)
    return int(record[pr.R_STATE]) if record is not None else N


def _missing_word(record: tuple[Any, ...], src: str, message: tuple[Any, ...]) -> set[str]:
    """What a D that has this attempt must say to a P that still works for it: abort if it is not needed, done if it is."""
    state, kind = record[pr.R_STATE], message[0]
    if not _works(message):
        return set()
    if state != F and _stranger(record, src):
        return {"abort"}
    noticed = any(n[0] == src for n in record[pr.R_NOTICES])
    if state == F and (kind != "failed" or not noticed):  # an open notice is on its way (docs/decisions/0002)
        return {"abort"}
    again = kind == "failed" or (kind == "ready" and _same_offer(record, src, message))
    return {"done"} if state == S and src == record[pr.R_BOUND] and again else set()


def _same_offer(record: tuple[Any, ...], src: str, message: tuple[Any, ...]) -> bool:
    return bool(src == record[pr.R_BOUND] and record[pr.R_MANIFEST][:1] == message[3:4])


def _not_taken(
    world: World, record: tuple[Any, ...], dst: str, src: str, message: tuple[Any, ...], move: Move
) -> list[str]:
    """Whoever has the room is bound, so that no bootstrap timer runs; what it offers fits, or the room ends."""
    kind, room = message[:2]
    after = pr.room_of(world.node(move.state, dst), room)
    if after is None or after[pr.R_BOUND] != src:
        return [f"V10: {dst} goes on looking for a P, and {src} has room {room}"]
    fits = kind == "pending" or (message[4] == record[pr.R_DIGEST] and dst not in world.config.alien)
    if fits and after[pr.R_STATE] == F:
        return [f"S10: {dst} refuses the {kind} of {src} for room {room}, which is what it needs"]
    if not fits and after[pr.R_STATE] != F:
        return [f"S10: {dst} goes on with room {room}, whose ready of {src} is not what it needs"]
    return []


def _unknown(world: World, record: tuple[Any, ...], dst: str, src: str, epoch: int, move: Move) -> list[str]:
    """Protocol §3: only an unknown of a life newer than noted ends a room that is not bound."""
    noted = {c[0]: c[1] for c in record[pr.R_CANDIDATES] if not c[2]}
    after = pr.room_of(world.node(move.state, dst), record[pr.R_ROOM])
    ended = after is None or after[pr.R_STATE] == F
    if ended and epoch <= noted.get(src, epoch):
        return [f"V10: {dst} gives room {record[pr.R_ROOM]} up, whose leg may still come to {src}"]
    if not ended and epoch > noted.get(src, epoch):
        return [f"V7: {dst} waits for room {record[pr.R_ROOM]}, which has died with a life of {src}"]
    return []


def _stranger(record: tuple[Any, ...], src: str) -> bool:
    return src != record[pr.R_BOUND] if record[pr.R_BOUND] else src not in _asked(record)


def _ended_notice(
    world: World, record: tuple[Any, ...], dst: str, src: str, message: tuple[Any, ...], move: Move
) -> list[str]:
    """V2: a notice ends with its answer: done_ack of this uuid, failed(echo 1) while D is quiet."""
    kind = message[0]
    notice = next((n for n in record[pr.R_NOTICES] if n[0] == src), None)
    if notice is None:
        return []
    uuid = record[pr.R_MANIFEST][0] if record[pr.R_MANIFEST] else 0
    acked = kind == "done_ack" and notice[1] == "done" and message[3] == uuid
    fenced = kind == "failed" and message[3] and notice[1] == "abort" and not record[pr.R_PULLING]
    if not (acked or fenced) or notice[2] > move.action[3][0]:
        return []
    after = pr.room_of(world.node(move.state, dst), message[1])
    if after is not None and any(n[0] == src for n in after[pr.R_NOTICES]):
        return [f"V2: {dst} repeats its {notice[1]} of room {message[1]}, which {src} has answered"]
    return []
