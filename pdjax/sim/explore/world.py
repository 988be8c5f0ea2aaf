"""The model around the processes: wire, transport, legs, scheduler, page pool, crashes, clocks without time.

A global state is a tuple of small numbers, each the name of a part: one for each process, one for each direction of
each wire, one for the rest. ``World.moves(state)`` lists everything that can happen next. The wire is a set of at most
``wire`` messages in each direction: it loses, duplicates (delivers and keeps) and reorders. Must never hold a rule of
the protocol: what a process does is ``process.py``'s, and that is the core's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.explore import process as pr
from pdjax.sim.explore.config import Config
from pdjax.sim.explore.ops import receiver_ops, sender_ops
from pdjax.sim.explore.parts import (
    FAULT,
    LEG,
    LIVE,
    MESSAGE,
    TIMER,
    WORK,
    Action,
    Env,
    Move,
    Pull,
    Reg,
    State,
    T,
    Table,
    client_told,
    in_order,
)  # fmt: skip
from pdjax.sim.explore.process import Op, Outcome, Processes


class World:
    """The transition system of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ps = Processes(config)
        self.nodes = config.nodes
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.pairs = [(a, b) for p in config.prefills for d in config.decodes for a, b in ((p, d), (d, p))]
        self.wire_at = {pair: len(self.nodes) + i for i, pair in enumerate(self.pairs)}
        self.env_at = len(self.nodes) + len(self.pairs)
        self.parts = Table()
        self.fallible = {n for n, _ in config.crashes}
        self._ops: dict[tuple[str, int], list[tuple[Action, str, Op]]] = {}
        self._outcomes: dict[tuple[str, int, Op], Outcome] = {}

    # ---------------------------------------------------------------- states

    def initial(self) -> State:
        legs = []
        for ask in self.config.asks:
            legs += [(ask.p, ask.room, 0, False), (ask.d, ask.room, 0, False)]
        env = Env(legs=tuple(sorted(set(legs))), crashes=tuple(sorted(self.config.crashes)))
        things = [self.ps.born(n, 1) for n in self.nodes] + [()] * len(self.pairs) + [env]
        return tuple(self.parts.id(x) for x in things)

    def node(self, state: State, name: str) -> pr.Frozen:
        return self.parts.things[state[self.index[name]]]  # type: ignore[no-any-return]

    def wire(self, state: State, src: str, dst: str) -> tuple[Any, ...]:
        return self.parts.things[state[self.wire_at[src, dst]]]  # type: ignore[no-any-return]

    def env(self, state: State) -> Env:
        return self.parts.things[state[self.env_at]]  # type: ignore[no-any-return]

    def alive(self, state: State, name: str, epoch: int) -> bool:
        node = self.node(state, name)
        return bool(node[pr.UP]) and self.ps.epoch(name, node[pr.LIFE]) == epoch

    # ---------------------------------------------------------------- moves

    def moves(self, state: State) -> Iterator[Move]:
        yield from self._wire_moves(state)
        yield from self._leg_moves(state)
        yield from self._node_moves(state)
        yield from self._transport_moves(state)
        yield from self._crash_moves(state)

    def _wire_moves(self, state: State) -> Iterator[Move]:
        for src, dst in self.pairs:
            up = self.node(state, dst)[pr.UP]
            messages = self.wire(state, src, dst)
            for m in messages:
                rest = tuple(x for x in messages if x != m)
                if up:
                    op = ("frame", src, m[0], m[1])
                    yield self._run(state, ("deliver", src, dst, m), MESSAGE, dst, op, {(src, dst): rest})
                    if self.config.duplicate:
                        yield self._run(state, ("copy", src, dst, m), FAULT, dst, op, {})
                if self.config.lose:
                    after = list(state)
                    after[self.wire_at[src, dst]] = self.parts.id(rest)
                    yield Move(("lose", src, dst, m), FAULT, tuple(after))
            if up and self.node(state, src)[pr.UP]:  # a bare stamp: no message, never kept
                epoch = self.ps.epoch(src, self.node(state, src)[pr.LIFE])
                known = dict(self.node(state, dst)[pr.LINKS]).get(src, 0)
                if 0 < known < epoch:
                    yield self._run(state, ("stamp", src, dst), MESSAGE, dst, ("frame", src, epoch, None), {})

    def _leg_moves(self, state: State) -> Iterator[Move]:
        env = self.env(state)
        for i, (node, room, came, waits) in enumerate(env.legs):
            asks = [
                a for a in self.config.asks if a.room == room and (node == a.d or (node == a.p and a.p_leg))
            ]
            if came >= sum(a.uses for a in asks) or not self.node(state, node)[pr.UP]:
                continue
            ask = asks[min(came, len(asks) - 1)]
            digest = ask.p_digest if node == ask.p else ask.d_digest
            known = pr.room_of(self.node(state, node), room) is not None
            kinds = ("leg",) if known or not self.config.bad_legs else ("leg", "leg_bad", "leg_refused")
            for kind in kinds:
                legs = list(env.legs)
                legs[i] = (node, room, came + 1, waits if known else True)
                yield self._run(
                    state, (kind, node, room), LEG, node, ("leg", room, kind, digest), {},
                    env._replace(legs=tuple(legs)), keep_client=known,
                )  # fmt: skip

    def _node_moves(self, state: State) -> Iterator[Move]:
        env = self.env(state)
        for name in self.nodes:
            at = self.index[name]
            for action, kind, op in self._node_ops(name, state[at]):
                if self._allowed(state, env, name, action):
                    yield self._run(state, action, kind, name, op, {}, self._noted(env, name, action))

    def _node_ops(self, name: str, node_id: int) -> list[tuple[Action, str, Op]]:
        found = self._ops.get((name, node_id))
        if found is None:
            node = self.parts.things[node_id]
            make = sender_ops if node[pr.ROLE] == t.SENDER else receiver_ops
            found = self._ops[name, node_id] = list(make(self.config, name, node)) if node[pr.UP] else []
        return found

    def _allowed(self, state: State, env: Env, name: str, action: Action) -> bool:
        kind = action[0]
        if kind == "start":
            return sum(d == name for d, _, _ in env.pages) < self.config.pool_rooms
        if kind == "timer" and action[3] == "tombstone" and "tombstone" in self.config.assume:
            return self._tombstone_may_fall(state, name, action[2])
        if kind == "limbo" and "limbo" in self.config.assume:
            _, _, room, peer, attempt = action
            record = pr.room_of(self.node(state, peer), room)
            return not (record and record[pr.R_ATTEMPT] == attempt and record[pr.R_STATE] == T)
        if kind == "refused":
            return not self.node(state, action[2])[pr.UP]
        return True

    def _tombstone_may_fall(self, state: State, name: str, room: int) -> bool:
        """See ASSUMPTIONS. The other side: whoever this record has to do with."""
        record = pr.room_of(self.node(state, name), room)
        assert record is not None
        for src, dst in self.pairs:
            if name in (src, dst) and any(m[1][1] == room for m in self.wire(state, src, dst)):
                return False
        if self.node(state, name)[pr.ROLE] == t.RECEIVER:
            return True
        for d in self.config.decodes:
            other = pr.room_of(self.node(state, d), room)
            if other and (other[pr.R_STATE] in LIVE or other[pr.R_NOTICES]):
                return False
        return True

    def _noted(self, env: Env, name: str, action: Action) -> Env:
        if action[0] == "limbo":
            _, _, room, peer, _ = action
            regs = tuple(
                r._replace(waived=True) if (r.p, r.room, r.d) == (name, room, peer) else r for r in env.regs
            )
            return env._replace(regs=regs)
        if action[0] in ("candidates", "no_candidate"):
            return env._replace(lookups=tuple(x for x in env.lookups if x != (name, action[2])))
        return env

    def _transport_moves(self, state: State) -> Iterator[Move]:
        env = self.env(state)
        yield from self._lookup_moves(state, env)
        for i, pull in enumerate(env.pulls):
            yield from self._pull_moves(state, env, i, pull)
        for d, room, attempt in env.pages:
            record = pr.room_of(self.node(state, d), room)
            if attempt in env.committed and not (
                record and record[pr.R_ATTEMPT] == attempt and record[pr.R_STATE] == T
            ):
                pages = tuple(x for x in env.pages if x != (d, room, attempt))
                done = env._replace(pages=pages)
                yield self._env_move(state, ("finish", d, room), WORK, done)

    def _lookup_moves(self, state: State, env: Env) -> Iterator[Move]:
        for d, room in env.lookups:
            newest = -2 if self.config.stale_registry else -1
            lives = [list(range(1, self.node(state, p)[pr.LIFE] + 1))[newest:] for p in self.config.prefills]
            for choice in _product(lives):
                found = tuple(
                    (p, self.ps.epoch(p, life)) for p, life in zip(self.config.prefills, choice, strict=True)
                )
                action = ("candidates", d, room, choice)
                yield self._run(
                    state, action, WORK, d, ("candidates", room, found), {}, self._noted(env, d, action)
                )
            if self.config.incompatible:
                action = ("no_candidate", d, room)
                yield self._run(
                    state, action, FAULT, d, ("local", room, "no_candidate"), {}, self._noted(env, d, action)
                )

    def _pull_moves(self, state: State, env: Env, i: int, pull: Pull) -> Iterator[Move]:
        def moved(**changes: Any) -> Env:
            return env._replace(pulls=(*env.pulls[:i], pull._replace(**changes), *env.pulls[i + 1 :]))

        who = (pull.d, pull.room, pull.attempt)
        served = self.alive(state, pull.p, pull.p_epoch)
        reg = next((r for r in env.regs if r.uuid == pull.uuid), None)
        open_server = served and reg is not None and reg.stage != "closed"
        if pull.stage == "queued":
            record = pr.room_of(self.node(state, pull.d), pull.room)
            if record and record[pr.R_ATTEMPT] == pull.attempt and record[pr.R_STATE] == T:
                yield self._env_move(state, ("issue", *who), WORK, moved(stage="flying"))
            else:  # never issued: quiet at once (KVManager._never_pulled)
                yield self._settle(state, ("never_issued", *who), WORK, i, False)
            return
        if pull.abandoned and "graveyard" in self.config.timers:
            op = ("graveyard", pull.p, pull.p_epoch)
            yield self._run(state, ("graveyard", *who), TIMER, pull.d, op, {})
        if pull.stage == "flying" and open_server:
            assert reg is not None
            if reg.stage == "open":
                regs = tuple(r._replace(stage="taken") if r is reg else r for r in env.regs)
                yield self._env_move(state, ("reach", *who), WORK, moved(stage="reading")._replace(regs=regs))
            elif reg.stage == "empty":
                yield self._settle(state, ("fenced", *who), WORK, i, False)
        if pull.stage == "reading":
            yield self._settle(state, ("land", *who), WORK, i, True)
        if pull.stage in ("flying", "reading"):
            if not open_server:
                yield self._settle(state, ("broken", *who), WORK, i, False)
            elif self.config.part_fails:
                yield self._settle(state, ("part_fails", *who), FAULT, i, False)
            if self.config.hangs:
                yield self._env_move(state, ("hang", *who), FAULT, moved(stage="hung"))
        if pull.stage == "arrived":
            record = pr.room_of(self.node(state, pull.d), pull.room)
            if record and record[pr.R_ATTEMPT] == pull.attempt and record[pr.R_STATE] == T:
                yield self._scatter(state, env, i, pull)

    def _scatter(self, state: State, env: Env, i: int, pull: Pull) -> Move:
        rest = env._replace(
            legs=client_told(env.legs, pull.d, pull.room),  # from here the answer is the decoding's
            pulls=env.pulls[:i] + env.pulls[i + 1 :],
            committed=tuple(sorted({*env.committed, pull.attempt})),
        )
        return self._run(
            state,
            ("scatter", pull.d, pull.room, pull.attempt),
            WORK,
            pull.d,
            ("local", pull.room, "scattered"),
            {},
            rest,
        )

    def _settle(self, state: State, action: Action, kind: str, i: int, ok: bool) -> Move:
        env = self.env(state)
        pull = env.pulls[i]
        rest = env.pulls[:i] + env.pulls[i + 1 :]
        record = pr.room_of(self.node(state, pull.d), pull.room)
        wanted = record and record[pr.R_ATTEMPT] == pull.attempt and record[pr.R_STATE] == T
        if ok and wanted:
            rest = tuple(sorted((*rest, pull._replace(stage="arrived"))))
        op = ("settled", pull.room, pull.attempt, ok)
        return self._run(state, action, kind, pull.d, op, {}, env._replace(pulls=rest))

    def _crash_moves(self, state: State) -> Iterator[Move]:
        env = self.env(state)
        for name in sorted(self.fallible):
            node = self.node(state, name)
            if node[pr.UP]:
                left = dict(env.crashes)[name]
                if left:
                    yield self._crash(state, env, name, node, left)
            else:
                after = list(state)
                after[self.index[name]] = self.parts.id(self.ps.born(name, node[pr.LIFE] + 1))
                yield Move(("restart", name), FAULT, tuple(after))

    def _crash(self, state: State, env: Env, name: str, node: pr.Frozen, left: int) -> Move:
        """Memory, registrations, pulls and clients of that life are gone; what it has sent may still arrive."""
        after = list(state)
        after[self.index[name]] = self.parts.id(self.ps.dead(name, node[pr.LIFE]))
        for src, dst in self.pairs:
            if (
                dst == name
            ):  # addressed to a life that is over: the next one has no use for them (protocol §3)
                after[self.wire_at[src, dst]] = self.parts.id(())
        env = env._replace(
            crashes=tuple((n, c - (n == name)) for n, c in env.crashes),
            pulls=tuple(x for x in env.pulls if x.d != name),
            regs=tuple(r._replace(stage="closed") if r.p == name else r for r in env.regs),
            pages=tuple(x for x in env.pages if x[0] != name),
            lookups=tuple(x for x in env.lookups if x[0] != name),
            legs=tuple((n, r, c, w and n != name) for n, r, c, w in env.legs),
        )
        after[self.env_at] = self.parts.id(env)
        return Move(("crash", name), FAULT, tuple(after))

    # ---------------------------------------------------------------- one step

    def _env_move(self, state: State, action: Action, kind: str, env: Env) -> Move:
        return Move(action, kind, (*state[: self.env_at], self.parts.id(in_order(env))))

    def outcome(self, name: str, node_id: int, op: Op) -> Outcome:
        key = (name, node_id, op)
        found = self._outcomes.get(key)
        if found is None:
            found = self._outcomes[key] = self.ps.step(name, self.parts.things[node_id], op)
        return found

    def _run(
        self, state: State, action: Action, kind: str, name: str, op: Op,
        wires: dict[tuple[str, str], tuple[Any, ...]], env: Env | None = None, *, keep_client: bool = False,
    ) -> Move:  # fmt: skip
        """The process performs op, then what leaves it takes effect on wires and transport."""
        after = list(state)
        for pair, messages in wires.items():
            after[self.wire_at[pair]] = self.parts.id(messages)
        move = Move(action, kind, state)
        env = env if env is not None else self.env(state)
        before = env
        outcome = self.outcome(name, state[self.index[name]], op)
        env = self._absorb(after, env, name, outcome, move, keep_client)
        while True:  # pulls whose server was dropped settle now (Transport.drop_peer)
            i = next((i for i, x in enumerate(env.pulls) if x.stage == "dropped"), None)
            if i is None:
                break
            pull = env.pulls[i]
            env = env._replace(pulls=env.pulls[:i] + env.pulls[i + 1 :])
            op = ("settled", pull.room, pull.attempt, False)
            outcome = self.outcome(pull.d, after[self.index[pull.d]], op)
            env = self._absorb(after, env, pull.d, outcome, move, False)
        env = env._replace(lookups=tuple(x for x in env.lookups if self._looks(after, *x)))
        if env is not before or before is not self.env(state):
            after[self.env_at] = self.parts.id(in_order(env))
        move.state = tuple(after)
        return move

    def _looks(self, after: list[int], d: str, room: int) -> bool:
        """Whether an answer of the registry would add anything: candidates, once noted, keep their epochs."""
        record = pr.room_of(self.parts.things[after[self.index[d]]], room)
        return record is not None and not record[pr.R_CANDIDATES]

    def _absorb(
        self, after: list[int], env: Env, name: str, outcome: Outcome, move: Move, keep_client: bool
    ) -> Env:
        if outcome.error:
            move.errors.append(outcome.error)
        after[self.index[name]] = self.parts.id(outcome.state)
        move.lines += outcome.lines
        for e in outcome.effects:
            env = self._effect(after, env, name, e, move, keep_client)
        for line in outcome.lines:
            if line.event == "kv_ready" and line.target == T:
                env = env._replace(legs=client_told(env.legs, name, line.room))
        return env

    def _effect(
        self, after: list[int], env: Env, name: str, e: tuple[Any, ...], move: Move, keep_client: bool
    ) -> Env:
        kind = e[0]
        if kind == "send":
            self._send(after, name, e[1], e[2], e[3], move)
        elif kind == "register":
            _, d, d_epoch, room, uuid = e
            life = self.parts.things[after[self.index[name]]][pr.LIFE]
            if any(r.uuid == uuid for r in env.regs):
                move.errors.append(f"S4: uuid {uuid:x} is registered a second time")
            record = pr.room_of(self.parts.things[after[self.index[name]]], room)
            digest = record[pr.S_DIGEST] if record else "?"
            env = env._replace(regs=(*env.regs, Reg(uuid, name, life, d, d_epoch, room, digest)))
        elif kind == "withdraw":
            env = env._replace(
                regs=tuple(
                    r._replace(stage="empty") if r.uuid == e[1] and r.stage != "closed" else r
                    for r in env.regs
                )
            )
        elif kind == "pull":
            _, room, attempt, p, p_epoch, uuid = e
            env = env._replace(
                pulls=(*env.pulls, Pull(name, room, attempt, p, p_epoch, uuid)),
                pages=(*env.pages, (name, room, attempt)),
            )
        elif kind == "abandon":
            env = env._replace(
                pulls=tuple(
                    x._replace(abandoned=True) if (x.d, x.room, x.attempt) == (name, e[1], e[2]) else x
                    for x in env.pulls
                )
            )
        elif kind == "drop":
            env = self._drop(env, name, e[1], e[2])
        elif kind == "lookup":
            if (name, e[1]) not in env.lookups:
                env = env._replace(lookups=(*env.lookups, (name, e[1])))
        elif kind == "ended" or (kind == "answer" and not keep_client):
            env = self._client_told(env, name, e[1])
        return env

    def _client_told(self, env: Env, name: str, room: int) -> Env:
        """The request is over on this node: its client has an answer, its pages and what landed for it are free."""
        return env._replace(
            legs=client_told(env.legs, name, room),
            pages=tuple(x for x in env.pages if x[:2] != (name, room)),
            pulls=tuple(x for x in env.pulls if not (x[:2] == (name, room) and x.stage == "arrived")),
        )

    def _drop(self, env: Env, name: str, peer: str, epoch: int) -> Env:
        if self.ps.role(name) == t.SENDER:
            return env._replace(
                regs=tuple(
                    r._replace(stage="closed") if (r.p, r.d, r.d_epoch) == (name, peer, epoch) else r
                    for r in env.regs
                )
            )
        return env._replace(
            pulls=tuple(
                x._replace(stage="dropped")
                if (x.d, x.p, x.p_epoch) == (name, peer, epoch) and x.stage in ("flying", "reading", "hung")
                else x
                for x in env.pulls
            )
        )

    def _send(
        self, after: list[int], src: str, dst: str, known: int, message: tuple[Any, ...], move: Move
    ) -> None:
        """A message to a life that is over is void; one that finds its wire full is dropped."""
        there = self.parts.things[after[self.index[dst]]]
        if not there[pr.UP] or known not in (0, self.ps.epoch(dst, there[pr.LIFE])):
            return
        here = self.parts.things[after[self.index[src]]]
        at = self.wire_at[src, dst]
        entry = (self.ps.epoch(src, here[pr.LIFE]), message)
        messages = self.parts.things[after[at]]
        if entry in messages:
            return
        if len(messages) >= self.config.wire:
            move.overflow = True
        else:
            after[at] = self.parts.id(tuple(sorted((*messages, entry))))


def _product(choices: list[list[int]]) -> Iterator[tuple[int, ...]]:
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _product(choices[1:]):
            yield (first, *rest)
