"""Properties of protocol §10, by name, on states and on edges of the model.

Each says what must hold, never how the table achieves it. Must never look into the core's objects.
"""

from __future__ import annotations

from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.explore import process as pr
from pdjax.sim.explore import telling, upkeep
from pdjax.sim.explore.parts import LIVE, B, F, Move, N, S, State, T, W
from pdjax.sim.explore.world import World

PROPERTIES = {
    "S1": "bytes and pages have one owner: what is registered belongs to one live room of P, pages to one room of D"
    " that pulls or decodes",
    "S2": "D succeeds only when every part of this attempt has arrived and its own pages hold it",
    "S3": "released exactly once: P's budget is charged with exactly the live rooms' bytes and limbo",
    "S4": "a uuid is registered once; bytes that a pull may still read stay registered or charged",
    "S5": "a message of another attempt, digest, life or peer changes no record and creates none; a leg leaves one",
    "S6": "states move only along the table, Success and Failed absorb, no event is illegal",
    "S10": "no hello of a D that runs another model binds a room (the registry is the first line, and not modelled)",
    "S11": "no event makes a handler raise",
    "S13": "D's success is of its own request's KV, and P's success of an attempt that D has committed",
    "S17": "nothing is prefilled or registered without budget, nothing pulled without pages, no limit is exceeded",
    "S18": "a message handled twice leaves what it left the first time",
    "S12": "a hello that came early is kept only while its leg is late, and whatever is kept is forgotten in the end",
    "V1": "a client whose room has ended has its answer; a room that is live has a timer that ends it, which no message"
    " puts off",
    "V2": "what P keeps for an ended room, and what D repeats, has a timer that ends it; timers alone free everything",
    "V4": "a gated P takes budget only for a room that a D has asked for",
    "V7": "where nothing is lost, messages alone end everything, without any timer; P answers what D asks and says, and tells what D cannot know; a newer"
    " life ends what waits for the older one",
    "V10": "each timer of protocol §7 runs in the states that §7 names, and ends the room when it fires; a room whose leg may"
    " still come is not given up",
}

NOT_HERE = {
    "S7": "the manifest's part set is one value here; sets of parts are compared in unit tests and the simulator",
    "S8": "ids are not encoded here (wire tests)",
    "S9": "one rank",
    "S14": "one host per role",
    "S15": "there is no time here",
    "S16": "slots are the page allocator's (simulator)",
    "V3, V5, V6, V8, V9, V11, V12": "bounded times, queues, registry and drain need the simulator's clock",
    "V10, order": "which timer fires first is what this model assumes (see ASSUMPTIONS), not what it proves",
}

_ORDER = {N: (B, F), B: (W, F), W: (T, F), T: (S, F), S: (N,), F: (N,)}
# A lease does not end a request: the peer renews it for as long as it lives.
FRAMES = ("deliver", "copy", "stamp")
_ENDING = {t.SENDER: {"request", "bootstrap"}, t.RECEIVER: {"request", "bootstrap", "transfer"}}


