"""An inductive invariant of the ownership core, proved with z3 for unbounded loss, duplication and expiry.

One room, one attempt. The wire is not bounded and not searched: a message may arrive in any state in which it could
once have been sent, which is what unbounded loss, duplication and delay amount to. Effects and targets come from the
rows, so a broken row makes a step fail, and z3 shows the state before it. Must never look at a reachable state: that
is what makes it independent of the searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import z3

from pdjax.core import transitions as t

# State, as booleans: P's and D's room, what P holds, what the transport does, which messages have ever been sent.
P_STATES, D_STATES = "NBWTSF", "NBWTSF"
FLAGS = (
    "bound",  # P knows D
    "charged",  # P's budget is charged for the live room
    "limbo",  # … or for the attempt after the room
    "open",  # bytes are registered and can be pulled
    "reading",  # a pull has the bytes and is in flight
    "issued",  # D has issued its pull and it has not met the registration yet
    "pulling",  # D's record says that its pull is not over
    "arrived",  # all parts are with D's scheduler
    "committed",  # they are scattered into this attempt's pages
    "pages",  # D's pages belong to this attempt
    "manifest",  # D has accepted a ready
    "said_ready", "said_done", "said_quiet",  # messages that may arrive, once or often, at any later time
    "waived",  # the limbo timer has given the bytes back
    "p_came", "d_came",  # the legs: one each
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """One state in z3's variables: v.p("T") is "P's room is in T", v.open and so on are booleans."""

    name: str

    def p(self, letters: str) -> Any:
        return z3.Or([z3.Int(f"{self.name}.p") == t.LETTERS[x] for x in letters])

    def d(self, letters: str) -> Any:
        return z3.Or([z3.Int(f"{self.name}.d") == t.LETTERS[x] for x in letters])

    def __getattr__(self, flag: str) -> Any:
        if flag not in FLAGS:
            raise AttributeError(flag)
        return z3.Bool(f"{self.name}.{flag}")


def clauses(v: View) -> dict[str, Any]:
    """The invariant, clause by clause. The first part is what is wanted, the rest makes it inductive."""
    live_d = v.d("BWT")
    return {
        "S1: what can be pulled belongs to a live room of P": z3.Implies(v.open, v.p("T")),
        "S1: D's pages belong to its pull or to what it has committed": z3.Implies(v.pages, z3.Or(v.d("T"), v.committed)),
        "S2: D succeeds only when every part is scattered": z3.Implies(v.d("S"), v.committed),
        "S3: P's budget is charged exactly while it works": v.charged == v.p("WT"),
        "S3: never charged twice": z3.Not(z3.And(v.charged, v.limbo)),
        "S4: bytes in flight are paid for": z3.Implies(
            v.reading, z3.Or(v.charged, v.limbo, z3.And(v.waived, z3.Not(v.d("T"))))
        ),
        "S13: P succeeds only when D has": z3.Implies(v.p("S"), v.committed),
        "S17: D pulls only into its own pages": z3.Implies(v.d("T"), v.pages),
        "a pull belongs to a record that says so": z3.Implies(z3.Or(v.issued, v.reading), v.pulling),
        "a pull is one thing": z3.Not(z3.Or(z3.And(v.issued, v.reading), z3.And(v.issued, v.arrived), z3.And(v.reading, v.arrived))),
        "what has arrived is D's": z3.Implies(v.arrived, v.d("T")),
        "nothing is pulled before the start or without a record": z3.Implies(
            z3.Or(v.d("NBW"), v.committed), z3.Not(z3.Or(v.issued, v.reading, v.arrived))
        ),
        "a pull in flight was registered by a bound P": z3.And(
            z3.Implies(v.reading, v.p("TSFN")), z3.Implies(z3.And(v.p("T"), z3.Or(v.open, v.reading)), v.bound)
        ),
        "what is committed is a success": z3.Implies(v.committed, v.d("SN")),
        "nothing comes before the legs": z3.And(
            z3.Implies(z3.Not(v.p_came), z3.Not(z3.Or(v.bound, v.charged, v.limbo, v.open, v.reading, v.said_ready))),
            z3.Implies(z3.Not(v.d_came), z3.Not(z3.Or(
                v.issued, v.reading, v.pulling, v.arrived, v.committed, v.pages, v.manifest, v.said_done, v.said_quiet
            ))),
            z3.Implies(v.p("BWTSF"), v.p_came), z3.Implies(v.d("BWTSF"), v.d_came),
        ),
        "a record pulls only from its start on, and is kept until the pull is over": z3.Implies(
            v.d("NBW"), z3.Not(v.pulling)
        ),
        "done is said after the commit": z3.Implies(v.said_done, z3.And(v.committed, z3.Not(v.reading))),
        "quiet is said by an attempt that is over and settled": z3.Implies(
            v.said_quiet, z3.And(z3.Not(live_d), z3.Not(v.pulling))
        ),
        "bytes are registered for a bound D": z3.Implies(z3.Or(v.open, v.limbo), v.bound),
    }  # fmt: skip


