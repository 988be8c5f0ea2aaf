"""Mutants: the protocol made wrong on purpose, one way at a time, to see that a named property notices.

A mutant is a changed table (a row deleted, retargeted, without an effect or without a condition) or one of the
written-out mistakes of other systems. It is run in a fixed set of worlds until some S or V property is violated.
What no property notices survives, is listed, and is argued in docs/mutation.md. Must never leave a patch behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdjax.core import transitions as t
from pdjax.sim.workers import workers

Patch = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """name: stable, of the row's own words. patch: applies it while the context is open. row: index, or -1.

    shown_by: the trace that is run first.
    """

    name: str
    what: str
    patch: Patch
    row: int = -1
    shown_by: str = ""


@contextlib.contextmanager
def rows_replaced(rows: list[t.Row]) -> Iterator[None]:
    """The whole program runs this table meanwhile. ValueError: the rows make no table."""
    old_rows, old_compiled = list(t.ROWS), t.COMPILED
    compiled = t.compile_rows(rows)
    try:
        t.ROWS[:] = rows
        t.COMPILED = compiled
        yield
    finally:
        t.ROWS[:] = old_rows
        t.COMPILED = old_compiled


def _with_row(index: int, row: t.Row | None) -> Patch:
    """The table with one row changed; a deleted row becomes what its cell would be without it, and keeps its index."""
    rows = list(t.ROWS)
    if row is None:
        return lambda: _deleted(rows, index)
    rows[index] = row
    return lambda: rows_replaced(rows)


@contextlib.contextmanager
def _deleted(rows: list[t.Row], index: int) -> Iterator[None]:
    with rows_replaced(rows[:index] + rows[index + 1 :]):
        yield


def label(index: int, row: t.Row | None = None) -> str:
    """A row in few words: role, states, event, conditions."""
    row = row or t.ROWS[index]
    when = "+".join(row.when)
    return f"{row.role} {row.states} {row.event.replace(' ', ',')}{f' [{when}]' if when else ''}"


def row_mutants() -> list[Mutant]:
    """Every row: deleted; moved to each plausible other state; each effect and each condition stripped."""
    out: list[Mutant] = []
    for i, row in enumerate(t.ROWS):
        name = label(i)
        out.append(Mutant(f"{name}: deleted", "the row is gone", _with_row(i, None), i))
        for target in _targets(row):
            changed = dataclasses.replace(row, to=target)
            out.append(
                Mutant(f"{name}: to {target}", f"goes to {target}, not {row.to}", _with_row(i, changed), i)
            )
        for k, effect in enumerate(row.effects):
            changed = dataclasses.replace(row, effects=row.effects[:k] + row.effects[k + 1 :])
            out.append(Mutant(f"{name}: without {effect}", f"does not {effect}", _with_row(i, changed), i))
        for k, condition in enumerate(row.when):
            changed = dataclasses.replace(row, when=row.when[:k] + row.when[k + 1 :])
            out.append(
                Mutant(f"{name}: not asking {condition}", "the condition is gone", _with_row(i, changed), i)
            )
    return [m for m in out if _makes_a_table(m)]


def _targets(row: t.Row) -> list[str]:
    if row.to == "=":
        return ["F"] if set(row.states) & set("BWT") else []
    return ["="] if row.to != "N" else []


def _makes_a_table(mutant: Mutant) -> bool:
    """A stripped condition may leave a row that none can reach: that is no mutant, it is another row's deletion."""
    try:
        with mutant.patch():
            return True
    except ValueError:
        return False


# ---------------------------------------------------------------- written-out mistakes


def _rows_where(change: Callable[[t.Row], t.Row | None]) -> Patch:
    """Every row through ``change``; None deletes."""
    rows = [new for row in t.ROWS if (new := change(row)) is not None]
    return lambda: rows_replaced(rows)


def _swap(old: str, new: str, where: Callable[[t.Row], bool]) -> Patch:
    """Effects of some rows: old becomes new ("": nothing)."""

    def change(row: t.Row) -> t.Row:
        if not where(row):
            return row
        effects = tuple(e for x in row.effects for e in ((new,) if x == old else (x,)) if e)
        return dataclasses.replace(row, effects=effects)

    return _rows_where(change)


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextlib.contextmanager
def _table_entry(owner: Any, table: str, name: str, value: Any) -> Iterator[None]:
    """A condition or an effect of a room class, replaced in its dispatch table."""
    entries = getattr(owner, table)
    old = entries[name]
    entries[name] = value
    try:
        yield
    finally:
        entries[name] = old


