"""What one exhaustive search covers: who takes part, what may go wrong, how much of it.

Everything is bounded here and nowhere else; the report prints these bounds. Must never hold a rule of the protocol.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

TIMERS = (
    "request", "lease", "bootstrap", "transfer", "silence", "hello", "notice", "notice_life", "tombstone",
    "early", "limbo", "graveyard",
)  # fmt: skip

ASSUMPTIONS = {
    "tombstone": "tombstone ≥ notice life + message life: a tombstone falls only when no message about its room is"
    " under way and the other side has neither a live record of the attempt nor an open notice",
    "limbo": "transfer + answer bound ≤ limbo: bytes leave limbo by timer only when D's transfer timer has ended the"
    " room (its pull is abandoned or over)",
}


@dataclass(frozen=True)
class Ask:
    """One request: a room, the two instances that its legs go to, the digests that they compute.

    uses: how many legs with this room each side gets (2: the room number is used again).
    p_leg, d_leg: whether P and D get one at all.
    """

    room: int = 7
    p: str = "p0"
    d: str = "d0"
    p_digest: str = "a"
    d_digest: str = "a"
    uses: int = 1
    p_leg: bool = True  # False: only D's leg exists
    d_leg: bool = True


@dataclass(frozen=True)
class Config:
    """One search. Counts are upper bounds of a whole run, wire is messages under way at once in each direction."""

    name: str = "one room"
    asks: tuple[Ask, ...] = (Ask(),)
    wire: int = 2
    lose: bool = True
    duplicate: bool = True
    crashes: tuple[
        tuple[str, int], ...
    ] = ()  # node → how many lives may end (each may be followed by a new one)
    aborts: tuple[str, ...] = ("p", "d")
    errors: tuple[str, ...] = ()  # engine_error: the same rows as an abort, so more edges and no new states
    part_fails: bool = True
    hangs: bool = True
    bad_legs: bool = False  # a leg may be malformed or refused
    incompatible: bool = False  # the registry may list only instances that do not fit
    alien: tuple[str, ...] = ()  # D nodes whose fingerprint differs (S10's second line)
    stale_registry: bool = False  # the registry may still show an older life of P
    timers: tuple[str, ...] = TIMERS  # kinds that may fire, at any time while armed
    assume: tuple[str, ...] = tuple(ASSUMPTIONS)
    gated: bool = False
    prompt: bool = (
        False  # V7 is checked: from every state reached without a fault, messages alone end everything
    )
    budget_rooms: int = 1  # rooms that P's unpulled budget holds
    pool_rooms: int = 1  # requests that D's page pool holds
    max_states: int = 2_000_000

    @property
    def prefills(self) -> tuple[str, ...]:
        return tuple(sorted({a.p for a in self.asks} | set(self.extra_prefills)))

    extra_prefills: tuple[str, ...] = ()  # listed in the registry, get no leg

    @property
    def decodes(self) -> tuple[str, ...]:
        return tuple(sorted({a.d for a in self.asks}))

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.prefills + self.decodes

    def but(self, **changes: object) -> Config:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