_PAIR = (View("before"), View("after"))
Step = tuple[str, Any]


def _target(row: t.Row, letter: str) -> str:
    return letter if row.to == "=" else row.to


@dataclass
class _Update:
    """What one step changes; everything else stays."""

    p: str = ""
    d: str = ""
    sets: dict[str, Any] | None = None


def _formula(guard: Any, update: _Update) -> Any:
    before, after = _PAIR
    sets = update.sets or {}
    parts = [guard]
    parts.append(after.p(update.p) if update.p else z3.Int("after.p") == z3.Int("before.p"))
    parts.append(after.d(update.d) if update.d else z3.Int("after.d") == z3.Int("before.d"))
    for flag in FLAGS:
        value = sets.get(flag, getattr(before, flag))
        parts.append(getattr(after, flag) == value)
    return z3.And(parts)


def _sender_effects(row: t.Row, event: str) -> dict[str, Any]:
    before, _ = _PAIR
    true, false = z3.BoolVal(True), z3.BoolVal(False)
    sets: dict[str, Any] = {}
    for e in row.effects:
        charged = sets.get("charged", before.charged)
        if e in ("bind", "bind_early"):
            sets["bound"] = true
        elif e == "reserve":
            sets["charged"] = true
        elif e == "register":
            sets["open"] = true
        elif e in ("withdraw", "release_arrays", "withdraw_again"):
            sets["open"] = false
        elif e == "free_budget":
            sets["charged"] = false
        elif e == "to_limbo":
            sets["limbo"], sets["charged"] = charged, false
        elif e == "free_limbo":
            sets["limbo"] = false
            if event == "limbo_timer":
                sets["waived"] = true
        elif e == "say_ready":
            sets["said_ready"] = true
        elif e == "forget":
            sets["bound"] = z3.If(before.limbo, before.bound, false)
    return sets


def _receiver_effects(row: t.Row, event: str) -> dict[str, Any]:
    before, _ = _PAIR
    true, false = z3.BoolVal(True), z3.BoolVal(False)
    sets: dict[str, Any] = {}
    if event == "peer_failed":
        sets["pulling"] = false
    for e in row.effects:
        pulling = sets.get("pulling", before.pulling)
        if e == "note_ready":
            sets["manifest"] = true
        elif e == "start_pull":
            sets.update(pulling=true, issued=true, pages=true)
        elif e == "deliver":
            sets["pulling"] = false
        elif e == "notice_done":
            sets.update(pulling=false, said_done=true)
        elif e == "engine_stop":
            sets.update(pages=false, arrived=false)
        elif e == "notice_quiet":
            sets.update(pulling=false, said_quiet=true)
        elif e == "reply_abort":
            sets["said_quiet"] = z3.Or(before.said_quiet, before.d_came)  # this attempt's, if it has been
        elif e in ("notice_abort", "notice_again"):
            over = row.to == "F" or event in ("ready", "pending", "failed")
            if over:
                sets["said_quiet"] = z3.Or(sets.get("said_quiet", before.said_quiet), z3.Not(pulling))
    return sets


def _known(row: t.Row, meaning: dict[str, Any]) -> list[Any]:
    """The conditions of a row that have a meaning in this abstraction."""
    parts: list[Any] = []
    for c in row.when:
        known = meaning.get(c.lstrip("!"))
        if known is not None:
            parts.append(z3.Not(known) if c.startswith("!") else known)
    return parts