def _freed_at_kv_ready(row: t.Row) -> t.Row:
    if row.role == t.SENDER and row.event == "kv_ready":
        return dataclasses.replace(row, effects=(*row.effects, "free_budget"))
    return row


def mistakes() -> list[Mutant]:
    """The protocol mistakes that public incidents are made of."""
    from pdjax.core import link
    from pdjax.core.receiver import ReceiverRoom, ReceiverSide
    from pdjax.core.room import Room
    from pdjax.core.sender import SenderRoom
    from pdjax.engine.driver import Driver
    from pdjax.sched.decode import SchedulerDisaggregationDecodeMixin as D

    def no_epoch_check() -> contextlib.AbstractContextManager[None]:
        judge = link.Link.judge

        def trusting(self: link.Link, frame: Any, my_epoch: int, now: float, life_s: float) -> str:
            verdict = judge(self, frame, my_epoch, now, life_s)
            return link.OK if verdict in (link.OLD_EPOCH, link.TOO_OLD) else verdict

        return _attribute(link.Link, "judge", trusting)

    def no_attempt_check() -> contextlib.AbstractContextManager[None]:
        def handle(self: Any, room: int, ev: Any, now: float, leg: Any = None) -> Any:
            self.now = now
            record = self.rooms.get(room)
            if record is None:
                record = ReceiverRoom(room, self)
                if leg is not None:
                    record.digest, record.n_tokens = leg.digest, leg.n_prompt
            effects, line = record.handle(ev, now)
            if record.state != t.ABSENT:
                self.rooms[room] = record
            elif self.rooms.get(room) is record:
                del self.rooms[room]
            return effects, line

        return _attribute(ReceiverSide, "handle", handle)

    def count_instead_of_set() -> contextlib.AbstractContextManager[None]:
        done = Driver._pull_done

        def counted(self: Any, room: int, event: Any, start: Any) -> None:
            errors = (None,) * len(event.errors)
            arrays = tuple(
                a if a is not None else _like(p) for a, p in zip(event.arrays, start.parts, strict=True)
            )
            done(self, room, dataclasses.replace(event, errors=errors, arrays=arrays), start)

        return _attribute(Driver, "_pull_done", counted)

    def page_queue_by_intake() -> contextlib.AbstractContextManager[None]:
        take_in = D._page_head

        def by_serial(self: Any, now_s: float) -> Any:
            first = min(self.page_queue, key=lambda seq: seq.serial, default=None)
            if first is not None and first is not self.page_queue.head():
                others = [s for s in self.page_queue if s is not first]
                for seq in others:
                    self.page_queue.remove(seq)
                    self.page_queue.push(seq)
            return take_in(self, now_s)

        return _attribute(D, "_page_head", by_serial)

    def abort_said_once() -> contextlib.AbstractContextManager[None]:
        def once(self: Any, ev: Any, now: float) -> Any:
            self.notices = {k: n for k, n in self.notices.items() if n.kind != "abort"}
            return self._arm_notice()

        return _table_entry(ReceiverRoom, "_effects", "repeat_notice", once)

    def tombstone_forgotten() -> contextlib.AbstractContextManager[None]:
        def bury(self: Any, ev: Any, now: float) -> Any:
            for kind in ("request", "bootstrap", "lease", "transfer", "hello"):
                self.timers.pop(kind, None)
            return self._arm("tombstone", now, 0.05)

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            of_p, of_d = (_table_entry(side, "_effects", "bury", bury) for side in (SenderRoom, ReceiverRoom))
            with of_p, of_d:
                yield

        return both()

    def done_before_scatter() -> contextlib.AbstractContextManager[None]:
        rows = [
            dataclasses.replace(r, effects=("deliver", "notice_done"))
            if (r.role, r.event) == (t.RECEIVER, "landed")
            else r
            for r in t.ROWS
        ]
        return rows_replaced(rows)

    def quiet_always() -> contextlib.AbstractContextManager[None]:
        abort = ReceiverRoom._abort

        def said(self: Any, uuid: int) -> Any:
            import msgspec

            return msgspec.structs.replace(abort(self, uuid), quiet=True)

        return _attribute(ReceiverRoom, "_abort", said)

    def lease_not_renewed() -> contextlib.AbstractContextManager[None]:
        hello = ReceiverRoom._effects["say_hello"]

        def mute(self: Any, ev: Any, now: float) -> Any:
            if self.bound and self.state == t.LETTERS["W"]:
                return self._arm("hello", now, self.settings.renew_s)
            return hello(self, ev, now)

        return _table_entry(ReceiverRoom, "_effects", "say_hello", mute)

    sender_t = (t.SENDER, "T")
    found = [
        Mutant("free on send", "P's budget is free once the KV is offered", _rows_where(_freed_at_kv_ready)),
        Mutant("no epoch check", "messages of an older life and of any age act", no_epoch_check),
        Mutant("no attempt check", "D's record takes messages of another attempt", no_attempt_check),
        Mutant("done before scatter", "D says done when the parts have landed", done_before_scatter),
        Mutant(
            "release on abort while landing",
            "P frees the bytes on an abort that is not quiet",
            _swap("to_limbo", "free_budget", lambda r: (r.role, r.states) == sender_t and r.event == "abort"),
        ),
        Mutant(
            "lease not renewed while queued", "D says no hello while it waits for pages", lease_not_renewed
        ),
        Mutant("tombstone forgotten", "an ended room is forgotten at once", tombstone_forgotten),
        Mutant(
            "count instead of set", "D counts parts that have ended, right or wrong", count_instead_of_set
        ),
        Mutant("budget freed without quiet", "P believes every abort to be quiet", quiet_always),
        Mutant(
            "page queue by intake", "D gives pages in the order of legs, not of ready", page_queue_by_intake
        ),
        Mutant("abort said once", "D's abort is not repeated", abort_said_once),
        Mutant(
            "answer to an echo",
            "D answers failed(echo 1) with its abort",
            _rows_where(
                lambda r: (
                    dataclasses.replace(r, effects=("notice_again",))
                    if (r.role, r.states, r.event) == (t.RECEIVER, "F", "failed") and "noticed" in r.when
                    else r
                )
            ),
        ),
        Mutant(
            "non-quiet abort answered at once",
            "F answers every failed(echo 0) with its abort (docs/decisions/0002)",
            _rows_where(
                lambda r: (
                    dataclasses.replace(r, effects=("notice_again",))
                    if (r.role, r.states, r.event, r.when) == (t.RECEIVER, "F", "failed", ("!echo",))
                    else r
                )
            ),
        ),
        Mutant(
            "no failed push",
            "P tells nobody that it has failed",
            _swap("say_failed", "", lambda r: r.role == t.SENDER and r.event != "hello"),
        ),
        Mutant(
            "limbo without a timer",
            "bytes in limbo wait for D's word for ever",
            lambda: _table_entry(SenderRoom, "_effects", "to_limbo", _limbo_without_timer),
        ),
        Mutant(
            "pages at intake",
            "D takes pages when the request comes, not when the KV is ready",
            lambda: _attribute(D, "_create_recv_queue", _pages_at_intake(D._create_recv_queue)),
        ),
        Mutant(
            "a deadline of the peer's clock",
            "a timer is set from a time that the peer's clock gave",
            lambda: _attribute(Room, "_arm", _foreign_arm(Room._arm)),
        ),
    ]
    return [dataclasses.replace(m, shown_by=SHOWN_BY.get(m.name, "")) for m in found]


