"""Each property sees its own breach: the code is broken once, on purpose, and the property says so by name."""

import contextlib
import dataclasses
from collections import deque

import pytest
from quick_settings import QUICK as SHORT

from pdjax.core import transitions as t
from pdjax.core.identity import Minter
from pdjax.core.receiver import ReceiverRoom, ReceiverSide
from pdjax.core.room import Room
from pdjax.core.sender import Budget, SenderRoom, SenderSide
from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.driver import Driver
from pdjax.sched.batch import Fifo
from pdjax.sched.decode import SchedulerDisaggregationDecodeMixin as DecodeMixin
from pdjax.sched.pages import PageAllocator
from pdjax.sim import mutate
from pdjax.sim.membership import SimRegistryClient
from pdjax.sim.properties import NOT_SHOWN, PROPERTIES, Monitor
from pdjax.sim.transport import SimTransport
from pdjax.sim.world import Timing, World

QUICK = dataclasses.replace(SHORT, heartbeat_interval_s=0.5, heartbeat_ttl_s=2.0)
PROMPT = list(range(1, 14))
MONITORS = []


def watched(*args, **kwargs):
    world = World(*args, settings=kwargs.pop("settings", QUICK), **kwargs)
    world.monitor = Monitor(world)
    MONITORS.append(world.monitor)
    world.taps.append(world.monitor.on_line)
    world.instants.append(world.monitor.on_instant)
    return world


def finish(world, limit_s=40.0):
    world.net.on_part = None
    world.run(limit_s=limit_s)
    world.monitor.at_end()
    return world.monitor


# ---------------------------------------------------------------- scenarios


def plain(n=1, limit_s=40.0, **kwargs):
    world = watched(**kwargs)
    for room in range(n):
        world.request(room, PROMPT, 4)
    return finish(world, limit_s)


def d_first():
    world = watched()
    d = world.nodes["d0"].submit("a", 5, PROMPT, _sampling())
    world.run(limit_s=0.2)
    world.nodes["p0"].submit("a", 5, PROMPT, _sampling())
    assert world.run(lambda: d.end is not None, 5.0)
    return finish(world)


def lands_during_a_step():
    """A decode step of another request takes longer than the pull and the trip of done."""
    world = watched(timing=Timing(decode_step=20.0))
    world.request(4, PROMPT, 30)
    world.run(limit_s=0.1)
    world.request(5, PROMPT, 4)
    return finish(world)


def aborted_pull(**kwargs):
    """D's client ends the request while the pull is in flight, and it goes on for a while."""
    world = watched(**kwargs)
    world.net.on_part = lambda uuid, part: 0.6
    world.request(5, PROMPT, 4)
    world.run(limit_s=0.05)
    world.nodes["d0"].scheduler.abort("r5")
    world.run(limit_s=2.0)
    return finish(world)


def hanging_pull(**kwargs):
    world = watched(**kwargs)
    world.net.on_part = lambda uuid, part: None
    world.request(5, PROMPT, 4)
    world.run(limit_s=0.05)
    world.nodes["d0"].crash()
    return finish(world)


def failing_part():
    world = watched()
    world.net.on_part = lambda uuid, part: "Connection closed"
    world.request(5, PROMPT, 4)
    world.run(limit_s=1.0)
    return finish(world)


def late_pull():
    """P gives the room up and its word is lost; D waits for pages, and pulls after the withdraw."""
    world = watched(num_pages=8)
    world.request(4, PROMPT, 15)
    world.net.on_frame = lambda src, dst, frame: () if src.startswith("p0") or "7000" not in dst else (0.0,)
    world.net.on_frame = None
    world.run(limit_s=0.004)
    world.request(5, PROMPT, 4)
    world.run(limit_s=0.008)
    world.nodes["p0"].manager.event(5, _event("abort_local", reason="client_abort"))
    world.net.on_frame = lambda src, dst, frame: () if src == "10.0.1.1:7000" or ":" in src else (0.0,)
    world.run(limit_s=0.3)
    world.net.on_frame = None
    return finish(world)


