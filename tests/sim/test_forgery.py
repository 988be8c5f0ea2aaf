"""What a frame in the name of a live attempt can do that nobody of the two has sent (docs/checking.md)."""

import pytest
from quick_settings import QUICK

from pdjax.core.settings import PDSettings
from pdjax.sim.replay import run_trace

FLAGS = {
    f.metadata["flag"]: getattr(QUICK, name)
    for name, f in PDSettings.__dataclass_fields__.items()
    if getattr(QUICK, name) != f.default
}
MOMENTS = [
    {"event": event, "after": after}
    for event in ("admitted", "prefilled", "registered", "peer_known", "pull_started", "landed", "scattered")
    for after in (0.01, 3, 20)
]
# Message → what it may break for its own room: the early end of bytes, of a success, of a prompt end.
FORGED = [
    ("p0", {"type": "done"}, {"S1", "S13"}),
    ("p0", {"type": "abort", "quiet": True}, {"S1"}),
    ("p0", {"type": "abort"}, set()),
    ("p0", {"type": "hello", "digest": "other"}, {"V7"}),
    ("p0", {"type": "hello", "attempt": 1 << 62}, set()),
    ("d0", {"type": "failed", "echo": True}, {"V7"}),
    ("d0", {"type": "failed"}, set()),
    ("d0", {"type": "ready", "uuid": 1}, {"S13"}),
    ("d0", {"type": "unknown"}, set()),
    ("d0", {"type": "done_ack"}, set()),
]


def forged(to, message, event, after):
    """Room 7 is talked about by a stranger, room 8 is its neighbour."""
    return run_trace(
        {
            "format": "pdjax.trace/1",
            "world": {"page_size": 4, "pages": {"p0": 32, "d0": 32}, "flags": FLAGS, "timing": {"pull_per_page": 3}},
            "steps": [
                {"at": 0, "request": {"rid": "a", "room": 7, "prompt": 40, "output": 6}},
                {"at": 2, "request": {"rid": "b", "room": 8, "prompt": 30, "output": 6}},
                {
                    "on": {"event": event, "room": 7},
                    "after": after,
                    "inject": {"to": to, "from": "d0" if to == "p0" else "p0", "message": {"room": 7, **message}},
                },
            ],
            "expect": {"outcomes": {"a": "any", "b": "ok"}},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("to", "message", "may_break"), FORGED, ids=[f"{m['type']}-{i}" for i, (_, m, _) in enumerate(FORGED)]
)
def test_a_forged_frame_of_a_live_attempt_can_end_its_own_request_and_nothing_else(to, message, may_break):
    broken = set()
    for moment in MOMENTS:
        result = forged(to, message, **moment)
        assert result.mismatches == [], moment  # the neighbour is well, and everything is free in time
        assert not any(o.wrong for o in result.outcomes.values()), moment
        assert all(" 7 " in f"{v.text} " for v in result.violations), result.violations
        broken |= set(result.broken)
    assert broken <= may_break
