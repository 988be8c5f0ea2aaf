"""The exhaustive search: pinned sizes, no breach, and that every kind of breach would be seen."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from broken_rows import d, p, strip, without

from pdjax.core import transitions as t
from pdjax.sim.explore import SEARCHES, Ask, Config, Report, explore
from pdjax.sim.explore.config import TIMERS
from pdjax.sim.explore.menu import CALM, FEW, ONE
from pdjax.sim.explore.story import replay, tell

QUICK = [s.name for s in SEARCHES.values() if not s.deep]


@functools.cache
def report_of(name: str) -> Report:
    return explore(SEARCHES[name].config)


@pytest.mark.parametrize("name", QUICK)
def test_no_state_is_wrong_or_stuck(name: str) -> None:
    report = report_of(name)
    assert report.complete
    assert [v.text for v in report.violations + report.deadlocks] == []
    assert (report.states, report.edges) == SEARCHES[name].pinned, "the table or the model has changed"


def test_rows_that_no_search_reaches_are_known() -> None:
    """A row that no quick search reaches is listed with what it would need, and the list is exact."""
    reached = set().union(*(report_of(name).coverage for name in QUICK))
    missed = {
        f"{r.role} {r.states} {r.event} {' '.join(r.when)}".strip()
        for i, r in enumerate(t.ROWS)
        if i not in reached
    }
    assert missed == set().union(*UNREACHED.values())


UNREACHED: dict[str, set[str]] = {
    "meant for a life of P that is over, or for a room that it has forgotten: void or assumed away in the model": {
        "sender N hello",
        "sender N abort uuid_of_my_epoch",
        "sender N abort",
        "sender N done",
        "sender BWT hello ack_foreign",
        "sender T done",
        "sender BW done",
        "receiver T failed echo quiet",
    },
    "an older attempt at a room that P still works on: the wire holds it back while D dies and asks again": {
        "sender BWT hello attempt_older",
        "sender BWT abort attempt_older",
        "sender S hello attempt_older",
    },
    "two candidates of which one is gone or has never been asked": {
        "receiver B failed !from_candidate !echo",
        "receiver B refused peer_silence",
    },
    "a registry that answers when the room is bound or over": {
        "receiver WT candidates",
        "receiver WT no_candidate",
        "receiver S candidates",
    },
    "a newer life of P ends the room before its message is read (docs/decisions/0008)": {
        "receiver WT unknown pending ready failed from_bound newer_life"
    },
    "a P that registers twice": {"receiver T ready !same_uuid", "receiver W ready !same_uuid"},
    "time: an answer that is late and not yet silence": {"receiver W start has_uuid pages_taken"},
    "decoding is the scheduler's: the manager drops what ends a room that has ended": {
        "receiver S abort_local engine_error"
    },
}


# ---------------------------------------------------------------- negative controls


def changed(match: Callable[[t.Row], bool], **changes: object) -> list[t.Row]:
    rows = [dataclasses.replace(r, **changes) if match(r) else r for r in t.ROWS]  # type: ignore[arg-type]
    assert rows != t.ROWS
    return rows


LEAN = ONE.but(lose=False, duplicate=False, wire=1)

MUTANTS: list[tuple[str, str, list[t.Row], Config]] = [
    ("P keeps its bytes registered after an abort", "S1", strip("withdraw", p("T", "abort_local")), LEAN),
    ("D keeps its pages after an abort", "S1", strip("engine_stop", d("T", "abort_local")), LEAN),
    ("D says done before the scatter", "S2", changed(d("T", "landed"), to="S", effects=("notice_done", "bury")), LEAN),
    ("P forgets what its room was charged", "S3", strip("free_budget", p("T", "done")), LEAN),
    ("budget freed without quiet", "S4", changed(
        p("T", "abort_local"), effects=("withdraw", "free_budget", "say_failed", "bury"), when=()), LEAN),
    ("a lease ends and nothing is withdrawn", "S1", strip("withdraw", p("T", "expire_lease")), LEAN),
    ("another prompt's abort ends the room", "S5", without(
        lambda r: p("B", "abort")(r) and "foreign_digest" in r.when), SEARCHES["crossed"].config),
    ("a failed room comes back", "S6", changed(d("F", "ready"), to="W", effects=("note_ready",)), LEAN),
    ("kv_ready is not expected", "S6", without(p("W", "kv_ready")), LEAN),
    ("P succeeds on an abort", "S13", changed(lambda r: p("T", "abort")(r) and "quiet" in r.when, to="S"), LEAN),
    ("prefill without budget", "S17", strip("reserve", p("B", "admit")), LEAN),
    ("D never tells its client", "V1", strip("engine_stop", d("W", "failed")), LEAN),
    ("no timer ends a room of P", "V1", strip("arm_request", p("N", "leg")), LEAN),
    ("a late settlement is not noticed", "V2", strip("notice_quiet", d("F", "pull_settled")), LEAN),
    ("an early hello outlives its leg", "S12", strip("forget_early", p("N", "leg")), CALM),
    ("what came early is never forgotten", "S12", strip("forget_early", p("N", "early_timer")),
        LEAN.but(asks=(Ask(p_leg=False),), lose=True)),
    ("limbo for nobody", "S1", without(lambda r: p("T", "abort_local")(r) and "!bound" in r.when), LEAN),
    ("done is not answered", "V7", strip("say_done_ack", p("T", "done")), CALM),
    ("no timer for a P that never comes", "V10", strip("arm_bootstrap", d("N", "leg")), LEAN),
    ("a lease that ends nothing", "V10", changed(p("B", "expire_lease"), to="=", effects=()), LEAN),
    ("a malformed leg leaves no record", "S5", changed(p("N", "leg_bad"), to="="), LEAN.but(bad_legs=True)),
    ("a new life of D ends nothing", "V7", changed(p("W", "peer_reborn"), to="=", effects=()),
        LEAN.but(crashes=(("d0", 1),))),
    ("limbo outlives the life that read it", "V2", strip("free_limbo", p("F", "peer_reborn")),
        LEAN.but(crashes=(("d0", 1),))),
    ("another model is bound", "S10", without(lambda r: "foreign_fingerprint" in r.when), SEARCHES["alien"].config),
    ("packed arrays outlive their room", "S3", strip("drop_arrays", p("T", "abort_local")), LEAN),
    ("a leg without an attempt", "S5", strip("mint_attempt", d("N", "leg_bad")), LEAN.but(bad_legs=True)),
    ("a room goes over to a newer attempt", "S5", without(lambda r: p("B", "hello")(r) and "attempt_newer" in r.when),
        LEAN.but(asks=(Ask(), Ask(d="d1", p_leg=False)))),
    ("a gated P works for nobody", "V4", changed(
        lambda r: p("B", "admit")(r) and "!gated" in r.when, when=("budget_free",)), LEAN.but(gated=True)),
    ("nobody is left to ask", "V7", without(lambda r: d("B", "refused")(r) and "last_candidate" in r.when),
        LEAN.but(crashes=(("p0", 1),))),
    ("the others are not told", "V7", strip("abort_others", d("B", "pending")),
        LEAN.but(asks=(Ask(), Ask(p="p1", d_leg=False)), timers=())),
    ("D's end is not told", "V7", strip("notice_abort", d("T", "expire_transfer")), LEAN),
    ("D does not say that it has no such room", "V7", strip("reply_abort", d("N", "pending")),
        LEAN.but(crashes=(("d0", 1),))),
    ("an end that an early hello waits for", "V7", strip("say_pending", p("N", "leg")), LEAN),
    ("a notice outlives its answer", "V2", strip("end_notice", d("S", "done_ack")), LEAN),
    ("who has the room is not bound", "V10", without(lambda r: d("B", "pending")(r) and not r.when), LEAN),
    ("a late leg is not waited for", "V10", changed(
        lambda r: d("B", "unknown")(r) and "newer_life" in r.when, when=("from_candidate",)), LEAN),
    ("a ready that does not fit", "S10", changed(d("B", "ready"), when=(), effects=("bind_peer", "note_ready"), to="W"),
        SEARCHES["alien"].config),
    ("P's end is not pushed", "V7", strip("say_failed", p("W", "abort_local")), CALM),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "rows", "config"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_a_wrong_table_is_caught_by_name(rule: str, rows: list[t.Row], config: Config) -> None:
    report = explore(config, rows, rules={rule})
    found = report.violations + report.deadlocks
    assert [v.rule for v in found] == [rule]
    assert len(found[0].steps) <= 16


def test_the_table_is_the_projects_again_after_a_mutant() -> None:
    compiled = t.COMPILED
    explore(FEW, without(p("W", "kv_ready")))
    assert t.COMPILED is compiled


def test_without_the_limbo_assumption_bytes_leave_limbo_under_a_pull() -> None:
    report = explore(LEAN.but(assume=("tombstone",)), liveness=False)
    violation = report.violations[0]
    assert violation.rule == "S4"
    assert violation.steps[-1][0] == "limbo"
    assert len(violation.steps) == 12


def test_without_the_tombstone_assumption_an_old_abort_meets_a_new_use_of_its_room() -> None:
    config = LEAN.but(asks=(Ask(uses=2),), assume=("limbo",))
    violation = explore(config, liveness=False).violations[0]
    assert violation.rule in ("S5", "S18")
    assert any(step[-1] == "tombstone" for step in violation.steps)
    assert violation.steps[-1][3][1][0] == "abort"


def test_gated_p_does_not_expire_a_room_that_has_its_d() -> None:
    """Found by one-room-gated: the bootstrap timer stayed armed after the hello, an illegal event five steps in."""
    from pdjax.core import wire
    from pdjax.core.budget import Budget
    from pdjax.core.room import Event
    from pdjax.core.sender import SenderSide
    from pdjax.core.settings import PDSettings

    side = SenderSide(PDSettings(prefill_gate="gated"), 1 << 32, "f", 1, Budget(1))
    side.handle(7, Event("leg"), 0.0, "a")
    assert "bootstrap" in side.rooms[7].timers
    hello = wire.Hello(room=7, attempt=1, ack_epoch=0, fingerprint="f", digest="a")
    side.handle(7, Event("hello", "d0", 1, hello), 0.0)
    assert set(side.rooms[7].timers) == {"request", "lease"}


@pytest.mark.parametrize(("digest", "state"), [("b", "T"), ("a", "F")])
def test_a_newer_attempts_abort_gives_back_nothing_of_the_bound_one(digest: str, state: str) -> None:
    """Found by crossed: another prompt's abort ended the room, and its quiet freed bytes under the bound pull."""
    from pdjax.core import wire
    from pdjax.core.budget import Budget
    from pdjax.core.room import Event
    from pdjax.core.sender import Offer, SenderSide
    from pdjax.core.settings import PDSettings
    from pdjax.sim.explore.messages import FIRST, PARTS

    side = SenderSide(PDSettings(), 1 << 32, "f", 1, Budget(1))
    side.handle(7, Event("leg"), 0.0, "a")
    hello = wire.Hello(room=7, attempt=1, ack_epoch=0, fingerprint="f", digest="a")
    side.handle(7, Event("hello", "d0", 1, hello), 0.0)
    side.handle(7, Event("admit", data=1), 0.0)
    side.handle(7, Event("kv_ready", data=Offer(object(), PARTS, 1, 1, FIRST)), 0.0)
    abort = wire.Abort(room=7, attempt=2, uuid=0, quiet=True, reason="client_abort", digest=digest)
    side.handle(7, Event("abort", "d1", 1, abort), 0.0)
    assert side.rooms[7].state == t.LETTERS[state]
    assert side.budget.charged_bytes == 1