def d_alone():
    world = watched()
    world.nodes["d0"].submit("a", 5, PROMPT, _sampling())
    return finish(world)


def p_alone(**kwargs):
    world = watched(**kwargs)
    world.nodes["p0"].submit("a", 5, PROMPT, _sampling())
    return finish(world)


def duplicate_messages():
    world = watched()
    world.net.on_frame = lambda src, dst, frame: (0.0, 0.0008, 0.002)
    world.net.on_part = lambda uuid, part: 0.02
    world.request(5, PROMPT, 4)
    world.run(limit_s=1.0)
    return finish(world)


def second_leg():
    world = watched()
    world.request(5, PROMPT, 30)
    world.run(limit_s=0.001)
    with contextlib.suppress(Exception):
        world.request(5, PROMPT, 4)
    return finish(world)


def pages_are_scarce():
    """Two rooms are ready, one after the other, while a third one owns all pages."""
    world = watched(num_pages=40)
    world.net.on_frame = lambda src, dst, frame: (0.0, 0.03)
    world.request(4, PROMPT, 140)
    world.run(limit_s=0.02)
    world.request(5, PROMPT, 20)
    world.run(limit_s=0.07)
    world.request(6, PROMPT, 20)
    return finish(world)


def waits_for_pages_longer_than_the_lease():
    world = watched()
    d = world.nodes["d0"]
    taken = d.scheduler.cache.available_pages()
    d.scheduler.cache.acquire(1, [1], taken)
    world.request(5, PROMPT, 4)
    world.run(limit_s=4.0)
    d.scheduler.cache.release(1, [])
    d.wake_scheduler()
    return finish(world)


def one_after_the_other():
    return plain(4, budget_bytes=1)


def restarted_p():
    world = watched()
    world.request(5, PROMPT, 3)
    world.run(limit_s=1.0)
    world.crash("p0")
    world.restart("p0")
    world.run(limit_s=5.0)
    _, d = world.request(6, PROMPT, 3)
    world.run(limit_s=20.0)
    outcome = "ok" if d.end is not None and d.end.failure is None else "failed"
    world.log("x0").line("finished", 6, rid="probe-p0-d0", outcome=outcome)
    return finish(world)


def drained():
    world = watched()
    world.run(limit_s=0.1)
    world.nodes["p0"].drain()
    world.run(limit_s=1.0)
    with contextlib.suppress(Exception):
        world.nodes["p0"].submit("a", 5, PROMPT, _sampling())
    return finish(world)


def _sampling():
    from pdjax.sched.request import SamplingParams

    return SamplingParams(max_new_tokens=3)


def _event(name, **kwargs):
    from pdjax.core.room import Event

    return Event(name, **kwargs)


# ---------------------------------------------------------------- breaking the code


def rows(change):
    return mutate._rows_where(change)()


def effects_of(role, event, states=None):
    """Rows of an event get other effects: a function of the old ones."""

    def decorate(change):
        def one(row):
            if row.role != role or event not in row.event.split() or (states and row.states != states):
                return row
            return dataclasses.replace(row, effects=tuple(change(row)))

        return rows(one)

    return decorate


def without(effect, role=None, event=None):
    def change(row):
        if (role is None or row.role == role) and (event is None or event in row.event.split()):
            return dataclasses.replace(row, effects=tuple(e for e in row.effects if e != effect))
        return row

    return rows(change)


def attribute(owner, name, make):
    return mutate._attribute(owner, name, make(owner.__dict__[name]))


def effect(side, name, make):
    return mutate._table_entry(side, "_effects", name, make(side._effects[name]))


def condition(side, name, value):
    return mutate._table_entry(side, "_conditions", name, lambda room, ev: value)


def mistake(name):
    return next(m for m in mutate.mistakes() if m.name == name).patch()


def nothing(old):
    return lambda *args, **kwargs: None


def retarget(role, event, states, to):
    return rows(
        lambda r: (
            dataclasses.replace(r, to=to) if (r.role, r.states) == (role, states) and event in r.event else r
        )
    )


