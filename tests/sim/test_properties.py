"""Each property sees its own breach: the code is broken once, on purpose, and the property says so by name."""

import contextlib

import pytest
from broken_program import (
    always_quiet,
    attribute,
    changed_bytes,
    deaf_after_rebirth,
    deaf_to_drain,
    early_token,
    effect,
    effects_of,
    forgets_to_count,
    inbox_unread,
    last_first,
    mistake,
    no_fingerprints,
    no_pages,
    no_timers,
    nobody_late,
    nothing,
    one_memory,
    other_end,
    raising_once,
    ready_again,
    retarget,
    rows,
    silent_budget,
    twice_taken,
    without,
    without_timer,
)
from watched_worlds import (
    MONITORS,
    SOUND,
    aborted_p,
    aborted_pull,
    aborted_twice,
    d_alone,
    d_first,
    drained,
    failing_part,
    hanging_pull,
    hangs_beyond_the_limbo,
    lands_during_a_step,
    late_pull,
    one_after_the_other,
    one_p_stays_dead,
    pages_are_scarce,
    plain,
    restarted_p,
    second_leg,
    staged,
    staged_side_by_side,
    waits_for_pages_longer_than_the_lease,
)

from pdjax.core import transitions as t
from pdjax.core.budget import Budget, HostSlots
from pdjax.core.identity import Minter
from pdjax.core.link import Link
from pdjax.core.receiver import ReceiverSide
from pdjax.core.room import Room
from pdjax.core.sender import SenderRoom, SenderSide
from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.driver import Driver
from pdjax.engine.performer import Performer
from pdjax.sched.batch import Fifo
from pdjax.sched.decode import SchedulerDisaggregationDecodeMixin as DecodeMixin
from pdjax.sched.pages import PageAllocator
from pdjax.sim import mutate, runner
from pdjax.sim.membership import SimRegistryClient
from pdjax.sim.properties import NOT_SHOWN, PROPERTIES
from pdjax.sim.transport import SimTransport

