"""Small worlds, each watched by every property, that the program as it is runs without a breach."""

import contextlib
import dataclasses

from quick_settings import QUICK as SHORT

from pdjax.core.room import Event
from pdjax.sched.request import SamplingParams
from pdjax.sim.properties import Monitor
from pdjax.sim.world import Timing, World

QUICK = dataclasses.replace(SHORT, heartbeat_interval_s=0.5, heartbeat_ttl_s=2.0)
STAGED = dataclasses.replace(QUICK, host_staging=True)
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
    d = world.nodes["d0"].submit("a", 5, PROMPT, SamplingParams(max_new_tokens=3))
    world.run(limit_s=0.2)
    world.nodes["p0"].submit("a", 5, PROMPT, SamplingParams(max_new_tokens=3))
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
    world.run(limit_s=0.004)
    world.request(5, PROMPT, 4)
    world.run(limit_s=0.008)
    world.nodes["p0"].manager.event(5, Event("abort_local", reason="client_abort"))
    world.net.on_frame = lambda src, dst, frame: () if src == "10.0.1.1:7000" or ":" in src else (0.0,)
    world.run(limit_s=0.3)
    world.net.on_frame = None
    return finish(world)


def d_alone():
    world = watched()
    world.nodes["d0"].submit("a", 5, PROMPT, SamplingParams(max_new_tokens=3))
    return finish(world)


def p_alone(**kwargs):
    world = watched(**kwargs)
    world.nodes["p0"].submit("a", 5, PROMPT, SamplingParams(max_new_tokens=3))
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


def one_p_stays_dead():
    world = watched(2, 1)
    world.run(limit_s=0.1)
    world.crash("p1")
    world.run(limit_s=5.0)
    world.request(5, PROMPT, 3)
    return finish(world)


def drained():
    world = watched()
    world.run(limit_s=0.1)
    world.nodes["p0"].drain()
    world.run(limit_s=1.0)
    with contextlib.suppress(Exception):
        world.nodes["p0"].submit("a", 5, PROMPT, SamplingParams(max_new_tokens=3))
    return finish(world)


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
    world.nodes["p0"].manager.event(5, Event("abort_local", reason="client_abort"))
    world.run(limit_s=1.0)
    return finish(world)


# ---------------------------------------------------------------- with host staging


def staged(n=1, **kwargs):
    return plain(n, settings=STAGED, **kwargs)


def staged_side_by_side():
    """Two prompts of one length, the second of which is gathered while the first one's pull is under way."""
    world = watched(settings=STAGED)
    world.net.on_part = lambda uuid, part: 0.02
    world.request(5, PROMPT, 4)
    world.request(6, PROMPT[::-1], 4)
    world.run(limit_s=1.0)
    return finish(world)


def hangs_beyond_the_limbo():
    """D's pull hangs: P's limbo timer ends before D's graveyard timer does, and meanwhile P stages for another D."""
    world = watched(1, 2, settings=STAGED)
    world.net.on_part = lambda uuid, part: None
    world.request(5, PROMPT, 4)
    world.run(limit_s=0.05)
    world.net.on_part = None
    limbo_s = STAGED.transfer_timeout_s + STAGED.limbo_timeout_s
    assert limbo_s < STAGED.transfer_timeout_s + STAGED.graveyard_timeout_s
    world.run(limit_s=limbo_s)
    assert world.nodes["p0"].manager.counters.counts["slots_replaced"] == 1
    assert world.nodes["d0"].transport.pulls, "the pull still hangs"
    world.request(6, PROMPT, 4, d="d1")
    world.run(limit_s=1.0)
    return finish(world)


SOUND = [
    plain, d_first, lands_during_a_step, aborted_pull, hanging_pull, failing_part, late_pull, d_alone, p_alone, duplicate_messages, second_leg,
    pages_are_scarce, waits_for_pages_longer_than_the_lease, one_after_the_other, restarted_p, one_p_stays_dead, drained, aborted_p,
    aborted_twice,
]  # fmt: skip
