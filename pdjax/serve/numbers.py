"""What one node counts, as plain values at one moment: the source of /metrics and of whoever else asks.

Must never hold a room number, a peer's name or anything that grows with the requests: each key is of a closed set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdjax.core.tally import Tally


@dataclass(frozen=True)
class Numbers:
    """One node now. queues: requests in each; oldest_s: seconds since the head of each joined it.

    counters: part of the process → name → count since its start. tally: None without PD. budget_bytes: charged to the
    unpulled budget, and its limit. host_slot_bytes: with staging, "held" and "free". compatible_peers: instances of the other role that fit, as the registry last said.
    """

    instance_id: str = ""
    epoch: int = 0
    queued: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    used_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    page_tokens: int = 1
    tally: Tally | None = None
    budget_bytes: tuple[int, int] = (0, 0)
    host_slot_bytes: Mapping[str, int] = field(default_factory=dict)
    limbo_entries: int = 0
    early_entries: int = 0
    tombstones: int = 0
    pulls: int = 0
    registered_bytes: int = 0
    graveyard_bytes: int = 0
    compatible_peers: int = 0
    driver_longest_turn_s: float = 0.0
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
