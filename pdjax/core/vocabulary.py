"""The words of the table: roles, states, events, conditions and effects, each with its meaning (protocol §2 to §5).

Pure data. Must never say when something happens: that is the table's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdjax.core.kvpoll import KVPoll

SENDER: Final = "sender"
RECEIVER: Final = "receiver"

ABSENT: Final = 5  # "N": there is no record of the room
LETTERS: Final[dict[str, int]] = {
    "N": ABSENT,
    "B": int(KVPoll.Bootstrapping),
    "W": int(KVPoll.WaitingForInput),
    "T": int(KVPoll.Transferring),
    "S": int(KVPoll.Success),
    "F": int(KVPoll.Failed),
}
STATE_NAMES: Final[dict[int, str]] = {ABSENT: "Absent", **{int(p): p.name for p in KVPoll}}
LIVE: Final = frozenset({LETTERS["B"], LETTERS["W"], LETTERS["T"]})
TERMINAL: Final = frozenset({LETTERS["S"], LETTERS["F"]})

WIRE_EVENTS: Final[dict[str, frozenset[str]]] = {
    SENDER: frozenset({"hello", "abort", "done"}),
    RECEIVER: frozenset({"unknown", "pending", "ready", "failed", "done_ack"}),
}

LOCAL_EVENTS: Final[dict[str, frozenset[str]]] = {
    SENDER: frozenset(
        [
            "leg",
            "leg_bad",
            "leg_refused",
            "admit",
            "kv_ready",
            "abort_local",
            "engine_error",
            "expire_lease",
            "expire_bootstrap",
            "expire_request",
            "peer_reborn",
            "early_timer",
            "limbo_timer",
            "tombstone_timer",
        ]
    ),
    RECEIVER: frozenset(
        [
            "leg",
            "leg_bad",
            "leg_refused",
            "candidates",
            "no_candidate",
            "hello_timer",
            "notice_timer",
            "start",
            "landed",
            "peer_failed",
            "scattered",
            "refused",
            "peer_silence",
            "peer_reborn",
            "expire_bootstrap",
            "expire_transfer",
            "expire_request",
            "abort_local",
            "engine_error",
            "pull_settled",
            "tombstone_timer",
        ]
    ),
}

# What a room's own timer raises when it is due, by the timer's name in ``Room.timers``.
TIMER_EVENTS: Final[dict[str, str]] = {
    "request": "expire_request",
    "lease": "expire_lease",
    "bootstrap": "expire_bootstrap",
    "transfer": "expire_transfer",
    "tombstone": "tombstone_timer",
    "hello": "hello_timer",
    "notice": "notice_timer",
}

# Conditions that the record decides with no message in hand: whoever only looks may ask them.
STANDING: Final = frozenset({"bound", "gated", "has_uuid", "fresh", "no_notice"})
FIXED: Final = frozenset({"gated"})  # settings: a row that lacks one never applies in this process

CONDITIONS: Final[dict[str, str]] = {
    # sender
    "early_hello": "a hello for this room and digest came before its leg",
    "early_abort": "an abort for this room and digest came before its leg",
    "ack_none": "the hello says that no P has acknowledged the room",
    "ack_foreign": "the hello acknowledges a P epoch that is neither 0 nor mine",
    "foreign_fingerprint": "the peer runs another model, weights or settings",
    "foreign_digest": "the message is about another prompt or other settings; the bound attempt's abort never is",
    "bound": "a D has said hello to this room",
    "gated": "prefill waits for a hello (setting)",
    "budget_free": "the unpulled budget, and with staging the host slots, can take this room's bytes, or nothing at all is charged",
    "attempt_newer": "the room is bound and the message is of a newer attempt",
    "attempt_older": "the room is bound and the message is of an older attempt",
    "uuid_mine": "the message names the uuid of this room's registration",
    "uuid_of_my_epoch": "the message names a uuid that this life of P could have minted",
    "quiet": "no pull of this attempt can still touch P's bytes",
    # receiver
    "from_candidate": "the sender is a candidate that has not refused",
    "last_candidate": "no other candidate is left",
    "from_bound": "the sender is the instance that this room is bound to",
    "newer_life": "the sender's epoch is newer than the one noted or bound",
    "agrees": "digest, fingerprint and manifest are what this request needs",
    "has_uuid": "a ready has been accepted",
    "same_uuid": "the ready repeats the accepted uuid",
    "pages_taken": "the scheduler has taken pages for prompt and output under this attempt's token",
    "fresh": "the bound P's last answer is younger than the peer silence",
    "echo": "the failed answers a quiet abort: P is done with this attempt",
    "notice_epoch": "the sender's epoch is at least as new as the notice's",
    "noticed": "a notice to the sender is open",
    "no_notice": "no notice is open",
}

EFFECTS: Final[dict[str, str]] = {
    # both
    "answer_duplicate": "refuse the leg: 400, and tell the peer nothing",
    "answer_bad": "refuse the leg: 400",
    "answer_refused": "refuse the leg: 503",
    "arm_request": "start the request timer",
    "arm_bootstrap": "start the bootstrap timer",
    "bury": "keep the room as a tombstone, stop its other timers",
    "forget": "drop the tombstone",
    "engine_stop": "tell the scheduler that the room has ended: it stops the work and answers the client",
    # sender
    "remember_early": "keep the hello or abort for a leg that is late (bounded)",
    "forget_early": "drop what was kept for a late leg",
    "bind": "this D and attempt have the room; the lease runs, the bootstrap timer stops",
    "bind_early": "bind to the D whose hello came early",
    "renew": "the lease starts again",
    "say_unknown": "answer unknown",
    "say_pending": "answer pending",
    "say_ready": "answer ready",
    "say_failed": "answer or push failed, echo 0",
    "say_failed_echo": "answer failed, echo 1",
    "answer_abort": "answer failed, echo = the abort's quiet",
    "say_done_ack": "answer done_ack",
    "reserve": "charge the room's bytes to the unpulled budget; with staging, take a host slot for them",
    "keep_arrays": "hold the private packed arrays under a fresh uuid; the lease runs",
    "register": "register the arrays on that D's transfer server",
    "drop_arrays": "let go of arrays that were never registered",
    "withdraw": "register the uuid again with an empty list, let go of the arrays",
    "withdraw_again": "repeat the withdraw for the uuid in the message",
    "release_arrays": "withdraw what D says it has consumed: costs 5 µs, frees even if a part was not pulled",
    "free_budget": "give the room's bytes back to the budget, and their host slot",
    "to_limbo": "keep the bytes charged until D is quiet, reborn, or the limbo timer",
    "free_limbo": "give back what this attempt left in limbo; a host slot is replaced unless D said that it is quiet",
    "count_late_done": "count a done for a room that has failed",
    # receiver
    "mint_attempt": "a fresh attempt id; it is also the token that will own pages",
    "lookup": "ask the registry for candidates",
    "note_candidates": "add the candidates with the epochs that the registry shows",
    "drop_candidate": "this candidate is out",
    "say_hello": "hello to the bound P, or to every candidate; arm the next one",
    "bind_peer": "the sender is this room's P, in this life; stop the bootstrap timer",
    "abort_others": "abort notice to every other candidate",
    "abort_dropped": "abort notice to the candidate that is dropped",
    "reply_abort": "abort(quiet) to the sender, once",
    "note_ready": "keep manifest and first token; tell the scheduler (FIFO by ready)",
    "start_pull": "pull every part into temporary buffers; start the transfer timer",
    "deliver": "hand the verified parts to the scheduler for the scatter",
    "abandon_pull": "leave a pull in flight to the graveyard",
    "notice_done": "done notice to P, repeated until acknowledged",
    "notice_abort": "abort notice to the bound P, or to every candidate, repeated until answered",
    "notice_again": "the open notice once more, now for the sender's epoch",
    "notice_quiet": "the attempt is quiet now: say so in the open abort notices at once",
    "repeat_notice": "send the open notice again, or give it up when its life is over and the attempt is quiet",
    "end_notice": "close the notice to the sender",
    "renew_tombstone": "keep the tombstone while a notice is open",
}


@dataclass(frozen=True)
class Row:
    """One line of the table. reason: what a room that goes to F on this row carries ("": from the event)."""

    role: str
    states: str
    event: str
    to: str
    when: tuple[str, ...]
    effects: tuple[str, ...]
    why: str
    reason: str = ""
    stale: bool = False
