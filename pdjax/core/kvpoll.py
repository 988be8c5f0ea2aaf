"""KVPoll: the five states of a hand-off, with SGLang's numbers (protocol §2)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class KVPoll(IntEnum):
    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


def group_poll(polls: Iterable[KVPoll]) -> KVPoll:
    """The state of a group of ranks: one failure fails the group, Success needs all (RFC-2 §5.6)."""
    return min(polls)