SHOWN_BY = {
    "answer to an echo": "B34-client-leaves-during-the-transfer",
    "non-quiet abort answered at once": "row-the-end-of-a-hanging-pull",
    "free on send": "B02-failure-notice",
    "no epoch check": "row-a-word-of-an-old-life",
    "no attempt check": "row-old-messages-under-a-pull",
    "done before scatter": "row-landed-during-a-long-step",
    "release on abort while landing": "B34-client-leaves-during-the-transfer",
    "lease not renewed while queued": "B53-d-queues-longer-than-the-lease",
    "tombstone forgotten": "B96-decode-leg-lost",
    "count instead of set": "B93-shorter-than-stated",
    "budget freed without quiet": "B34-client-leaves-during-the-transfer",
    "page queue by intake": "row-ready-in-another-order-than-the-legs",
    "abort said once": "row-an-abort-is-lost",
    "no failed push": "row-p-fails-between-two-hellos",
    "limbo without a timer": "row-d-dies-and-stays-away",
    "pages at intake": "B97-slow-prefill",
    "a deadline of the peer's clock": "B02-failure-notice",
}


def _like(part: Any) -> Any:
    import numpy as np

    return np.zeros(part.shape, part.dtype)


def _limbo_without_timer(self: Any, ev: Any, now: float) -> None:
    from pdjax.core.sender import Limbo, LimboKey

    key = LimboKey(self.room, self.peer, self.attempt)
    self.side.limbo[key] = Limbo(self.peer_epoch, self.uuid, self.charged_bytes, float("inf"))
    self.charged_bytes = 0


def _pages_at_intake(original: Callable[..., None]) -> Callable[..., None]:
    def create(self: Any, seq: Any) -> None:
        original(self, seq)
        if seq.queue is self.bootstrapping and not seq.has_pages:
            self._take_pages(seq)

    return create