def early_token(old):
    def start(self, seq):
        started = old(self, seq)
        if started:
            self._manager.note("first_token", seq.req.room)
        return started

    return start


def twice_taken(old):
    def alloc(self, n, token):
        pages = old(self, n, token)
        if pages:
            self._free.append(pages[0])
        return pages

    return alloc


def changed_bytes(old):
    def withdraw(self, peer, uuid, life_s):
        server = self._servers.get(peer)
        if server is not None and uuid in server.offers:
            for array in server.offers[uuid].arrays:
                if array is not None:
                    array.flat[0] ^= 1
        old(self, peer, uuid, life_s)

    return withdraw


def raising_once(old):
    def offer(self, peer, uuid, packed):
        raise RuntimeError("no memory for a registration")

    return offer


def other_end(old):
    """The log says one state, the manager keeps another."""

    def handle(self, room, ev, now, digest=""):
        effects, line = old(self, room, ev, now, digest)
        if ev.name == "kv_ready" and room in self.rooms:
            self.rooms[room].state = t.LETTERS["W"]
        return effects, line

    return handle


def forgets_to_count(old):
    def forget(self, room, now):
        before = self.n_early
        old(self, room, now)
        self.n_early = before

    return forget


def without_timer(old):
    return lambda self, ev, now: old(self, ev, now)[1:]


def last_first(old):
    def head(self):
        if self.name != "page_queue" or not len(self):
            return old(self)
        return list(self)[-1]

    return head


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
        lambda: _no_fingerprints(),
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
            _ready_again
        ),
        pages_are_scarce,
    ),
    ("S17", "no limit", lambda: attribute(Budget, "can", lambda old: lambda self, n: True), lambda: plain(4, budget_bytes=1)),
    ("S17", "pull without pages", lambda: _no_pages(), plain),
    (
        "S18",
        "a repeated abort frees again",
        lambda: effects_of(t.SENDER, "abort", "F")(lambda row: [*row.effects, "free_budget"]),
        lambda: aborted_twice(),
    ),
    ("V1", "no timers", lambda: _no_timers(), d_alone),
    ("V2", "limbo without a timer", lambda: mistake("limbo without a timer"), hanging_pull),
    ("V2", "no withdraw", lambda: effect(SenderRoom, "withdraw", nothing), hanging_pull),
    ("V2", "work goes on for an ended room", lambda: without("engine_stop", t.RECEIVER, "failed"), lambda: aborted_p()),
    ("V3", "timers do not fire", lambda: attribute(Driver, "_fire_timers", nothing), lambda: plain(limit_s=1.0)),
    ("V4", "pages at intake", lambda: mistake("pages at intake"), d_alone),
    ("V5", "the inbox is not read", lambda: attribute(Driver, "turn", _inbox_unread), lambda: plain(limit_s=1.0)),
    ("V6", "no heartbeat", lambda: attribute(SimRegistryClient, "_next", nothing), plain),
    ("V7", "no abort", lambda: without("notice_abort", t.RECEIVER), aborted_pull),
    ("V7", "no failed", lambda: without("say_failed", t.SENDER), lambda: aborted_p()),
    ("V7", "done is not answered", lambda: without("say_done_ack", t.SENDER), plain),
    ("V8", "a peer is out for ever", lambda: attribute(_link(), "judge", _deaf_after_rebirth), restarted_p),
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
    ("V11", "budget comes back without a word", lambda: effect(SenderRoom, "free_budget", _silent_budget), one_after_the_other),
    ("V12", "drain is not heeded", lambda: _deaf_to_drain(), drained),
]  # fmt: skip


def aborted_twice():
    world = watched()
    world.net.on_frame = lambda src, dst, frame: (0.0, 0.0005)
    world.net.on_part = lambda uuid, part: 0.6
    world.request(5, PROMPT, 4)
    world.run(limit_s=0.05)
    world.nodes["d0"].scheduler.abort("r5")
    world.run(limit_s=2.0)
    return finish(world)


