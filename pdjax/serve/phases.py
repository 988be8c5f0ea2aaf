"""The phases of one request as this node saw them, in seconds (RFC-2: where the time of a hand-off goes).

One place for the log line, the metrics, the spans and whoever answers a client. Must never mix two clocks: what P
measured comes from P as a duration (S15).
"""

from __future__ import annotations

from pdjax.sched.request import PhaseTimes

PHASES = ("queue", "prefill", "ready", "page_wait", "pull", "scatter", "first_token", "decode")


def phase_seconds(times: PhaseTimes) -> dict[str, float]:
    """How long each phase took, as far as it is known on this node: PHASES with ``_s``; all differences are of one
    clock (S15)."""

    def gap(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else end - start

    on_d = times.ready is not None or times.landed is not None
    phases = {
        "queue": gap(times.arrived, times.scheduled) if not on_d else times.peer_queue_s,
        "prefill": gap(times.scheduled, times.prefilled) if not on_d else times.peer_prefill_s,
        "ready": gap(times.arrived, times.ready),
        "page_wait": gap(times.ready, times.scheduled) if on_d else None,
        "pull": gap(times.scheduled, times.landed) if on_d else None,
        "scatter": gap(times.landed, times.scattered),
        "first_token": gap(times.arrived, times.first_token),
        "decode": gap(times.first_token, times.finished),
    }
    return {f"{name}_s": round(seconds, 6) for name, seconds in phases.items() if seconds is not None}
