"""The phases of one request as this node saw them, in seconds (RFC-2: where the time of a hand-off goes).

One place for the log line, the metrics, the spans and whoever answers a client. Must never mix two clocks: what P
measured comes from P as a duration (S15).
"""

from __future__ import annotations

from pdjax.sched.request import PhaseTimes

PHASES = ("queue", "prefill", "ready", "page_wait", "pull", "scatter", "first_token", "decode")


def phase_intervals(times: PhaseTimes) -> dict[str, tuple[float, float]]:
    """Start and end of each of PHASES that happened here, on this node's clock."""
    on_d = times.ready is not None or times.landed is not None
    bounds = {
        "queue": (times.arrived, times.scheduled) if not on_d else (None, None),
        "prefill": (times.scheduled, times.prefilled) if not on_d else (None, None),
        "ready": (times.arrived, times.ready),
        "page_wait": (times.ready, times.scheduled),
        "pull": (times.scheduled, times.landed),
        "scatter": (times.landed, times.scattered),
        "first_token": (times.arrived, times.first_token),
        "decode": (times.first_token, times.finished),
    }
    return {
        name: (start, end) for name, (start, end) in bounds.items() if start is not None and end is not None
    }


def phase_seconds(times: PhaseTimes) -> dict[str, float]:
    """How long each phase took, as far as it is known on this node: PHASES with ``_s``. D knows P's two from P."""
    seconds = {name: end - start for name, (start, end) in phase_intervals(times).items()}
    told = {"queue": times.peer_queue_s, "prefill": times.peer_prefill_s}
    known = {name: seconds.get(name, told.get(name)) for name in PHASES}
    return {f"{name}_s": round(took, 6) for name, took in known.items() if took is not None}