class Checker:
    """Evaluates the properties; what concerns one process is computed once for each of its states."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._nodes: dict[tuple[str, int], list[str]] = {}
        self._owes: dict[tuple[Any, ...], list[str]] = {}
        self._twice: dict[tuple[str, int, pr.Op], list[str]] = {}

    # ---------------------------------------------------------------- states

    def state(self, state: State) -> list[str]:
        world = self.world
        found: list[str] = []
        for i, name in enumerate(world.nodes):
            key = (name, state[i])
            known = self._nodes.get(key)
            if known is None:
                known = self._nodes[key] = self._node(name, world.parts.things[state[i]])
            found += known
        found += self._bytes(state)
        found += self._pages(state)
        found += self._clients(state)
        return found

    def _node(self, name: str, node: pr.Frozen) -> list[str]:
        if not node[pr.UP]:
            return []
        return self._sender(name, node) if node[pr.ROLE] == t.SENDER else self._receiver(name, node)

    def _sender(self, name: str, node: pr.Frozen) -> list[str]:
        found = []
        charges = sum(r[pr.S_CHARGED] for r in node[pr.ROOMS]) + sum(x[5] for x in node[pr.LIMBO])
        if charges != node[pr.CHARGED]:
            found.append(
                f"S3: {name}'s budget is charged {node[pr.CHARGED]}, its rooms and limbo hold {charges}"
            )
        if node[pr.CHARGED] > max(self.world.config.budget_rooms, 1):
            found.append(f"S17: {name}'s budget is exceeded")
        if any(not x[1] for x in node[pr.LIMBO]):
            found.append(f"S1: {name} keeps bytes in limbo for nobody")
        early = dict(node[pr.EARLY])
        for r in node[pr.ROOMS]:
            room, state = r[pr.S_ROOM], r[pr.S_STATE]
            if state in (W, T) and not r[pr.S_CHARGED]:
                found.append(f"S17: room {room} of {name} works without budget")
            if state not in (W, T) and r[pr.S_CHARGED]:
                found.append(f"S3: room {room} of {name} has ended or not begun and is still charged")
            if self.world.config.gated and state in (W, T) and not r[pr.S_PEER]:
                found.append(f"V4: gated {name} holds budget for room {room}, and no D has come")
            if state != T and r[pr.S_OFFER] == 2:
                found.append(f"S3: room {room} of {name} has ended and keeps its packed arrays")
            if state == T and (not r[pr.S_UUID] or not r[pr.S_OFFER]):
                found.append(f"S4: room {room} of {name} offers nothing")
            if state == T and not r[pr.S_REGISTERED] and r[pr.S_PEER]:
                found.append(f"S4: room {room} of {name} is bound and its bytes are not registered")
            if state not in (T, S, F) and r[pr.S_UUID]:
                found.append(f"S4: room {room} of {name} has a uuid too early")
            found += self._timed(name, t.SENDER, room, state, r[pr.S_TIMERS])
            found += upkeep.wrong_timers(name, room, r[pr.S_TIMERS], upkeep.sender_timers(self.world, r))
            if ("hello", r[pr.S_DIGEST]) in {(e[0], e[4]) for e in early.get(room, ())}:
                found.append(f"S12: {name} keeps a hello that came early for room {room}, whose leg has come")
        return found

    def _receiver(self, name: str, node: pr.Frozen) -> list[str]:
        found = []
        for r in node[pr.ROOMS]:
            room, state = r[pr.R_ROOM], r[pr.R_STATE]
            if state == B and r[pr.R_CANDIDATES] and all(c[2] for c in r[pr.R_CANDIDATES]):
                found.append(f"V7: room {room} of {name} waits, and nobody is left who could have it")
            if not r[pr.R_ATTEMPT]:
                found.append(f"S5: room {room} of {name} has no attempt of its own")
            if state in (W, T, S) and not r[pr.R_BOUND]:
                found.append(f"S5: room {room} of {name} is bound to nobody")
            if state == T and not r[pr.R_MANIFEST]:
                found.append(f"S2: room {room} of {name} pulls without a manifest")
            if bool(r[pr.R_NOTICES]) != ("notice" in r[pr.R_TIMERS]):
                found.append(f"V2: room {room} of {name} has a notice without a timer, or the reverse")
            if state in (B, W) and r[pr.R_PULLING]:
                found.append(f"S2: room {room} of {name} pulls before its start")
            found += self._timed(name, t.RECEIVER, room, state, r[pr.R_TIMERS])
            found += upkeep.wrong_timers(name, room, r[pr.R_TIMERS], upkeep.receiver_timers(r))
        return found

    def _timed(self, name: str, role: str, room: int, state: int, timers: tuple[str, ...]) -> list[str]:
        if state in LIVE and not _ENDING[role] & set(timers):
            return [f"V1: room {room} of {name} is live and no timer ends it"]
        if state in (S, F) and "tombstone" not in timers:
            return [f"V2: room {room} of {name} is a tombstone for ever"]
        return []

    def _bytes(self, state: State) -> list[str]:
        """S1, S4: who owns what P has registered, and whether bytes under a pull are paid for."""
        world, found = self.world, []
        env = world.env(state)
        for r in env.regs:
            node = world.node(state, r.p)
            room = pr.room_of(node, r.room)
            holds = bool(room) and room[pr.S_UUID] == r.uuid and node[pr.LIFE] == r.p_life  # type: ignore[index]
            if r.stage == "open" and not (holds and room[pr.S_STATE] == T):  # type: ignore[index]
                found.append(f"S1: uuid {r.uuid:x} is registered and belongs to no live room of {r.p}")
            if holds and room[pr.S_STATE] == T and r.stage == "empty":  # type: ignore[index]
                found.append(f"S4: uuid {r.uuid:x} is withdrawn under its live room")
        for pull in env.pulls:
            record = pr.room_of(world.node(state, pull.d), pull.room)
            if pull.stage not in ("queued", "arrived") and not (
                record and record[pr.R_ATTEMPT] == pull.attempt
            ):
                found.append(f"S4: {pull.d} has forgotten room {pull.room} under its pull")
            if pull.stage not in ("reading", "hung") or not world.alive(state, pull.p, pull.p_epoch):
                continue
            reg = next((r for r in env.regs if r.uuid == pull.uuid), None)
            if reg is None or reg.stage == "closed" or (reg.stage == "open" and pull.stage == "hung"):
                continue
            node = world.node(state, pull.p)
            charged = any(x[4] == pull.uuid for x in node[pr.LIMBO]) or any(
                r[pr.S_UUID] == pull.uuid and r[pr.S_CHARGED] for r in node[pr.ROOMS]
            )
            if not charged and pull.stage == "reading" and not (reg.waived and pull.abandoned):
                found.append(f"S4: a pull of uuid {pull.uuid:x} is in flight and nothing is charged for it")
        return found

    def _pages(self, state: State) -> list[str]:
        world, found = self.world, []
        env = world.env(state)
        for d in world.config.decodes:
            owners = [x for x in env.pages if x[0] == d]
            if len(owners) > world.config.pool_rooms:
                found.append(f"S17: {d} has given more pages than it has")
            for _, room, attempt in owners:
                record = pr.room_of(world.node(state, d), room)
                pulling = record and record[pr.R_ATTEMPT] == attempt and record[pr.R_STATE] == T
                if not pulling and attempt not in env.committed:
                    found.append(f"S1: pages of {d} belong to attempt {attempt:x}, which has ended")
            if not world.node(state, d)[pr.UP]:
                continue
            for r in world.node(state, d)[pr.ROOMS]:
                if r[pr.R_STATE] == T and (d, r[pr.R_ROOM], r[pr.R_ATTEMPT]) not in owners:
                    found.append(f"S17: room {r[pr.R_ROOM]} of {d} pulls into pages that it does not own")
        return found

    def _clients(self, state: State) -> list[str]:
        world, found = self.world, []
        env = world.env(state)
        for name, room, _, waits in env.legs:
            node = world.node(state, name)
            record = pr.room_of(node, room)
            at = record[1] if record else N
            due = at in (B, W) or (node[pr.ROLE] == t.RECEIVER and at == T)
            if waits and not due:
                found.append(f"V1: room {room} has ended on {name} and its client was never told")
            if due and not waits:
                found.append(f"V1: the client of room {room} on {name} was answered, and the room goes on")
        return found

    # ---------------------------------------------------------------- edges

    def move(self, before: State, move: Move) -> list[str]:
        found = list(move.errors)
        action = move.action
        env = self.world.env(before)
        for line in move.lines:
            if line.source != line.target and (
                line.target not in _ORDER[line.source]
                or (line.target == N and line.event != "tombstone_timer")
            ):
                names = t.STATE_NAMES
                found.append(f"S6: {line.role} {names[line.source]} → {names[line.target]} on {line.event}")
            if line.event.startswith("leg") and line.target == N:
                found.append(f"S5: a leg of room {line.room} leaves no record: its duplicate would be taken")
            if (
                line.role == t.SENDER
                and line.target == S != line.source
                and line.attempt not in env.committed
            ):
                found.append(f"S13: room {line.room} is a success on P, and no D has committed it")
            if line.role == t.RECEIVER and line.target == S != line.source:
                found += self._commit(before, line)
        if move.lines or action[0] in FRAMES:
            found += self._owed(before, move)
        if action[0] in ("deliver", "copy"):
            _, src, dst, (epoch, message) = action
            found += self._foreign(before, dst, src, epoch, message, move.lines)
            found += self._again(before, dst, ("frame", src, epoch, message))
        return found

    def _owed(self, before: State, move: Move) -> list[str]:
        """What the process of this move owes its peers: the same for the same step of the same process."""
        action = move.action
        name = str(action[2] if action[0] in FRAMES else action[1])
        at = self.world.index[name]
        key = (action, before[at], move.state[at])
        known = self._owes.get(key)
        if known is None:
            owed = upkeep.of_sender if name in self.world.config.prefills else telling.of_receiver
            known = self._owes[key] = [] if move.errors else owed(self.world, before, name, move)
        return known

    def _commit(self, before: State, line: Any) -> list[str]:
        """S2, S13 for a success of D: from the transport's and the pool's point of view."""
        env = self.world.env(before)
        pull = next((x for x in env.pulls if (x.room, x.attempt) == (line.room, line.attempt)), None)
        if pull is None or pull.stage != "arrived":
            return [f"S2: room {line.room} succeeds before its parts have arrived"]
        if (pull.d, pull.room, pull.attempt) not in env.pages:
            return [f"S2: room {line.room} succeeds in pages that it does not own"]
        record = pr.room_of(self.world.node(before, pull.d), line.room)
        reg = next((r for r in env.regs if r.uuid == pull.uuid), None)
        if reg is None or record is None or reg.digest != record[pr.R_DIGEST]:
            return [f"S13: room {line.room} succeeds with the KV of another request"]
        return []

    def _foreign(
        self, before: State, dst: str, src: str, epoch: int, message: tuple[Any, ...], lines: list[Any]
    ) -> list[str]:
        """S5. The line of the message itself is the one of its own event and room."""
        record = pr.room_of(self.world.node(before, dst), message[1])
        binds = any({"bind", "register"} & set(x.effects) for x in lines if x.event == "hello")
        if binds and message[5] != self.world.ps.fingerprint(dst):
            return [f"S10: a hello of {src}, which runs another model, binds room {message[1]}"]
        mine = [x for x in lines if x.event == message[0] and x.room == message[1]]
        changed = any(x.source != x.target for x in mine)
        if not changed:
            return []
        what = f"{message[0]} of attempt {message[2]:x} from {src}"
        if record is None:
            return [f"S5: {what} created a record on {dst}"]
        if self.world.node(before, dst)[pr.ROLE] == t.RECEIVER:
            if record[pr.R_ATTEMPT] != message[2]:
                return [f"S5: {what} moved room {message[1]} of another attempt"]
            if record[pr.R_BOUND] not in ("", src) or (
                record[pr.R_BOUND] and epoch < record[pr.R_BOUND_EPOCH]
            ):
                return [f"S5: {what} moved a room that is bound to another P or life"]
            return []
        digest = {"hello": 4, "abort": 5}.get(message[0])
        own = (record[pr.S_PEER], record[pr.S_ATTEMPT]) == (src, message[2])
        if digest is not None and message[digest] != record[pr.S_DIGEST] and not own:
            return [f"S5: {what} is about another prompt and moved room {message[1]}"]
        if record[pr.S_PEER] and (
            message[2] < record[pr.S_ATTEMPT]
            or (message[2] == record[pr.S_ATTEMPT] and src != record[pr.S_PEER])
        ):
            return [f"S5: {what} moved room {message[1]}, which has a newer attempt or another D"]
        return []

    def _again(self, before: State, dst: str, op: pr.Op) -> list[str]:
        """S18: the same frame once more changes nothing of what the process holds."""
        key = (dst, before[self.world.index[dst]], op)
        known = self._twice.get(key)
        if known is None:
            first = self.world.outcome(*key)
            second = self.world.ps.step(dst, first.state, op)
            known = []
            if second.error:
                known = [second.error]
            elif second.state != first.state:
                known = [f"S18: {op[3][0]} handled twice on {dst} is not the same as once"]
            self._twice[key] = known
        return known


def forgotten(world: World, state: State) -> bool:
    """Quiescent, and nothing is remembered either: no record, no early entry."""
    nodes = (world.node(state, name) for name in world.nodes)
    kept = (n[pr.UP] and (n[pr.ROOMS] or (n[pr.ROLE] == t.SENDER and n[pr.EARLY])) for n in nodes)
    return not any(kept) and quiescent(world, state)


def quiescent(world: World, state: State) -> bool:
    """Nothing belongs to anybody but tombstones and early entries; down processes hold nothing."""
    env = world.env(state)
    if env.pulls or env.pages or any(w for *_, w in env.legs) or any(r.stage == "open" for r in env.regs):
        return False
    for name in world.nodes:
        node = world.node(state, name)
        if not node[pr.UP]:
            continue
        if any(r[1] in LIVE for r in node[pr.ROOMS]):
            return False
        if node[pr.ROLE] == t.SENDER:
            if node[pr.CHARGED] or node[pr.LIMBO]:
                return False
        elif any(r[pr.R_NOTICES] for r in node[pr.ROOMS]):
            return False
    return True