def _sender_guard(row: t.Row, event: str) -> Any:
    """What the row's conditions say of this state; what this abstraction does not know may hold or not."""
    before, _ = _PAIR
    parts = _known(
        row,
        {
            "bound": before.bound, "budget_free": z3.Not(z3.Or(before.charged, before.limbo)),
            "foreign_digest": z3.BoolVal(False), "foreign_fingerprint": z3.BoolVal(False),
            "attempt_newer": z3.BoolVal(False), "attempt_older": z3.BoolVal(False), "gated": z3.BoolVal(False),
            "quiet": z3.Bool("event.quiet"), "uuid_mine": before.p("T"),
        },
    )  # fmt: skip
    if event == "done":
        parts.append(before.said_done)
    if event == "abort":
        parts.append(z3.Implies(z3.Bool("event.quiet"), before.said_quiet))
    if event == "limbo_timer":
        parts += [before.limbo, z3.Not(before.d("T"))]  # transfer + answer bound ≤ limbo
    if event == "peer_reborn":
        parts += [z3.BoolVal(False)]  # one life here; the searches crash
    return z3.And(parts) if parts else z3.BoolVal(True)


def _receiver_guard(row: t.Row, event: str) -> Any:
    before, _ = _PAIR
    parts = _known(
        row,
        {
            "has_uuid": before.manifest, "same_uuid": before.manifest, "agrees": z3.BoolVal(True),
            "quiet": z3.Not(before.pulling), "newer_life": z3.BoolVal(False),
            "from_bound": z3.BoolVal(True), "from_candidate": z3.BoolVal(True),  # one P
            "no_notice": z3.Not(before.pulling),  # S4 of the searches: no room is forgotten under its pull
        },
    )  # fmt: skip
    if event == "ready":
        parts.append(before.said_ready)
    if event == "scattered":
        parts.append(before.arrived)
    if event in ("landed", "peer_failed"):
        parts.append(z3.Bool(f"transport.{event}"))
    if event == "pull_settled":
        parts.append(z3.BoolVal(False))  # below, with the pull's own end
    if event == "peer_reborn":
        parts.append(z3.BoolVal(False))
    return z3.And(parts) if parts else z3.BoolVal(True)


def steps(rows: Sequence[t.Row]) -> list[Step]:
    """Every step: one for each row and state, in the order of the rows, and the transport's own."""
    out: list[Step] = []
    for role in (t.SENDER, t.RECEIVER):
        for letter in t.LETTERS:
            for event in sorted(t.WIRE_EVENTS[role] | t.LOCAL_EVENTS[role]):
                out += _cell(role, letter, event, rows)
    return out + _transport()


def _cell(role: str, letter: str, event: str, rows: Sequence[t.Row]) -> list[Step]:
    before, _ = _PAIR
    out: list[Step] = []
    above: list[Any] = []
    for index, row in enumerate(rows):
        if row.role != role or letter not in row.states or event not in row.event.split():
            continue
        sender = role == t.SENDER
        guard = _sender_guard(row, event) if sender else _receiver_guard(row, event)
        here = before.p(letter) if sender else before.d(letter)
        sets = _sender_effects(row, event) if sender else _receiver_effects(row, event)
        update = _Update(sets=sets)
        if event in ("leg", "leg_bad", "leg_refused"):
            sets["p_came" if sender else "d_came"] = z3.BoolVal(True)
        if sender:
            update.p = _target(row, letter)
        else:
            update.d = _target(row, letter)
            _landing(event, sets)
        name = f"row {index}: {role} {letter} {event}{' [' + ' '.join(row.when) + ']' if row.when else ''}"
        out.append((name, _formula(z3.And(here, guard, _extra(role, event), *above), update)))
        if all(c.lstrip("!") in _DECIDED for c in row.when):
            above.append(z3.Not(guard))
    return out


_DECIDED = frozenset(
    {"from_bound", "from_candidate", "bound", "budget_free", "quiet", "uuid_mine", "has_uuid", "same_uuid", "agrees", "newer_life", "foreign_digest",
     "foreign_fingerprint", "attempt_newer", "attempt_older", "gated"}
)  # fmt: skip


