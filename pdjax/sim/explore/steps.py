"""One step of the model around the processes: a process acts, what leaves it reaches wires, transport and clients.

A global state is a tuple of small numbers, each the name of a part: one for each process, one for each direction of
each wire, one for the rest. The wire is a set of at most ``wire`` messages in each direction. Must never hold a rule of
the protocol (what a process does is ``process.py``'s, and that is the core's) nor decide what happens next
(``world.py``).
"""

from __future__ import annotations

from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.explore import process as pr
from pdjax.sim.explore.config import Config
from pdjax.sim.explore.parts import (
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


class Steps:
    """The states of one configuration, and what one action makes of them."""

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
            move.sent.append((name, e[1], e[3]))
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