# ---------------------------------------------------------------- the report


def test_a_counterexample_can_be_replayed_and_read() -> None:
    rows = strip("free_budget", p("T", "done"))
    report = explore(LEAN, rows)
    violation = report.violations[0]
    assert report.world is not None
    with t.using(rows):
        moves = replay(report.world, violation.steps)
        text = tell(violation, report.world, rows)
    assert [m.action for m in moves] == violation.steps
    assert f"{len(violation.steps):3}. d0 → p0: done(room 7" in text
    assert "S3 means" in text


def test_a_search_that_is_cut_short_says_so() -> None:
    report = explore(ONE.but(max_states=50))
    assert not report.complete
    assert not report.ok


def test_the_order_of_the_search_depends_on_no_hash() -> None:
    code = (
        "from test_explore import *\n"
        "r = explore(LEAN.but(assume=('tombstone',)), liveness=False)\n"
        "print(r.states, r.edges, r.violations[0].steps)"
    )
    outs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        outs.append(done.stdout)
    assert outs[0] == outs[1] != ""


def test_every_timer_kind_is_used() -> None:
    """A kind that no move is named after would be a switch that does nothing."""
    seen: set[str] = set()
    report = report_of("one-room")
    assert report.world is not None
    for ops in report.world._ops.values():
        for action, _, _ in ops:
            seen.add(action[3] if action[0] == "timer" else action[0])
    assert set(TIMERS) - seen == {"graveyard"}  # that one belongs to a pull, not to a process
