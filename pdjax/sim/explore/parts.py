"""The parts of a global state: registrations, pulls, everything beside processes and wires, and one edge.

Plain data. Must never decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdjax.core import transitions as t

B, W, T, S, F, N = (t.LETTERS[x] for x in "BWTSFN")
LIVE = t.LIVE

# Kinds of moves: which of them a fair world must make, and which are faults.
MESSAGE, WORK, LEG, TIMER, END, FAULT = "message", "work", "leg", "timer", "end", "fault"

State = tuple[int, ...]
Action = tuple[Any, ...]


class Reg(NamedTuple):
    """One registration. stage: open (bytes can be pulled), taken (a pull has them), empty (withdrawn), closed (its
    server or process is gone). waived: the limbo timer has given its bytes back."""

    uuid: int
    p: str
    p_life: int
    d: str
    d_epoch: int
    room: int
    digest: str
    stage: str = "open"
    waived: bool = False


class Pull(NamedTuple):
    """One pull of D. stage: queued (decided, not yet issued), flying, reading (has met the registration), hung (never
    settles), arrived (verified, with D's scheduler)."""

    d: str
    room: int
    attempt: int
    p: str
    p_epoch: int
    uuid: int
    stage: str = "queued"
    abandoned: bool = False


class Env(NamedTuple):
    """Everything that is neither a process nor a wire. legs: (side, room) → (how many came, client waits for the hand-off)."""

    regs: tuple[Reg, ...] = ()
    pulls: tuple[Pull, ...] = ()
    pages: tuple[tuple[str, int, int], ...] = ()  # (d, room, attempt) that owns pages
    lookups: tuple[tuple[str, int], ...] = ()
    legs: tuple[tuple[str, int, int, bool], ...] = ()
    committed: tuple[int, ...] = ()  # attempts whose KV is scattered
    crashes: tuple[tuple[str, int], ...] = ()  # how many lives may still end


@dataclass
class Move:
    """One edge. overflow: a message found its wire full and was dropped. errors: properties broken on the way.

    sent: every message that a process wanted to send, whether its wire had room or not.
    """

    action: Action
    kind: str
    state: State
    overflow: bool = False
    errors: list[str] = field(default_factory=list)
    sent: list[tuple[str, str, tuple[Any, ...]]] = field(default_factory=list)  # from, to, message
    lines: list[Any] = field(default_factory=list)


class Table:
    """Hashable things ↔ small numbers."""

    def __init__(self) -> None:
        self.ids: dict[Any, int] = {}
        self.things: list[Any] = []

    def id(self, thing: Any) -> int:
        found = self.ids.get(thing)
        if found is None:
            found = self.ids[thing] = len(self.things)
            self.things.append(thing)
        return found


def in_order(env: Env) -> Env:
    return env._replace(
        regs=tuple(sorted(env.regs)), pulls=tuple(sorted(env.pulls)), pages=tuple(sorted(env.pages)),
        lookups=tuple(sorted(env.lookups)),
    )  # fmt: skip


def client_told(
    legs: tuple[tuple[str, int, int, bool], ...], node: str, room: int
) -> tuple[tuple[str, int, int, bool], ...]:
    return tuple((n, r, c, w and (n, r) != (node, room)) for n, r, c, w in legs)
