"""Every timer, limit and queue bound of the protocol, with its default, in one place.

The command line, the simulator and docs/operations.md are all fed from these fields; no module may keep a
second default. Must never read a clock, a file or the environment.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, flag: str, doc: str, variable: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A field with the flag that sets it and the sentence that the docs print.

    variable: an environment variable that others already use for it, read beside the flag's own. choices: of a text.
    """
    metadata = {"flag": flag, "doc": doc, "variable": variable, "choices": choices}
    return field(default=default, metadata=metadata)


MAX_TIMER_S = 1e6  # of any timer: poll() counts milliseconds in 31 bits, and no thread can wait for infinity
MOST = {  # what the layers below can count with; of every other whole number, see MAX_COUNT
    "max_peers": 1 << 16,  # ports of a machine, and each needs two
    "max_frame_bytes": 1 << 30,
    "unpulled_budget_bytes": 1 << 62,
    "max_graveyard_bytes": 1 << 62,
}
MAX_COUNT = (1 << 31) - 1
MAY_BE_ZERO = ("tombstone_s", "unpulled_budget_bytes", "host_staging")


@dataclass(frozen=True)
class PDSettings:
    """Timers in seconds (protocol §7) and bounds of the hand-off. ``check()`` before use."""

    lease_s: float = setting(
        15.0, "disaggregation-lease", "P: nothing heard about a bound room for this long ends it"
    )
    peer_timeout_s: float = setting(
        5.0, "disaggregation-peer-timeout", "D: no answer from a P instance for this long ends its rooms"
    )
    bootstrap_timeout_s: float = setting(
        30.0, "disaggregation-bootstrap-timeout", "D: no P has the room; P, gated: no hello"
    )
    transfer_timeout_s: float = setting(
        60.0, "disaggregation-transfer-timeout", "D: from the start of a pull to its scatter"
    )
    limbo_timeout_s: float = setting(
        75.0, "disaggregation-limbo-timeout", "P: longest time that bytes stay charged after a room has ended"
    )
    request_timeout_s: float = setting(
        300.0, "disaggregation-request-timeout", "each side: everything of one request included"
    )
    tombstone_s: float = setting(
        0.0, "disaggregation-tombstone", "how long an ended room is remembered (0: two leases)"
    )
    hello_interval_s: float = setting(
        1.0, "disaggregation-hello-interval", "longest gap of the hello and notice backoff"
    )
    answer_bound_s: float = setting(
        1.0, "disaggregation-answer-bound", "round trip plus the longest stall of a peer's answering thread"
    )
    graveyard_timeout_s: float = setting(
        150.0,
        "disaggregation-graveyard-timeout",
        "D: an abandoned pull unsettled by then costs its peer's server",
    )
    heartbeat_interval_s: float = setting(
        5.0,
        "disaggregation-bootstrap-heartbeat-interval",
        "how often an instance tells the registry that it lives",
    )
    heartbeat_ttl_s: float = setting(
        15.0,
        "disaggregation-bootstrap-heartbeat-ttl",
        "the registry forgets an instance silent for this long",
    )
    router_timeout_s: float = setting(
        1800.0, "router-request-timeout", "the router's own limit for one request, retries included"
    )
    unpulled_budget_bytes: int = setting(
        0, "disaggregation-unpulled-budget", "P: bytes that may wait to be pulled (0: a quarter of the pool)"
    )
    max_frame_bytes: int = setting(1 << 20, "disaggregation-max-frame", "longest side-channel frame")
    max_peers: int = setting(
        256, "disaggregation-max-peers", "peers remembered at once, least recently heard go first"
    )
    max_channel_connections: int = setting(
        1024,
        "disaggregation-max-connections",
        "P: side-channel connections held at once, fewer if ulimit -n is low; one beyond is cut",
    )
    max_rooms: int = setting(
        4096, "disaggregation-max-rooms", "live rooms per process; a leg beyond gets 503"
    )
    max_early: int = setting(
        4096, "disaggregation-max-early", "P: hellos and aborts kept for rooms whose leg is late"
    )
    max_tombstones: int = setting(
        262144, "disaggregation-max-tombstones", "ended rooms remembered; beyond it new legs get 503"
    )
    max_graveyard_bytes: int = setting(
        1 << 30,
        "disaggregation-max-graveyard",
        "D: bytes of abandoned pulls of one peer before its server is replaced",
    )
    on_failure: str = setting(
        "fail",
        "disaggregation-on-failure",
        "D: when its P is lost, fail the request, or (recompute) prefill its prompt here",
        choices=("fail", "recompute"),
    )
    max_recompute: int = setting(
        64,
        "disaggregation-max-recompute",
        "D: lost requests that wait to be prefilled here; one beyond fails",
    )
    recompute_every: int = setting(
        4,
        "disaggregation-recompute-every",
        "D: while others decode, a chunk of a lost prompt is computed in one of so many steps",
    )
    prefill_gate: str = setting(
        "eager",
        "disaggregation-prefill-gate",
        "P: prefill a room at once, or (gated) only after D has said hello",
        choices=("eager", "gated"),
    )
    host_staging: bool = setting(
        False,
        "disaggregation-host-staging",
        "P: KV waits in pinned host memory of the size of the unpulled budget, not on the device (RFC-2 §5.5 mode B)",
        "TPU_ENABLE_D2H_TRANSFER",
    )

    @property
    def gated(self) -> bool:
        return self.prefill_gate == "gated"

    @property
    def renew_s(self) -> float:
        """Gap between hellos of a bound room (protocol §7: hr)."""
        return min(self.lease_s, self.peer_timeout_s) / 4

    @property
    def tombstone_life_s(self) -> float:
        return self.tombstone_s or 2 * self.lease_s

    @property
    def message_life_s(self) -> float:
        """M: an older message is dropped (protocol §3, §7)."""
        return self.lease_s

    @property
    def notice_life_s(self) -> float:
        """G: a notice of a quiet room is given up after this (protocol §3, §7)."""
        return self.lease_s

    @property
    def withdrawn_life_s(self) -> float:
        """How long an emptied registration answers late pulls: longer than any deadline of D."""
        return self.request_timeout_s + self.answer_bound_s

    def check(self) -> list[str]:
        """The inequalities of protocol §7 that these values break, each with its numbers; empty when sound."""
        broken = [
            f"{left} = {a:g} must be {op} {right} = {b:g}"
            for left, a, op, right, b in self._inequalities()
            if not (a < b if op == "<" else a <= b)
        ]
        numbers = [f for f in dataclasses.fields(self) if not f.metadata["choices"]]
        broken += [
            f"{f.metadata['flag']} = {getattr(self, f.name)!r} must be "
            + ("at least 1" if type(f.default) is int else "a number of seconds above 0")
            for f in numbers
            if f.name not in MAY_BE_ZERO and not getattr(self, f.name) > 0
        ]
        broken += [
            f"{f.metadata['flag']} = {getattr(self, f.name)} must be at most {MOST.get(f.name, MAX_COUNT)}"
            for f in numbers
            if type(f.default) is int and getattr(self, f.name) > MOST.get(f.name, MAX_COUNT)
        ]
        broken += [
            f"{f.metadata['flag']} = {getattr(self, f.name)!r} must be at most {MAX_TIMER_S:g} seconds"
            for f in dataclasses.fields(self)
            if isinstance(f.default, float) and getattr(self, f.name) > MAX_TIMER_S
        ]
        return broken + [
            f"{f.metadata['flag']} = {getattr(self, f.name)!r} must not be negative"
            for f in numbers
            if f.name in MAY_BE_ZERO and getattr(self, f.name) < 0
        ]

    def _inequalities(self) -> list[tuple[str, float, str, str, float]]:
        """(what, its value, "<" or "<=", what, its value)."""
        lost = 2  # messages that may be lost in a row without a false alarm
        heard_s = (lost + 1) * max(self.hello_interval_s, self.renew_s) + self.answer_bound_s
        heard = "3 × max(hello-interval, renewal) + answer-bound"
        two_leases_s = self.notice_life_s + self.message_life_s
        boot, peer, transfer = self.bootstrap_timeout_s, self.peer_timeout_s, self.transfer_timeout_s
        request, bound = self.request_timeout_s, self.answer_bound_s
        return [
            (heard, heard_s, "<", "peer-timeout", peer),
            (heard, heard_s, "<", "lease", self.lease_s),
            ("peer-timeout + answer-bound", peer + bound, "<", "lease", self.lease_s),
            (
                "transfer-timeout + answer-bound",
                transfer + bound,
                "<=",
                "limbo-timeout",
                self.limbo_timeout_s,
            ),
            (
                "notice life + message life (two leases)",
                two_leases_s,
                "<=",
                "tombstone",
                self.tombstone_life_s,
            ),
            ("bootstrap-timeout + peer-timeout", boot + peer, "<", "request-timeout", request),
            ("transfer-timeout + peer-timeout", transfer + peer, "<", "request-timeout", request),
            ("5 × request-timeout", 5 * request, "<", "router timeout", self.router_timeout_s),
            (
                "2 × heartbeat-interval",
                2 * self.heartbeat_interval_s,
                "<",
                "heartbeat-ttl",
                self.heartbeat_ttl_s,
            ),
        ]