BREAKS = [
    ("S1", "pages given twice", lambda: attribute(PageAllocator, "alloc", twice_taken), lambda: plain(2)),
    ("S1", "release on abort while landing", lambda: mistake("release on abort while landing"), aborted_pull),
    ("S1", "budget freed without quiet", lambda: mistake("budget freed without quiet"), aborted_pull),
    ("S2", "a token before the commit", lambda: attribute(DecodeMixin, "_start_pull", early_token), plain),
    ("S3", "done frees nothing", lambda: without("free_budget", t.SENDER, "done"), plain),
    ("S3", "freed twice", lambda: mistake("free on send"), plain),
    ("S4", "withdraw does nothing", lambda: attribute(SimTransport, "withdraw", nothing), late_pull),
    ("S4", "bytes change under the registration", lambda: attribute(SimTransport, "withdraw", changed_bytes), late_pull),
    ("S5", "tombstone forgotten", lambda: mistake("tombstone forgotten"), plain),
    ("S5", "attempts repeat", lambda: attribute(Minter, "mint", lambda old: lambda self: 77), lambda: plain(2)),
    ("S6", "failed is not the end", lambda: retarget(t.SENDER, "abort", "F", "B"), aborted_pull),
    ("S6", "two copies of the state", lambda: attribute(SenderSide, "handle", other_end), plain),
    ("S7", "count instead of set", lambda: mistake("count instead of set"), failing_part),
    ("S8", "uuids repeat", lambda: attribute(Minter, "mint", lambda old: lambda self: 77), lambda: plain(2)),
    (
        "S8",
        "a duplicate is taken",
        lambda: effects_of(t.SENDER, "leg", "BWT")(lambda row: ["arm_request"]),
        second_leg,
    ),
    (
        "S10",
        "fingerprints are not compared",
        lambda: no_fingerprints(),
        lambda: plain(weights={"d0": "other"}),
    ),
    ("S11", "a port raises", lambda: attribute(SimTransport, "offer", raising_once), plain),
    ("S12", "early entries are not counted", lambda: attribute(SenderSide, "forget_early", forgets_to_count), d_first),
    ("S12", "a tombstone for ever", lambda: without("bury", t.SENDER), plain),
    ("S12", "what came early has no timer", lambda: attribute(SenderSide, "remember_early", without_timer), d_first),
    ("S12", "an early hello outlives its leg", lambda: without("forget_early", t.SENDER, "leg"), d_first),
    ("S13", "done before scatter", lambda: mistake("done before scatter"), lands_during_a_step),
    ("S15", "the peer's clock", lambda: mistake("a deadline of the peer's clock"), plain),
    (
        "S16",
        "ready is taken twice",
        lambda: rows(
            ready_again
        ),
        pages_are_scarce,
    ),
    ("S17", "no limit", lambda: attribute(Budget, "can", lambda old: lambda self, n: True), lambda: plain(4, budget_bytes=1)),
    (
        "S1",
        "a slot is used again after the limbo timer",
        lambda: attribute(HostSlots, "give_back", always_quiet),
        hangs_beyond_the_limbo,
    ),
    ("S3", "a slot stays", lambda: attribute(Performer, "_return_slot", nothing), staged),
    ("S4", "two rooms in one slot", lambda: attribute(runner, "_staged", one_memory), staged_side_by_side),
    ("S17", "no slot is taken", lambda: attribute(HostSlots, "take", nothing), staged),
    ("S17", "pull without pages", lambda: no_pages(), plain),
    (
        "S18",
        "a repeated abort frees again",
        lambda: effects_of(t.SENDER, "abort", "F")(lambda row: [*row.effects, "free_budget"]),
        lambda: aborted_twice(),
    ),
    ("V1", "no timers", lambda: no_timers(), d_alone),
    ("V2", "limbo without a timer", lambda: mistake("limbo without a timer"), hanging_pull),
    ("V2", "no withdraw", lambda: effect(SenderRoom, "withdraw", nothing), hanging_pull),
    ("V2", "work goes on for an ended room", lambda: without("engine_stop", t.RECEIVER, "failed"), lambda: aborted_p()),
    ("V3", "timers do not fire", lambda: attribute(Driver, "_fire_timers", nothing), lambda: plain(limit_s=1.0)),
    ("V4", "pages at intake", lambda: mistake("pages at intake"), d_alone),
    ("V5", "the inbox is not read", lambda: attribute(Driver, "turn", inbox_unread), lambda: plain(limit_s=1.0)),
    ("V6", "no heartbeat", lambda: attribute(SimRegistryClient, "_next", nothing), plain),
    ("V6", "the dead stay listed", lambda: attribute(Registry, "sweep", nobody_late), one_p_stays_dead),
    ("V7", "no abort", lambda: without("notice_abort", t.RECEIVER), aborted_pull),
    ("V7", "no failed", lambda: without("say_failed", t.SENDER), lambda: aborted_p()),
    ("V7", "done is not answered", lambda: without("say_done_ack", t.SENDER), plain),
    ("V8", "a peer is out for ever", lambda: attribute(Link, "judge", deaf_after_rebirth), restarted_p),
    ("V9", "last come, first served", lambda: attribute(Fifo, "head", last_first), pages_are_scarce),
    (
        "V10",
        "lease not renewed while queued",
        lambda: mistake("lease not renewed while queued"),
        waits_for_pages_longer_than_the_lease,
    ),
    ("V10", "no bootstrap timer", lambda: without("arm_bootstrap", t.RECEIVER), plain),
    ("V10", "a timer that ends nothing", lambda: retarget(t.RECEIVER, "expire_bootstrap", "B", "="), d_alone),
    ("V10", "answers do not count", lambda: attribute(ReceiverSide, "answered", nothing), pages_are_scarce),
    ("V11", "budget comes back without a word", lambda: effect(SenderRoom, "free_budget", silent_budget), one_after_the_other),
    ("V12", "drain is not heeded", lambda: deaf_to_drain(), drained),
]  # fmt: skip


@pytest.mark.parametrize("name, what, broken, scenario", BREAKS, ids=[f"{b[0]}-{b[1]}" for b in BREAKS])
def test_a_broken_program_violates_the_property(name, what, broken, scenario):
    MONITORS.clear()
    with (
        broken(),
        contextlib.suppress(Exception),
    ):  # some breaks raise as well: the property must have spoken before
        scenario()
    violated = MONITORS[-1].violated()
    assert name in violated, violated


@pytest.mark.parametrize("scenario", SOUND, ids=lambda s: s.__name__)
def test_the_program_as_it_is_violates_nothing(scenario):
    assert [str(v) for v in scenario().violations] == []


def test_every_property_is_there_and_says_what_it_means():
    names = {p.name for p in PROPERTIES} | set(NOT_SHOWN)
    assert names == {f"S{i}" for i in range(1, 19)} | {f"V{i}" for i in range(1, 13)}
    assert len({p.name for p in PROPERTIES}) == len(PROPERTIES)
    for prop in PROPERTIES:
        assert len(prop.sentence) > 20 and prop.bound
        assert prop.hears or prop.instants or prop.sampled
    assert {b[0] for b in BREAKS} == {p.name for p in PROPERTIES}


def test_a_patch_leaves_nothing_behind():
    before = (list(t.ROWS), t.COMPILED, Room._arm)
    for mutant in [*mutate.mistakes(), *mutate.row_mutants()[::25]]:
        with mutant.patch():
            pass
    assert (list(t.ROWS), t.COMPILED, Room._arm) == before
