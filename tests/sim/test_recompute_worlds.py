"""Simulated worlds in which D computes what a lost P cannot bring, and what the properties say when it is done wrongly."""

import contextlib
import dataclasses

import msgspec
import pytest
from broken_program import attribute
from watched_worlds import MONITORS, PROMPT, QUICK, finish, watched

from pdjax.core import conform
from pdjax.engine.rooms import LockedRooms
from pdjax.sched.recompute import Recomputing
from pdjax.sched.request import Failure
from pdjax.sched.scheduler import Scheduler
from pdjax.sim.draw import draw
from pdjax.sim.world import Timing

RECOMPUTES = dataclasses.replace(QUICK, on_failure="recompute")


def loses_p(settings=RECOMPUTES, n_out=6):
    """(world, D's client): P dies while D pulls from it, and stays dead."""
    world = watched(settings=settings)
    world.net.on_part = lambda uuid, part: 0.6
    _, d = world.request(5, PROMPT, n_out)
    world.run(limit_s=0.05)
    assert len(world.nodes["d0"].scheduler.in_flight) == 1
    world.crash("p0")
    return world, d


def lost(settings=RECOMPUTES):
    world, _ = loses_p(settings)
    return finish(world)


def test_the_client_gets_the_right_tokens_and_everything_is_free():
    world, d = loses_p()
    assert world.run(lambda: d.end is not None, 2.0), "at once: the connection is seen to break"
    assert d.tokens == world.right(PROMPT, 6) and d.end.failure is None
    monitor = finish(world)
    assert monitor.violations == [] and world.held() == {}
    assert conform.check(world.lines) == []
    assert world.nodes["d0"].manager.tally.failures(), "the hand-off has failed all the same"


def test_without_the_setting_it_is_an_error():
    world, d = loses_p(QUICK)
    assert world.run(lambda: d.end is not None, 2.0)
    assert d.end.failure.status == 503 and finish(world).violations == []


def test_a_p_that_is_only_mute_costs_its_silence_and_no_answer():
    world = watched(settings=RECOMPUTES)
    _, d = world.request(5, PROMPT, 3)
    world.net.freeze("p0", 3.0)
    assert world.run(lambda: d.end is not None, RECOMPUTES.peer_timeout_s + 0.5)
    assert d.tokens == world.right(PROMPT, 3)
    assert finish(world).violations == [], "what P says when it goes on changes nothing"


def test_decoding_is_slowed_down_by_a_bound_and_goes_on():
    """A long prompt is computed beside another request: that one's steps are at most so much further apart."""
    long = list(range(100, 160))
    world = watched(settings=RECOMPUTES, timing=Timing(prefill_per_token=1.0, decode_step=1.0), num_pages=128)
    node = world.nodes["d0"]
    node.scheduler.config = dataclasses.replace(node.scheduler.config, chunked_prefill_size=8)
    _, steady = world.request(4, PROMPT, 200)
    assert world.run(lambda: len(steady.tokens) > 2, 2.0)
    _, d = world.request(5, long, 4)
    assert world.run(lambda: len(node.scheduler.bootstrapping) == 0, 1.0)
    world.crash("p0")
    assert world.run(lambda: node.scheduler.counts["recomputed"] == 1, 2.0)
    began, had = world.now, len(steady.tokens)
    assert world.run(lambda: d.end is not None, 2.0)
    took_ms, steps = (world.now - began) * 1000, len(steady.tokens) - had
    assert steps >= 4 * (len(long) // 8 - 1), "four steps between two chunks"
    assert took_ms < steps * 1.3 + len(long) + 30, "and no more time than the steps and the prompt"
    assert d.tokens == world.right(long, 4)
    assert world.run(lambda: steady.end is not None, 5.0)
    assert steady.tokens == world.right(PROMPT, 200) and finish(world).violations == []


def keeps_pages(old):
    """The failed attempt's pages are forgotten, not given back."""

    def take_over(self, seq, failure):
        seq.has_pages = False
        return old(self, seq, failure)

    return take_over


def in_its_own_pages(old):
    """It is taken for computed: what it decodes from are pages that nobody has written."""

    def admit(self):
        worked = old(self)
        for seq in self.prefilling:
            seq.computed = seq.n_prompt - 1
        return worked

    return admit


def too_early(old):
    """A hand-off that goes on is taken over."""

    def take_events(self):
        for seq in list(getattr(self, "in_flight", ())):
            self._take_over(seq, Failure(503, "peer_lost", "not true"))
        return old(self)

    return take_events


def says_nothing(old):
    return lambda self, event, *args, **fields: event != "recompute" and old(self, event, *args, **fields)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("S2", lambda: attribute(LockedRooms, "note", says_nothing)),
        ("S2", lambda: attribute(Scheduler, "_drain_inbox", too_early)),
        ("S13", lambda: attribute(Recomputing, "_admit_recompute", in_its_own_pages)),
        ("V2", lambda: attribute(Recomputing, "_take_over", keeps_pages)),
        ("V11", lambda: attribute(Recomputing, "_admit_recompute", lambda old: lambda self: False)),
    ],
    ids=["unsaid", "too early", "not computed", "pages kept", "never its turn"],
)
def test_a_broken_recompute_violates_the_property(name, broken):
    MONITORS.clear()
    with broken(), contextlib.suppress(Exception):
        world, d = loses_p()
        if name == "S13":  # what the router of a replay would see
            world.run(lambda: d.end is not None, 5.0)
            wrong = "" if d.tokens == world.right(PROMPT, 6) else "other tokens"
            world.log("x0").line("finished", 5, rid="r5", outcome="ok", wrong=wrong)
        world.restart("p0")  # something goes on beside it
        world.run(limit_s=1.0)
        world.request(6, PROMPT, 3)
        finish(world)
    assert name in MONITORS[-1].violated(), MONITORS[-1].violated()


def edited(lines, change):
    found = [msgspec.json.decode(line) for line in lines]
    return [msgspec.json.encode(one) for one in found if change(one) is not False]


def test_a_log_is_held_to_it():
    """check-log: a token of a failed room needs the line that says why, and that line a failed room."""
    world, d = loses_p()
    world.run(lambda: d.end is not None, 2.0)
    finish(world)
    assert conform.check(world.lines) == []

    def renamed(line):
        line["event"] = {"recompute": "noted"}.get(line["event"], line["event"])

    assert {f.rule for f in conform.check(edited(world.lines, renamed))} == {"S2"}

    def elsewhere(line):
        if line["event"] == "recompute":
            line["room"] = "6"

    assert "S2" in {f.rule for f in conform.check(edited(world.lines, elsewhere))}


def test_some_seeds_recompute_and_their_requests_are_those_of_before():
    drawn = [draw(seed) for seed in range(60)]
    flags = [trace["world"]["flags"].get("disaggregation-on-failure") for trace in drawn]
    assert 10 < flags.count("recompute") < 30 and set(flags) == {None, "recompute"}
