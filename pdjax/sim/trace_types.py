"""What trace.json, version 1, can say: its names, and a checked file as frozen records.

Must never read or check anything: ``trace_reader`` checks, ``trace_file`` reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdjax.sim.loop import Name
from pdjax.sim.node import NodeSpec, Timing

FORMAT: Final = "pdjax.trace/1"
OUTCOMES: Final = ("ok", "failed", "aborted", "rejected", "any")
PROPERTIES: Final = frozenset([f"S{i}" for i in range(1, 19)] + [f"V{i}" for i in range(1, 13)])

# Ends that the router adds to the reasons of the protocol.
ROUTER_REASONS: Final = {
    "router_timeout": "the router gave the request up",
    "connection_refused": "nobody listened at the server's address",
    "connection_reset": "the server's process ended with the request open",
    "wrong_tokens": "the answer was not what a server without PD gives",
}

# Who emits an event that a step may wait for.
EMITTERS: Final[dict[str, str]] = {
    "request": "x", "finished": "x",
    "admitted": "p", "prefilled": "p", "registered": "p", "withdrawn": "p",
    "peer_known": "d", "pull_started": "d", "landed": "d", "scattered": "d", "first_token": "d",
    "sent": "pd", "delivered": "pd", "success": "pd", "failed": "pd", "released": "pd",
    "crashed": "pdb", "restarted": "pdb", "listed": "pdb", "evicted": "pdb",
}  # fmt: skip

ACTIONS: Final = (
    "request", "abort", "disconnect", "message", "transfer", "inject", "error", "crash", "restart", "stop",
    "partition", "pages", "clock", "drain",
)  # fmt: skip

WORK_OF: Final = {
    "prefill": "p",
    "gather": "p",
    "register": "p",
    "pull": "d",
    "scatter": "d",
    "decode": "d",
}


def room_text(room: int) -> int | str:
    """A room as a file writes it: above 2^53 as its digits, because readers of JSON may round."""
    return room if room < 1 << 53 else str(room)


@dataclass(frozen=True)
class On:
    """What a step waits for. room, node, message: None or "": any."""

    event: str
    room: int | None = None
    node: str = ""
    message: str = ""


@dataclass(frozen=True)
class Step:
    """One line of the scenario: at (ms) or on, and one action with its value as in the file, rooms as integers."""

    index: int
    action: str
    value: Any
    at: float | None = None
    on: On | None = None
    nth: int = 1
    after: float = 0.0


@dataclass(frozen=True)
class Router:
    mode: str = "mini"
    retries: int = 0
    timeout: float = 60000.0


@dataclass(frozen=True)
class Expected:
    outcome: str
    reason: str = ""
    within: float | None = None


@dataclass(frozen=True)
class Trace:
    """A checked file. raw is what was read; nodes are in the order of the file."""

    raw: Mapping[str, Any]
    name: str
    why: str
    seed: int
    nodes: tuple[NodeSpec, ...]
    router: Router
    timing: Timing
    clock_offset: Mapping[str, float]
    steps: tuple[Step, ...]
    outcomes: Mapping[str, Expected]
    violations: tuple[str, ...]
    quiescent_within: float | None
    choices: tuple[Name, ...]
    digest: str