def _foreign_arm(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, kind, now, delay_s: original(
        self, kind, now + (1e6 if kind == "lease" else 0.0), delay_s
    )


def all_mutants() -> list[Mutant]:
    return [*mistakes(), *row_mutants()]


# ---------------------------------------------------------------- running


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. by: the property that noticed; trace: where; "" for both: it survived.

    reached: how many of the runs met its row in the unchanged program (for a mistake: all of them).
    """

    name: str
    by: str = ""
    trace: str = ""
    reached: int = 0

    @property
    def killed(self) -> bool:
        return bool(self.by)


@dataclass
class Run:
    """One trace of the fixed set, and the rows that the unchanged program meets in it."""

    name: str
    trace: dict[str, Any]
    rows: frozenset[int]
    seconds: float


def baseline(traces: Iterable[tuple[str, dict[str, Any]]]) -> list[Run]:
    """Run the unchanged program. ValueError: a trace breaks a property as it is."""
    from pdjax.sim.replay import run_trace

    runs = []
    for name, trace in traces:
        began = time.perf_counter()
        result = run_trace(trace, conformance=False)
        if result.violations:
            raise ValueError(f"{name} violates {result.violations[0]} without any mutant")
        runs.append(Run(name, trace, frozenset(result.coverage["rows"]), time.perf_counter() - began))
    return sorted(runs, key=lambda run: run.seconds)


def judge(mutant: Mutant, runs: list[Run], at_most: int = 12) -> Verdict:
    """Run the mutant where its row is met, quickest first, until a property speaks."""
    meeting = [run for run in runs if mutant.row < 0 or mutant.row in run.rows]
    meeting.sort(key=lambda run: run.name != mutant.shown_by)
    with mutant.patch():
        for run in meeting[:at_most]:
            if by := _broken(run.trace):
                return Verdict(mutant.name, by, run.name, len(meeting))
    return Verdict(mutant.name, reached=len(meeting))


MAX_EVENTS = 60_000  # of one run; ten times what the longest recorded trace needs
STUCK_S = 15  # real seconds of one run, after which a loop of the program does not come back


class Stuck(Exception):
    """A turn of a driver or a step of a scheduler never ends."""


def _stuck(signum: int, frame: Any) -> None:
    raise Stuck


def _broken(trace: dict[str, Any]) -> str:
    """The property that a run breaks first. One that raises breaks S11, one that goes in circles V1, one that hangs V5."""
    from pdjax.sim import replay
    from pdjax.sim.trace_file import parse

    with _attribute(replay, "MAX_EVENTS", MAX_EVENTS):
        run = replay.Run(parse(trace), conformance=False)
        before = signal.signal(signal.SIGALRM, _stuck)
        signal.alarm(STUCK_S)
        try:
            run.go()
            found = run.finish().broken
        except Exception as error:
            found = [v.property for v in run.monitor.violations] if run.monitor is not None else []
            circles = run.world.net.n_events > MAX_EVENTS
            found.append("V5" if isinstance(error, Stuck) else "V1" if circles else "S11")
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return found[0] if found else ""


_RUNS: list[Run] = []


def _start(runs: list[Run]) -> None:
    _RUNS[:] = runs


def _judge_named(name: str) -> Verdict:
    mutant = next(m for m in all_mutants() if m.name == name)
    return judge(mutant, _RUNS)


def campaign(mutants: list[Mutant], runs: list[Run], jobs: int = 1) -> Iterator[Verdict]:
    """Judge each mutant, in order."""
    if jobs <= 1:
        for mutant in mutants:
            yield judge(mutant, runs)
        return
    with workers(jobs, _start, (runs,)) as pool:
        yield from pool.imap(_judge_named, [m.name for m in mutants], chunksize=4)


def fixed_traces(folder: Path, n_seeds: int = 60) -> list[tuple[str, dict[str, Any]]]:
    """The recorded traces of the project and the first seeds of the fuzzer."""
    from pdjax.sim.draw import draw

    found = [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    found = [(name, trace) for name, trace in found if not trace.get("expect", {}).get("violations")]
    return found + [(f"seed {seed}", draw(seed)) for seed in range(n_seeds)]


# ---------------------------------------------------------------- the page

PAGE = Path("docs") / "mutation.md"
RECORD = Path(__file__).with_name("mutation.json")


def score(verdicts: list[Verdict]) -> str:
    killed = sum(v.killed for v in verdicts)
    return f"{killed} of {len(verdicts)} mutants noticed by a property"


def record(verdicts: list[Verdict]) -> dict[str, Any]:
    """A campaign as it is kept: who killed what where, and what survived."""
    return {
        "killed": {v.name: [v.by, v.trace] for v in verdicts if v.killed},
        "survived": {v.name: v.reached for v in verdicts if not v.killed},
    }


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def argument(name: str) -> str:
    """Why no property of these worlds should notice a survivor: of its kind, by what was changed."""
    change = name.rsplit(": ", 1)[1]
    for kind, why in ARGUMENTS.items():
        if kind in change or kind in name:
            return why
    return ""


OPEN = "open: no world of the set shows a difference yet"
# What a surviving mutant's name contains → the argument. The first that fits counts.
ARGUMENTS = {
    "abort_local": "a room that P ends by itself after kv_ready: only a process that leaves does",
    "engine_error": "an error where nothing of the engine runs yet: see docs/decisions/0008",
    "stale": "counted either way",
    "without remember_early": "what came early is repeated by hello and notice until it is answered: slower, never wrong",
    "without forget_early": "an early entry that stays is dropped by its own timer: bounded",
    "without say_unknown": "D keeps asking until its timer: the answer only shows that P lives",
    "without say_pending": "the answer to the next hello binds: slower by one hello",
    "without say_ready": "pushed and answered: one of the two is enough",
    "without say_failed": "pushed and answered: one of the two is enough while hellos come",
    "without say_done_ack": "D says done until its notice has lived out its life: more messages, nothing else",
    "without answer_abort": "D says abort until its notice has lived out its life: more messages, nothing else",
    "without notice_again": "the notice repeats by itself",
    "without reply_abort": "the other side ends by its lease or its own notice: slower",
    "without end_notice": "the notice ends by its life G",
    "without abort_others": "the candidate forgets the room by its early timer, or ends it by its lease",
    "without withdraw_again": "the withdraw was made at the end of the room; this is the repetition",
    "without renew_tombstone": "the notice would be lost with the tombstone after two leases, when nobody can hear it any more",
    "without engine_stop": "the scheduler looks at the room's state before it acts for it; the client's end comes by the request's",
    "without bury": "tombstone timers only",
    "without count_late_done": "a counter",
    "without drop_candidate": "the candidate is asked on; its silence ends it",
    "without abandon_pull": "nothing was in flight in the worlds that meet the row",
    "without free_limbo": "nothing was in limbo in the worlds that meet the row; the limbo timer frees it in any case (V2)",
    "without to_limbo": "met only where nothing was charged",
    "not asking": "the other condition of the row, or a row above, decides alone in every world that meets it: the condition is"
    " a second line",
    "deleted": "the row's event changes nothing that is not done again by a timer, a repeated message or the default STALE",
    "to F": "met only where the room ends anyway",
    "to =": "met only where the next event ends the room anyway",
}


def page(kept: dict[str, Any]) -> str:
    """docs/mutation.md, made from a campaign."""
    killed, survived = kept["killed"], kept["survived"]
    n = len(killed) + len(survived)
    n_rows = n - sum(m.name in killed or m.name in survived for m in mistakes())
    out = [
        "# How strong the checks are\n",
        "<!-- Generated by `sim mutate --write`. Do not edit. -->\n",
        "The protocol is made wrong on purpose, one way at a time, and run in the recorded traces and in random worlds. A",
        "mutant counts as noticed only when an S or V property is violated: the comparison of event logs with the table, and",
        "pinned counts, are switched off. `make mutate` runs all, `make test` all written-out mistakes and a sample.\n",
        f"The last campaign ({n_rows} of {len(row_mutants())} row mutants, and the mistakes below):",
        f"**{len(killed)} of {n}** noticed by a property.\n",
        "## Mistakes of other systems\n",
        "| mistake | noticed by | in the trace |",
        "|---|---|---|",
    ]
    for mutant in mistakes():
        by, trace = killed.get(mutant.name, ["–", "–"])
        out.append(f"| {mutant.name}: {mutant.what} | {by} | `{trace}` |")
    by_property: dict[str, int] = {}
    for by, _ in killed.values():
        by_property[by] = by_property.get(by, 0) + 1
    out += ["\n## Which property notices first\n", "| property | mutants |", "|---|---|"]
    out += [f"| {name} | {count} |" for name, count in sorted(by_property.items(), key=lambda x: -x[1])]
    out += [
        "\n## Survivors\n",
        "Argued by the kind of change.\n",
        "| mutant | runs that meet its row | why nothing notices |",
        "|---|---|---|",
    ]
    out += [f"| {name} | {reached} | {argument(name) or OPEN} |" for name, reached in survived.items()]
    return "\n".join(out) + "\n"
