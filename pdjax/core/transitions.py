"""THE table: what a sender (P) and a receiver (D) do on every event in every state (protocol §4, §5).

The rooms run it, python-statemachine classes, docs and checkers are generated from it, and no rule of the
hand-off stands anywhere else. It is pure data plus a lookup: no clock, no I/O, no randomness.

Reading a row: in one of ``states``, on ``event``, if every condition in ``when`` holds ("!x": x does not), go
to ``to`` ("=": stay) and perform ``effects`` in order. Rows of one (state, event) are tried from top to
bottom. Where none applies, a message from the wire is STALE (counted, nothing changes) and a local event is
ILLEGAL (the program must never raise it there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdjax.core.vocabulary import (
    ABSENT as ABSENT,
)
from pdjax.core.vocabulary import (
    CONDITIONS as CONDITIONS,
)
from pdjax.core.vocabulary import (
    EFFECTS as EFFECTS,
)
from pdjax.core.vocabulary import (
    FIXED as FIXED,
)
from pdjax.core.vocabulary import (
    LETTERS as LETTERS,
)
from pdjax.core.vocabulary import (
    LIVE as LIVE,
)
from pdjax.core.vocabulary import (
    LOCAL_EVENTS as LOCAL_EVENTS,
)
from pdjax.core.vocabulary import (
    RECEIVER as RECEIVER,
)
from pdjax.core.vocabulary import (
    SENDER as SENDER,
)
from pdjax.core.vocabulary import (
    STANDING as STANDING,
)
from pdjax.core.vocabulary import (
    STATE_NAMES as STATE_NAMES,
)
from pdjax.core.vocabulary import (
    TERMINAL as TERMINAL,
)
from pdjax.core.vocabulary import (
    TIMER_EVENTS as TIMER_EVENTS,
)
from pdjax.core.vocabulary import (
    WIRE_EVENTS as WIRE_EVENTS,
)
from pdjax.core.vocabulary import (
    Row as Row,
)

ROWS: list[Row] = []


def _rows(role: str) -> Callable[..., None]:
    def row(
        states: str,
        event: str,
        to: str,
        when: str,
        effects: str,
        why: str,
        *,
        reason: str = "",
        stale: bool = False,
    ) -> None:
        ROWS.append(
            Row(role, states, event, to, tuple(when.split()), tuple(effects.split()), why, reason, stale)
        )

    return row


# fmt: off
# One row a line, so that the table can be read as one.
p = _rows(SENDER)

# ------------------------------------------------------------------ sender: no record
p("N", "leg", "F", "early_abort", "answer_refused forget_early bury", "D gave up before our leg came", reason="client_abort")
p("N", "leg", "B", "early_hello", "bind_early forget_early arm_request say_pending", "D was first: it learns of its P now (§4)")
p("N", "leg", "B", "gated", "arm_request arm_bootstrap", "gated: no P time for a D that is not there")
p("N", "leg", "B", "", "arm_request", "accepted; budget comes next")
p("N", "leg_bad", "F", "early_hello", "answer_bad bind_early say_failed forget_early bury", "D waits for this room: tell it (B02)", reason="bad_request")
p("N", "leg_bad", "F", "", "answer_bad bury", "the tombstone answers D's hello", reason="bad_request")
p("N", "leg_refused", "F", "early_hello", "answer_refused bind_early say_failed forget_early bury", "D waits for this room: tell it (B02)", reason="queue_full")
p("N", "leg_refused", "F", "", "answer_refused bury", "the tombstone answers D's hello", reason="queue_full")
p("N", "hello", "=", "ack_none", "remember_early say_unknown", "our leg may be late, or D asks the wrong P (B04, S5)")
p("N", "hello", "=", "", "say_failed_echo", "D was acknowledged by a life of P that is gone", reason="lost")
p("N", "abort", "=", "quiet", "remember_early free_limbo answer_abort", "limbo outlives the tombstone")
p("N", "abort", "=", "uuid_of_my_epoch", "remember_early withdraw_again answer_abort", "fencing is repeatable and cheap")
p("N", "abort", "=", "", "remember_early answer_abort", "nothing here to fence")
p("N", "done", "=", "", "free_limbo say_done_ack", "the answer to every done, in any state (§3)")
p("N", "early_timer", "=", "", "forget_early", "bounded state (S12)")
p("N", "limbo_timer", "=", "", "free_limbo", "bounded release (V2)")
p("N", "peer_reborn", "=", "", "free_limbo", "the life that could read these bytes is over")

# ------------------------------------------------------------------ sender: live
p("BWT", "leg", "=", "", "answer_duplicate", "a duplicate crashed both schedulers elsewhere (B24); the first goes on")
p("BWT", "hello", "=", "foreign_fingerprint", "say_failed_echo", "S10: rejected before anything is allocated for it", reason="fingerprint_mismatch")
p("BWT", "hello", "=", "foreign_digest", "say_failed_echo", "crossed duplicates never decode each other's KV", reason="digest_mismatch")
p("BWT", "hello", "=", "ack_foreign", "say_failed_echo", "D was acknowledged by another life; this room is untouched", reason="lost")
p("B", "hello", "F", "attempt_newer", "engine_stop say_failed bury", "a newer attempt means the bound one is over", reason="superseded")
p("W", "hello", "F", "attempt_newer", "engine_stop free_budget say_failed bury", "a newer attempt means the bound one is over", reason="superseded")
p("T", "hello", "F", "attempt_newer", "withdraw to_limbo say_failed bury", "a newer attempt means the bound one is over", reason="superseded")
p("BWT", "hello", "=", "attempt_older", "", "an attempt that is over", stale=True)
p("BW", "hello", "=", "", "bind say_pending", "bind, renew the lease; heals a lost pending")
p("T", "hello", "=", "bound", "renew say_ready", "heals a lost ready (B31)")
p("T", "hello", "=", "", "bind register say_ready", "the hello that binds; registered on that D's own server")
p("BWT", "abort", "=", "attempt_older", "answer_abort", "an attempt that is over; still answered, so that its notice ends", stale=True)
p("BWT", "abort", "=", "foreign_digest", "answer_abort", "another request's abort must not end this one", stale=True)
p("B", "abort", "F", "", "engine_stop answer_abort bury", "D's end reaches P in one trip (V7)", reason="peer_failed")
p("W", "abort", "F", "", "engine_stop free_budget answer_abort bury", "never registered: nothing can read it", reason="peer_failed")
p("T", "abort", "F", "!bound", "drop_arrays free_budget answer_abort bury", "never registered: nothing can read it", reason="peer_failed")
p("T", "abort", "F", "quiet !attempt_newer", "withdraw free_budget answer_abort bury", "D can read no more", reason="peer_failed")
p("T", "abort", "F", "", "withdraw to_limbo answer_abort bury", "bytes in flight stay charged until D is quiet (peer-servers §3)", reason="peer_failed")
for _event, _reason, _why in (
    ("abort_local", "", "the client or the operator ended it"),
    ("engine_error", "engine_error", "this side failed"),
    ("expire_request", "request_timeout", "V1: every request ends"),
):
    p("B", _event, "F", "", "engine_stop say_failed bury", _why, reason=_reason)
    p("W", _event, "F", "", "engine_stop free_budget say_failed bury", _why, reason=_reason)
    p("T", _event, "F", "!bound", "drop_arrays free_budget bury", _why, reason=_reason)
    p("T", _event, "F", "", "withdraw to_limbo say_failed bury", _why, reason=_reason)
p("B", "expire_lease", "F", "bound", "engine_stop say_failed bury", "D is gone: no P time for it (L11)", reason="lease_expired")
p("W", "expire_lease", "F", "bound", "engine_stop free_budget say_failed bury", "D is gone", reason="lease_expired")
p("T", "expire_lease", "F", "!bound", "drop_arrays free_budget bury", "D never came", reason="lease_expired")
p("T", "expire_lease", "F", "", "withdraw to_limbo say_failed bury", "a lease plus withdraw: safe and never stuck (formal: 5 steps)", reason="lease_expired")
p("B", "expire_bootstrap", "F", "gated !bound", "engine_stop bury", "gated: D never came", reason="bootstrap_timeout")
p("B", "peer_reborn", "F", "bound", "engine_stop bury", "the D that had the room is gone", reason="peer_lost")
p("W", "peer_reborn", "F", "bound", "engine_stop free_budget bury", "the D that had the room is gone", reason="peer_lost")
p("T", "peer_reborn", "F", "bound", "withdraw free_budget bury", "a dead reader holds no bytes", reason="peer_lost")
p("B", "admit", "W", "budget_free !gated", "reserve", "S17: the limit is taken before what it limits")
p("B", "admit", "W", "budget_free bound", "reserve", "gated: D is there")
p("B", "admit", "=", "", "", "waits in B")
p("W", "kv_ready", "T", "bound", "keep_arrays register say_ready", "packed, private, fenced by a fresh uuid (protocol §6)")
p("W", "kv_ready", "T", "", "keep_arrays", "registered at the hello that binds; the lease runs from here")
p("BW", "done", "=", "", "say_done_ack", "nothing was offered yet", stale=True)
p("T", "done", "S", "uuid_mine", "release_arrays free_budget say_done_ack bury", "done means that every part is scattered on D (S2, S13)")
p("T", "done", "=", "", "say_done_ack", "another registration's done", stale=True)

# ------------------------------------------------------------------ sender: ended
p("SF", "leg", "=", "", "answer_duplicate", "a retired room is refused as long as any of its messages can live")
p("S", "hello", "=", "foreign_digest", "say_failed_echo", "another request under the same room: it must end, too", reason="digest_mismatch")
p("S", "hello", "=", "attempt_newer", "say_failed_echo", "a finished room serves nobody else", reason="superseded")
p("S", "hello", "=", "attempt_older", "say_failed_echo", "a finished room serves nobody else", reason="superseded")
p("S", "hello done", "=", "", "say_done_ack", "heals a lost done_ack")
p("S", "abort", "=", "", "say_failed_echo", "all bytes were consumed: nothing to fence", reason="superseded")
p("F", "hello", "=", "", "say_failed", "heals a lost failed (B54)")
p("F", "abort", "=", "quiet", "free_limbo answer_abort", "D's quiet gives the bytes back")
p("F", "abort", "=", "", "withdraw_again answer_abort", "fencing is repeatable and cheap")
p("F", "done", "=", "", "free_limbo say_done_ack count_late_done", "D has everything although we had given up")
p("SF", "limbo_timer", "=", "", "free_limbo", "bounded release (V2)")
p("BWT", "limbo_timer", "=", "", "free_limbo", "limbo belongs to an older attempt, not to this record")
p("SF", "peer_reborn", "=", "", "free_limbo", "the life that could read these bytes is over")
p("BWT", "peer_reborn", "=", "", "free_limbo", "not bound to that life")
p("SF", "tombstone_timer", "N", "", "forget", "no message or notice of the room can live any more")

d = _rows(RECEIVER)

# ------------------------------------------------------------------ receiver: no record
d("N", "leg", "B", "", "mint_attempt arm_request arm_bootstrap lookup", "accepted; looking for the P that has the room")
d("N", "leg_bad", "F", "", "answer_bad mint_attempt lookup bury", "P must not wait for us (V7)", reason="bad_request")
d("N", "leg_refused", "F", "", "answer_refused mint_attempt lookup bury", "P must not wait for us (V7)", reason="queue_full")
d("N", "ready pending", "=", "", "reply_abort", "creates nothing (S5, S12)")
d("N", "failed", "=", "!echo", "reply_abort", "creates nothing (S5, S12)")

# ------------------------------------------------------------------ receiver: all records
d("BWTSF", "leg", "=", "", "answer_duplicate", "the first goes on")

# ------------------------------------------------------------------ receiver: Bootstrapping
d("B", "candidates", "=", "", "note_candidates say_hello", "hello to every candidate (§3)")
d("B", "no_candidate", "F", "", "engine_stop bury", "only incompatible instances: say so now, not in 30 s", reason="no_compatible_peer")
d("BWT", "hello_timer", "=", "", "say_hello", "renews the lease, heals lost pushes, tests that P lives")
d("B", "unknown", "F", "from_candidate newer_life", "engine_stop notice_abort bury", "the P that we noted died, the room with it", reason="peer_lost")
d("B", "unknown", "=", "from_candidate", "", "its leg may be late, or this is the wrong P")
d("B", "ready pending", "=", "!from_candidate", "reply_abort", "not a P that we asked")
d("B", "pending", "W", "", "bind_peer abort_others", "peer_known")
d("B", "ready", "W", "agrees", "bind_peer abort_others note_ready", "joins the page queue, FIFO by ready")
d("B", "ready", "F", "", "bind_peer abort_others engine_stop notice_abort bury", "not what this request needs (S7, S10)", reason="manifest_mismatch")
d("B", "failed", "=", "!from_candidate !echo", "reply_abort", "not a P that we asked")
d("B", "failed", "=", "!from_candidate", "end_notice", "a candidate that was told to forget the room")
d("B", "failed", "F", "last_candidate echo", "bind_peer engine_stop bury", "P has ended it and nothing is in flight", reason="peer_failed")
d("B", "failed", "F", "last_candidate", "bind_peer engine_stop notice_abort bury", "P has ended it (V7)", reason="peer_failed")
d("B", "failed", "=", "", "drop_candidate", "others remain")
d("B", "refused peer_silence", "F", "from_candidate last_candidate", "engine_stop notice_abort bury", "the last that could have the room is gone, or only unheard: then it must know (V7)", reason="peer_lost")
d("B", "refused peer_silence", "=", "from_candidate", "drop_candidate abort_dropped", "no failure while others remain; one that was only unheard must know (V7)")
d("B", "refused peer_silence", "=", "", "end_notice", "not one of ours, or dropped and gone: it needs no notice")
d("B", "expire_bootstrap", "F", "", "engine_stop notice_abort bury", "no P has the room", reason="bootstrap_timeout")

# ------------------------------------------------------------------ receiver: bound
d("WT", "candidates", "=", "", "", "bound already")
d("WT", "no_candidate", "=", "", "", "bound already")
d("WT", "unknown pending ready failed", "F", "from_bound newer_life", "engine_stop abandon_pull notice_abort bury", "the bound P has restarted: its bytes are gone", reason="peer_lost")
d("WT", "ready pending", "=", "!from_bound", "reply_abort", "another P has a twin of this room")
d("WT", "failed", "=", "!from_bound !echo", "reply_abort", "another P has a twin of this room")
d("WT", "failed", "=", "!from_bound", "end_notice", "that P is done with us")
d("W", "ready", "F", "!agrees", "engine_stop notice_abort bury", "not what this request needs (S7, S10)", reason="manifest_mismatch")
d("T", "ready", "F", "!same_uuid", "engine_stop abandon_pull notice_abort bury", "one registration a room: this is not the one we pull", reason="manifest_mismatch")
d("W", "ready", "=", "!has_uuid", "note_ready", "joins the page queue, FIFO by ready")
d("W", "ready", "F", "!same_uuid", "engine_stop notice_abort bury", "one registration a room", reason="manifest_mismatch")
d("W", "failed", "F", "echo", "engine_stop bury", "P has ended it and nothing is in flight", reason="peer_failed")
d("W", "failed", "F", "", "engine_stop notice_abort bury", "P has ended it (V7)", reason="peer_failed")
d("T", "failed", "F", "echo quiet", "engine_stop bury", "P has ended it and nothing is in flight", reason="peer_failed")
d("T", "failed", "F", "", "engine_stop abandon_pull notice_abort bury", "P has ended it (V7)", reason="peer_failed")
d("WT", "refused peer_silence", "F", "from_bound", "engine_stop abandon_pull notice_abort bury", "P is gone or mute", reason="peer_lost")
d("WT", "refused peer_silence", "=", "", "end_notice", "a former candidate is gone: it needs no notice")
d("W", "start", "T", "has_uuid pages_taken fresh", "start_pull", "pages before pull (S17); a P that answers")
d("W", "start", "=", "has_uuid pages_taken", "", "the P is late with an answer: wait for it or for its silence")
d("T", "landed", "=", "", "deliver", "the scheduler owns the pools and scatters (protocol §6)")
d("T", "peer_failed", "F", "", "engine_stop notice_abort bury", "parts fail one by one (transfer rule 2); the pull has settled", reason="part_failed")
d("T", "scattered", "S", "", "notice_done bury", "every part is in this attempt's pages (S2)")
d("T", "expire_transfer", "F", "", "engine_stop abandon_pull notice_abort bury", "a pull has no deadline of its own (transfer rule 1)", reason="transfer_timeout")
d("BWT", "expire_request", "F", "", "engine_stop abandon_pull notice_abort bury", "V1: every request ends", reason="request_timeout")
d("BWT", "abort_local", "F", "", "engine_stop abandon_pull notice_abort bury", "the client or the operator ended it")
d("BWT", "engine_error", "F", "", "engine_stop abandon_pull notice_abort bury", "this side failed", reason="engine_error")
d("WT", "peer_reborn", "F", "from_bound newer_life", "engine_stop abandon_pull bury", "the bound P has restarted: its bytes are gone", reason="peer_lost")
d("BWTSF", "peer_reborn", "=", "", "end_notice", "the life that the notice was for is over")
d("BWTSF", "notice_timer", "=", "", "repeat_notice", "20 ms doubling to the hello interval, until answered")

# ------------------------------------------------------------------ receiver: ended
d("F", "candidates", "=", "", "note_candidates notice_abort", "a refused leg: now we know whom to tell")
d("SF", "no_candidate", "=", "", "", "nobody to tell")
d("S", "candidates", "=", "", "", "over")
d("F", "ready pending", "=", "", "notice_again", "P still works for a room that we have left")
d("F", "failed", "=", "!echo !noticed", "notice_again", "P has not heard our abort")
d("F", "failed", "=", "!echo", "", "the notice is on its way and says quiet by itself; an answer at once never ends (docs/decisions/0002)")
d("F", "failed", "=", "noticed quiet notice_epoch", "end_notice", "P is done with this attempt")
d("F", "pull_settled", "=", "", "notice_quiet", "P gets its budget back now, not at the limbo timer")
d("SF", "refused peer_silence", "=", "", "end_notice", "nobody there to tell")
d("S", "ready", "=", "from_bound same_uuid", "notice_again", "P has not heard our done")
d("S", "ready pending", "=", "!from_bound", "reply_abort", "another P has a twin of this room")
d("S", "failed", "=", "!from_bound !echo", "reply_abort", "another P has a twin of this room")
d("S", "failed", "=", "!echo", "notice_again", "a verified Success stands whatever P says later")
d("S", "failed", "=", "!from_bound", "end_notice", "that P is done with us")
d("S", "done_ack", "=", "uuid_mine", "end_notice", "P has its bytes back")
d("S", "abort_local engine_error", "=", "", "", "the request ends while decoding; the hand-off stays a success")
d("SF", "tombstone_timer", "N", "no_notice", "forget", "no message or notice of the room can live any more")
d("SF", "tombstone_timer", "=", "", "renew_tombstone", "a notice is still open")

# fmt: on
# ------------------------------------------------------------------ compile


@dataclass(frozen=True)
class Choice:
    """A compiled row. mask and want are bits of the (state, event)'s condition list."""

    mask: int
    want: int
    to: int  # -1: stay
    effects: tuple[str, ...]
    reason: str
    kind: str  # "row", "stale", "illegal"
    row: int  # index into ROWS, -1 for a default