def _extra(role: str, event: str) -> Any:
    """What the program guarantees of a local event."""
    before, _ = _PAIR
    if event in ("leg", "leg_bad", "leg_refused"):
        return z3.Not(before.p_came if role == t.SENDER else before.d_came)
    if role == t.RECEIVER and event == "start":
        return z3.Not(z3.Or(before.said_quiet, before.pages))
    if role == t.RECEIVER and event == "landed":
        return before.reading
    if role == t.RECEIVER and event == "peer_failed":
        return z3.Or(before.issued, before.reading)
    return z3.BoolVal(True)


def _landing(event: str, sets: dict[str, Any]) -> None:
    if event == "landed":
        sets.update(reading=z3.BoolVal(False), arrived=z3.BoolVal(True))
    elif event == "peer_failed":
        sets.update(reading=z3.BoolVal(False), issued=z3.BoolVal(False))
    elif event == "scattered":
        sets.update(arrived=z3.BoolVal(False), committed=z3.BoolVal(True))


def _transport() -> list[Step]:
    """What no row decides: a pull meets the registration, or ends after its room has."""
    before, _ = _PAIR
    false, true = z3.BoolVal(False), z3.BoolVal(True)
    reach = _formula(
        z3.And(before.issued, before.open), _Update(sets={"issued": false, "reading": true, "open": false})
    )
    over = z3.And(z3.Or(before.issued, before.reading), before.d("FN"))
    settled = _formula(
        over, _Update(sets={"issued": false, "reading": false, "pulling": false, "said_quiet": true})
    )
    finish = _formula(
        z3.And(before.pages, before.committed), _Update(sets={"pages": z3.And(before.pages, before.d("T"))})
    )
    return [
        ("a pull meets the registration", reach),
        ("an abandoned pull settles", settled),
        ("decoding ends", finish),
    ]


@dataclass(frozen=True)
class Failure:
    """A step that leaves the invariant. before: the state before it, in words."""

    step: str
    clause: str
    before: str

    def __str__(self) -> str:
        return f"{self.step} breaks “{self.clause}” from: {self.before}"


def prove(rows: Sequence[t.Row] | None = None) -> list[Failure]:
    """Check that the invariant holds at the start and is kept by every step; the failures, one a step and clause."""
    rows = rows if rows is not None else t.ROWS
    before, after = _PAIR
    found: list[Failure] = []
    start = z3.And(before.p("N"), before.d("N"), *[z3.Not(getattr(before, f)) for f in FLAGS])
    found += _check(z3.Solver(), "the start", start, clauses(before))
    solver = z3.Solver()
    solver.add(*clauses(before).values(), before.p(P_STATES), before.d(D_STATES))
    wanted = clauses(after)
    for name, step in steps(rows):
        solver.push()
        found += _check(solver, name, step, wanted)
        solver.pop()
    return found


def _check(solver: z3.Solver, name: str, step: Any, wanted: dict[str, Any]) -> list[Failure]:
    solver.add(step, z3.Not(z3.And(*wanted.values())))
    if solver.check() == z3.unsat:
        return []
    model = solver.model()
    broken = [clause for clause, f in wanted.items() if z3.is_false(model.eval(f, model_completion=True))]
    return [Failure(name, clause, _words(model)) for clause in broken]


def _words(model: z3.ModelRef) -> str:
    before, _ = _PAIR
    true: Callable[[Any], bool] = lambda f: z3.is_true(model.eval(f, model_completion=True))  # noqa: E731
    p = next((x for x in P_STATES if true(before.p(x))), "?")
    d = next((x for x in D_STATES if true(before.d(x))), "?")
    flags = [f for f in FLAGS if true(getattr(before, f))]
    return f"P in {p}, D in {d}, {', '.join(flags) or 'nothing else'}"


def possible(rows: Sequence[t.Row] | None = None) -> list[str]:
    """Steps that can happen in a state of the invariant: a proof about steps that cannot would prove nothing."""
    before, _ = _PAIR
    solver = z3.Solver()
    solver.add(*clauses(before).values(), before.p(P_STATES), before.d(D_STATES))
    found = []
    for name, step in steps(rows if rows is not None else t.ROWS):
        if solver.check(step) == z3.sat:
            found.append(name)
    return found
