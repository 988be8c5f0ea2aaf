"""What every process owes all the time, beside the course of a hand-off: timers, answers, and forgetting.

Written from the prose of protocol §3 and §7, never from the table's rows. Each function gives texts of what is wrong;
the property that says it is V7, V10, S12 or V2. Must never change a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdjax.sim.properties.base import LIVE, Context, Track

EXPIRES = frozenset({"request", "lease", "bootstrap", "transfer"})  # each ends a live room when it fires
TIMERS = EXPIRES | {"hello", "tombstone"}
ENDS = frozenset({"abort_local", "engine_error", *(f"expire_{kind}" for kind in EXPIRES)})  # of P's own
# What P may answer to what D says (protocol §3).
ANSWERS = {
    "hello": frozenset({"unknown", "pending", "ready", "failed", "done_ack"}),
    "done": frozenset({"done_ack"}),
    "abort": frozenset({"failed"}),
}


def wrong_timers(track: Track, record: Any) -> list[str]:
    """Timers of §7 that are missing, or armed where §7 gives them nothing to end."""
    due = _sender_timers(track, record) if track.role == "sender" else _receiver_timers(track, record)
    armed = TIMERS.intersection(record.timers)
    if armed == due:
        return []
    if track.role == "receiver" and track.state in LIVE and not record.candidates:
        armed -= {"hello"}  # the look-up that found nobody is repeated
    return [
        f"its {kind} timer is {'armed' if kind in armed else 'missing'} in {track.state}"
        for kind in sorted(armed ^ due)
    ]


def _sender_timers(track: Track, record: Any) -> frozenset[str]:
    if track.state not in LIVE:
        return _ENDED
    if record.peer or track.state == "Transferring":
        return _LEASED
    return _GATED if record.settings.gated and track.state == "Bootstrapping" else _ALONE


def _receiver_timers(track: Track, record: Any) -> frozenset[str]:
    if track.state not in LIVE:
        return _ENDED
    return (_ASKING if record.candidates else _LOOKING)[track.state]


_ENDED = frozenset({"tombstone"})
_ALONE = frozenset({"request"})
_LEASED, _GATED = _ALONE | {"lease"}, _ALONE | {"bootstrap"}
_LOOKING = {
    "Bootstrapping": _ALONE | {"bootstrap"},
    "WaitingForInput": _ALONE,
    "Transferring": _ALONE | {"transfer"},
}
_ASKING = {state: timers | {"hello"} for state, timers in _LOOKING.items()}


def kept_record(record: Any, armed: Any) -> Iterator[str]:
    """What is remembered of one room, and no timer of the driver will make it forget. armed: the driver's timers."""
    for kind in record.timers:
        if (kind, record.room) not in armed:
            yield f"room {record.room}: nobody will fire its {kind} timer"
    if not record.live and "tombstone" not in record.timers:
        yield f"room {record.room} has ended and is a tombstone for ever"
    offer = getattr(record, "offer", None)
    if not record.live and offer is not None and offer.packed is not None:
        yield f"room {record.room} has ended and keeps its packed arrays"
    if getattr(record, "notices", None) and "notice" not in record.timers:
        yield f"room {record.room}: its notice is not repeated and never ends"


def kept_entries(manager: Any) -> Iterator[str]:
    """Likewise of P's early entries and limbo; and an early hello is of no use once its leg has come."""
    side, armed = manager.sender, manager._armed
    for room, entries in side.early.items():
        if ("early", room) not in armed:
            yield f"room {room}: what came early is kept for ever"
        record = side.rooms.get(room)
        same = {e.kind for e in entries.values() if record is not None and e.digest == record.digest}
        if same == {"hello"}:  # beside an abort of the same prompt either may be meant: its timer ends it
            yield f"room {room}: a hello that came early is kept although its leg has come"
    for key in side.limbo:
        if ("limbo", key) not in armed:
            yield f"room {key.room}: its bytes are in limbo for ever"


def tells_by_itself(line: dict[str, Any], track: Track) -> bool:
    """P must tell its D: an end that D has not brought about, a leg that a D has asked for early (protocol §3, §4)."""
    if track.role != "sender" or not track.peer:
        return False
    own_end = line["event"] in ENDS and track.state == "Failed" and track.before in LIVE
    return own_end or (line["event"].startswith("leg") and track.before == "Absent")


def still_works(node: Any, room: int) -> bool:
    """Its scheduler holds a request of this room. One that D computes itself is the room's no more."""
    return any(
        seq.req.room == room and (seq.sender or seq.receiver) is not None
        for queue in node.scheduler._queues()
        for seq in queue
    )


class Answers:
    """What P has been asked within one turn and has not answered yet."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        # (node, peer, room, attempt), what was asked, what may be the answer
        self.open: list[tuple[tuple[str, str, int, str], str, frozenset[str]]] = []

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "effect_failed":  # registering has failed: what follows is the room's end
            room = int(line.get("room", -1))
            self.open = [x for x in self.open if (x[0][0], x[0][2]) != (line["node"], room)]
            return
        who, message = (line["node"], line["peer"], int(line["room"]), line["attempt"]), line["message"]
        if line["event"] == "sent":
            self.open = [x for x in self.open if x[0] != who or message not in x[2]]
        elif line["node"].startswith("p") and message in ANSWERS and not _over(line, track):
            other = track is not None and track.state == "Success" and line["attempt"] != track.attempt
            kinds = frozenset({"failed"}) if message == "hello" and other else ANSWERS[message]
            self.open.append((who, message, kinds))

    def missing(self) -> Iterator[str]:
        """After each event of the world: a turn of a driver is one event."""
        asked, self.open = self.open, []
        for (name, peer, room, _), message, kinds in asked:
            if self.ctx.node(name) is not None:
                yield f"{name} does not answer {message} of {peer} about room {room} ({' or '.join(sorted(kinds))})"


def is_over(attempt: str, peer: str, there: Track) -> bool:
    """P's room lives and is bound to a newer attempt, or to another D: it gives no answer to a hello of this one (§4)."""
    if there.state not in LIVE or there.attempt == "0":
        return False
    return int(attempt) < int(there.attempt) or (attempt == there.attempt and peer != there.peer)


def _over(line: dict[str, Any], track: Track | None) -> bool:
    return line["message"] == "hello" and track is not None and is_over(line["attempt"], line["peer"], track)