def aborted_p():
    world = watched()
    world.net.on_part = lambda uuid, part: 1.5
    world.request(5, PROMPT, 4)
    world.run(limit_s=0.05)
    world.nodes["p0"].manager.event(5, _event("abort_local", reason="client_abort"))
    world.net.on_frame = None
    world.run(limit_s=1.0)
    return finish(world)


def _no_pages():
    stack = contextlib.ExitStack()
    stack.enter_context(condition(ReceiverRoom, "pages_taken", True))
    stack.enter_context(
        mutate._attribute(DecodeMixin, "_start_pull", lambda self, seq: _pull_without(self, seq))
    )
    return stack


def _pull_without(self, seq):
    seq.receiver.receive([1])
    self._move(seq, self.in_flight)
    return True


def _no_timers():
    stack = contextlib.ExitStack()
    for name in ("arm_request", "arm_bootstrap"):
        stack.enter_context(effect(ReceiverRoom, name, nothing))
    return stack


def _inbox_unread(old):
    def turn(self):
        inbox, self._inbox = self._inbox, deque()
        old(self)
        self._inbox = inbox

    return turn


def _no_fingerprints():
    stack = contextlib.ExitStack()
    stack.enter_context(condition(SenderRoom, "foreign_fingerprint", False))
    stack.enter_context(mutate._attribute(Registry, "_judge", staticmethod(lambda asker, seat: None)))
    return stack


def _ready_again(row):
    if (row.role, row.states, row.event) != (t.RECEIVER, "W", "ready"):
        return row
    if "note_ready" in row.effects:
        return dataclasses.replace(row, when=())
    return None if row.when == ("!same_uuid",) else row


def _link():
    from pdjax.core.link import Link

    return Link


def _deaf_after_rebirth(old):
    def judge(self, frame, my_epoch, now, life_s):
        if self.epoch and frame.epoch > self.epoch:
            return "old_epoch"
        return old(self, frame, my_epoch, now, life_s)

    return judge


def _silent_budget(old):
    def free(self, ev, now):
        old(self, ev, now)

    return free


def _deaf_to_drain():
    from pdjax.engine.rooms import LockedRooms

    def take(old):
        def leg(self, leg, name, reason):
            draining, self.draining = self.draining, False
            try:
                old(self, leg, name, reason)
            finally:
                self.draining = draining

        return leg

    def claim(old):
        def one(self, leg, ev, known):
            self.draining = True
            return old(self, leg, ev, known)

        return one

    stack = contextlib.ExitStack()
    stack.enter_context(attribute(LockedRooms, "_take_leg", take))
    stack.enter_context(attribute(LockedRooms, "_claim", claim))
    return stack


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


SOUND = [
    plain, d_first, lands_during_a_step, aborted_pull, hanging_pull, failing_part, late_pull, d_alone, p_alone, duplicate_messages, second_leg,
    pages_are_scarce, waits_for_pages_longer_than_the_lease, one_after_the_other, restarted_p, drained, aborted_p,
    aborted_twice,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SOUND, ids=lambda s: s.__name__)
def test_the_program_as_it_is_violates_nothing(scenario):
    assert [str(v) for v in scenario().violations] == []


def test_every_property_is_there_and_says_what_it_means():
    names = {p.name for p in PROPERTIES} | set(NOT_SHOWN)
    assert names == {f"S{i}" for i in range(1, 19)} | {f"V{i}" for i in range(1, 13)}
    assert len({p.name for p in PROPERTIES}) == len(PROPERTIES)
    for prop in PROPERTIES:
        assert len(prop.sentence) > 20 and prop.bound
        assert prop.hears or prop.instants or prop.sampled or prop.at_end is not None
    assert {b[0] for b in BREAKS} == {p.name for p in PROPERTIES}


def test_a_patch_leaves_nothing_behind():
    before = (list(t.ROWS), t.COMPILED, Room._arm)
    for mutant in [*mutate.mistakes(), *mutate.row_mutants()[::25]]:
        with mutant.patch():
            pass
    assert (list(t.ROWS), t.COMPILED, Room._arm) == before
