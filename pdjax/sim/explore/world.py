"""The model around the processes: wire, transport, legs, scheduler, page pool, crashes, clocks without time.

``World.moves(state)`` lists everything that can happen next. The wire loses, duplicates (delivers and keeps) and
reorders. Must never hold a rule of the protocol: what a process does is ``process.py``'s, and that is the core's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.explore import process as pr
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
    State,
    T,
    client_told,
)  # fmt: skip
from pdjax.sim.explore.process import Op
from pdjax.sim.explore.steps import Steps


class World(Steps):
    """The transition system of one configuration."""

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
                a
                for a in self.config.asks
                if a.room == room and ((node == a.d and a.d_leg) or (node == a.p and a.p_leg))
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
                action: Action = ("candidates", d, room, choice)
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


def _product(choices: list[list[int]]) -> Iterator[tuple[int, ...]]:
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _product(choices[1:]):
            yield (first, *rest)