@dataclass(frozen=True)
class Cell:
    """All rows of one (role, state, event): the conditions to evaluate, and the choices in order."""

    conditions: tuple[str, ...]
    choices: tuple[Choice, ...]


Table = dict[str, dict[int, dict[str, Cell]]]


def compile_rows(rows: Iterable[Row], *, dead_ok: bool = False) -> Table:
    """Rows → role → state → event → Cell, total over all of them. ValueError on an unknown or dead row.

    dead_ok: for tables that are wrong on purpose, rows that can never be reached are left out.
    """
    found: dict[tuple[str, int, str], list[tuple[int, Row]]] = {}
    for index, row in enumerate(rows):
        _check_row(row)
        for letter in row.states:
            for event in row.event.split():
                found.setdefault((row.role, LETTERS[letter], event), []).append((index, row))
    table: Table = {}
    for role in (SENDER, RECEIVER):
        table[role] = {}
        for state in LETTERS.values():
            table[role][state] = {
                event: _cell(found.get((role, state, event), []), event in WIRE_EVENTS[role], dead_ok)
                for event in sorted(WIRE_EVENTS[role] | LOCAL_EVENTS[role])
            }
    return table


def _check_row(row: Row) -> None:
    known = WIRE_EVENTS[row.role] | LOCAL_EVENTS[row.role]
    bad = [e for e in row.event.split() if e not in known]
    bad += [c for c in row.when if c.lstrip("!") not in CONDITIONS]
    bad += [e for e in row.effects if e not in EFFECTS]
    bad += [s for s in row.states if s not in LETTERS]
    if row.to != "=" and row.to not in LETTERS:
        bad.append(row.to)
    if bad or not row.why:
        raise ValueError(f"row {row}: unknown {bad}" if bad else f"row {row}: says no why")


