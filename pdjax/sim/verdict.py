"""What a router makes of two answered legs, as the two real ones do (facts/router §3), and what a client calls it.

Shared by the simulated router and by the harness that posts to real processes. Must never know more than an HTTP
client knows.
"""

from __future__ import annotations

from typing import Protocol

import xxhash

BACKOFF_S, BACKOFF_GROWTH, BACKOFF_JITTER = 0.05, 1.5, 0.2
RETRIED = (0, 429, 500, 502, 503)  # 0: no answer at all


class Answered(Protocol):
    """What the verdict needs of a leg."""

    status: int | None
    reason: str
    accepted: bool


def verdict(mode: str, stream: bool, p: Answered, d: Answered) -> tuple[int, str, bool] | None:
    """(status, reason, whether it may be tried again) of an attempt whose legs have come so far; None: not decided."""
    return (_rust if mode == "rust" else _mini)(stream, p, d)


def _mini(stream: bool, p: Answered, d: Answered) -> tuple[int, str, bool] | None:
    for leg in (p, d):
        if leg.status == 0:
            return 500, leg.reason, True
    if d.status is not None and (p.status is not None or (stream and p.accepted)):
        return d.status, d.reason, not stream
    return None


def _rust(stream: bool, p: Answered, d: Answered) -> tuple[int, str, bool] | None:
    if stream:
        if p.status is not None and p.status != 200:
            return p.status or 502, p.reason, True
        if d.status == 0:
            return 502, d.reason, not d.accepted
        if p.status == 200 and d.status is not None:
            return d.status, d.reason, False
        return None
    if p.status is None or d.status is None:
        return None
    leg = p if p.status != 200 else d
    return leg.status or 502, leg.reason, True


def backoff_s(tries: int, draw: float) -> float:
    """How long the router waits before it posts again. draw: uniform in [0, 1)."""
    return BACKOFF_S * BACKOFF_GROWTH ** (tries - 1) * (1 + BACKOFF_JITTER * (2 * draw - 1))


def outcome_of(status: int, reason: str, aborted: bool) -> str:
    """The outcome of a request whose tokens, if any, are right."""
    if status == 200 and reason != "client_abort":
        return "ok"
    if aborted or reason == "client_abort":
        return "aborted"
    return "rejected" if status in (400, 404) else "failed"


def prompt_tokens(rid: str, seed: int, n: int) -> list[int]:
    """Numbers below 2^20 that only this rid has: the prompt of a simulated request."""
    salt = xxhash.xxh3_64_intdigest(rid.encode(), seed=seed & (1 << 64) - 1)
    return [(salt + i * 0x9E3779B97F4A7C15 >> 17) % (1 << 20) for i in range(n)]