def _cell(rows: list[tuple[int, Row]], wire: bool, dead_ok: bool) -> Cell:
    names = tuple(dict.fromkeys(c.lstrip("!") for _, row in rows for c in row.when))
    choices: list[Choice] = []
    for index, row in rows:
        if choices and choices[-1].mask == 0:
            if dead_ok:
                break
            raise ValueError(f"row can never be reached: {row}")
        mask = want = 0
        for c in row.when:
            bit = 1 << names.index(c.lstrip("!"))
            mask |= bit
            want |= 0 if c.startswith("!") else bit
        to = -1 if row.to == "=" else LETTERS[row.to]
        choices.append(
            Choice(mask, want, to, row.effects, row.reason, "stale" if row.stale else "row", index)
        )
    if not choices or choices[-1].mask:
        choices.append(Choice(0, 0, -1, (), "", "stale" if wire else "illegal", -1))
    return Cell(names, tuple(choices))


COMPILED: Table = compile_rows(ROWS)


@contextmanager
def using(rows: Iterable[Row]) -> Iterator[Table]:
    """Inside the block every room of this process runs these rows. For checkers only: not for threads that serve."""
    global COMPILED
    before, COMPILED = COMPILED, compile_rows(rows, dead_ok=True)
    try:
        yield COMPILED
    finally:
        COMPILED = before


def step(role: str, state: int, event: str, holds: Callable[[str], bool]) -> Choice:
    """The row that applies. ``holds(condition)`` is asked only for what the cell needs.

    ~1 µs; never raises for a known role, state and event (the table is total).
    """
    cell = COMPILED[role][state][event]
    flags, bit = 0, 1
    for name in cell.conditions:
        if holds(name):
            flags |= bit
        bit <<= 1
    for choice in cell.choices:
        if flags & choice.mask == choice.want:
            return choice
    raise AssertionError("unreachable: the last choice of every cell is unconditional")


def is_local(role: str, event: str) -> bool:
    return event in LOCAL_EVENTS[role]
