"""A real sender and a real receiver, joined by a fake wire: nothing but the core, its messages as bytes, and time."""

import heapq
import itertools
import random

import pytest

from pdjax.core import effects as fx
from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.pools import PoolTransferSpec, packed_bytes, pages_for, plan_parts
from pdjax.core.receiver import ReceiverSide
from pdjax.core.room import Event
from pdjax.core.sender import Budget, Offer, SenderSide
from pdjax.core.settings import PDSettings

S, F = t.LETTERS["S"], t.LETTERS["F"]
POOLS = [PoolTransferSpec("kv", "kv", "float32", (32, 4, 8), 2, 128)]
SETTINGS = PDSettings()
ROOM, N_TOKENS, DIGEST = 5, 9, "digest"
N_PAGES = pages_for(N_TOKENS, 4)
EPOCH = {"p": 7 << 32, "d": 8 << 32}
LINK_S = 0.001


class Leg:
    digest, n_prompt = DIGEST, N_TOKENS


class Pair:
    """P and D with one room. ``fate(message)`` → the delays of the copies that arrive."""

    def __init__(self, fate=lambda message: (0.0,)):
        self.now, self.fate, self._heap, self._serial = 0.0, fate, [], itertools.count()
        self.p = SenderSide(SETTINGS, EPOCH["p"], "print", 4, Budget(1 << 20))
        self.d = ReceiverSide(SETTINGS, EPOCH["d"], "print", 4, POOLS)
        self.offered: dict[int, object] = {}  # uuid → packed, as P's transfer server holds it
        self.pulling: dict[int, fx.StartPull] = {}
        self.sent, self.ends = [], {}

    # ---------------------------------------------------------------- the world

    def at(self, when, action):
        heapq.heappush(self._heap, (when, next(self._serial), action))

    def run(self, until=lambda: False, limit_s=500.0):
        end = self.now + limit_s
        while self._heap and self._heap[0][0] <= end and not until():
            self.now, _, action = heapq.heappop(self._heap)
            action()
        return until()

    def event(self, side, ev, room=ROOM):
        record = (self.p if side == "p" else self.d).rooms.get(room)
        if ev.msg is None and ev.name not in ("leg", "candidates") and (record is None or not record.live):
            return
        if side == "p":
            effects, line = self.p.handle(room, ev, self.now, DIGEST)
        else:
            effects, line = self.d.handle(room, ev, self.now, Leg if ev.name == "leg" else None)
        if line.target in t.TERMINAL and line.source not in t.TERMINAL:
            assert side not in self.ends, "one end a side"
            self.ends[side] = (self.now, line.target)
        for e in effects:
            self.perform(side, e)

    def state(self, side):
        record = (self.p if side == "p" else self.d).rooms.get(ROOM)
        return t.ABSENT if record is None else record.state

    # ---------------------------------------------------------------- effects

    def perform(self, side, e):
        if isinstance(e, fx.Send):
            self.transmit(side, e.message)
        elif isinstance(e, fx.ArmTimer):
            self.at(e.at, lambda: self.fire(side, *e.key))
        elif isinstance(e, fx.Register):
            assert e.uuid not in self.offered, "a uuid is registered once"
            self.offered[e.uuid] = e.packed
        elif isinstance(e, fx.Withdraw):
            self.offered.pop(e.uuid, None)
        elif isinstance(e, fx.Lookup):
            found = Event("candidates", data=[("p", EPOCH["p"])])
            self.at(self.now, lambda: self.state("d") != t.ABSENT and self.event("d", found))
        elif isinstance(e, fx.PageQueue):
            self.at(self.now, lambda: self.event("d", Event("start", data=[1])))
        elif isinstance(e, fx.StartPull):
            self.pulling[e.attempt] = e
            self.at(self.now + LINK_S, lambda: self.settle(e))
        elif isinstance(e, fx.Deliver):
            self.at(self.now, lambda: self.event("d", Event("scattered")))

    def settle(self, pull):
        del self.pulling[pull.attempt]
        record = self.d.rooms.get(ROOM)
        if record is None or not record.live:
            effects, _ = self.d.handle(ROOM, Event("pull_settled"), self.now)
            for e in effects:
                self.perform("d", e)
        elif pull.manifest.uuid in self.offered:
            self.event("d", Event("landed", data=self.offered[pull.manifest.uuid]))
        else:
            self.event("d", Event("peer_failed", "p", detail="out of range 0"))

    def transmit(self, side, message):
        other = "d" if side == "p" else "p"
        assert (type(message) in wire.TO_SENDER) == (other == "p")
        self.sent.append((side, type(message).__name__))
        data = wire.encode(wire.Frame(side, EPOCH[side], 1, 1, 1, 0, (message,)), b"key")
        for delay_s in self.fate(message):
            self.at(self.now + LINK_S + delay_s, lambda: self.deliver(side, other, data))

    def deliver(self, side, other, data):
        frame = wire.decode(data, b"key")
        assert isinstance(frame, wire.Frame), frame
        if other == "d":
            self.d.answered(side, self.now)
        for m in frame.messages:
            self.event(other, Event(wire.EVENT_OF[type(m)], side, frame.epoch, m), m.room)

    def fire(self, side, kind, key):
        of = self.p if side == "p" else self.d
        if kind == "limbo":
            if key in of.limbo and of.limbo[key].until <= self.now:
                for e in of.handle(key.room, Event("limbo_timer", data=key), self.now)[0]:
                    self.perform(side, e)
        elif kind == "early":
            of.forget_early(key, self.now)
        elif kind == "silence":
            due = of.silent(key, self.now)
            if due is not None and due <= self.now:
                of.gone(key)
                if self.state("d") != t.ABSENT:
                    for e in of.handle(ROOM, Event("peer_silence", key), self.now)[0]:
                        self.perform(side, e)
            elif due is not None:
                self.at(due, lambda: self.fire(side, kind, key))
        else:
            record = of.rooms.get(key)
            due = record.timers.get(kind) if record is not None else None
            if due is not None and due <= self.now:
                del record.timers[kind]
                names = {"tombstone": "tombstone_timer", "hello": "hello_timer", "notice": "notice_timer"}
                ev = Event(names.get(kind, f"expire_{kind}"))
                for e in of.handle(key, ev, self.now, *(() if side == "d" else (DIGEST,)))[0]:
                    self.perform(side, e)
                if record.state in t.TERMINAL:
                    self.ends.setdefault(side, (self.now, record.state))

    # ---------------------------------------------------------------- the two engines

    def leg(self, side):
        self.event(side, Event("leg"))

    def prefill(self):
        """P's scheduler: the budget, then the packed KV."""
        self.event("p", Event("admit", data=packed_bytes(POOLS, N_PAGES)))
        offer = Offer("packed", plan_parts(POOLS, N_PAGES), N_TOKENS, N_PAGES, wire.FirstToken(3))
        if self.state("p") == t.LETTERS["W"]:
            self.event("p", Event("kv_ready", data=offer))

    def both_ended(self):
        return len(self.ends) == 2

    def assert_forgotten(self):
        """Long after the end both sides are as they were before it (S3, S12, V2)."""
        self.run()
        assert not self._heap or self._heap[0][0] > self.now + 100
        assert (self.p.rooms, self.p.limbo, self.p.early, self.p.n_early) == ({}, {}, {}, 0)
        assert (self.d.rooms, self.offered, self.pulling) == ({}, {}, {})
        assert self.p.budget.charged_bytes == 0


def outcome(pair):
    return {side: state for side, (_, state) in pair.ends.items()}


@pytest.mark.parametrize("order", ["pd", "dp"])
@pytest.mark.parametrize("late_s", [0.0, 0.5, 10.0])
def test_a_hand_off_in_either_order_of_the_legs(order, late_s):
    pair = Pair()
    pair.leg(order[0])
    pair.at(late_s, lambda: pair.leg(order[1]))
    pair.at(late_s + 0.1, pair.prefill)
    assert pair.run(pair.both_ended, 40)
    assert outcome(pair) == {"p": S, "d": S}
    assert pair.now < late_s + 1.2, "at most one hello interval after the last leg"
    pair.assert_forgotten()


def test_each_message_of_a_quiet_hand_off_is_said_once():
    pair = Pair()
    pair.leg("p")
    pair.prefill()
    pair.leg("d")
    assert pair.run(pair.both_ended, 5)
    pair.run(limit_s=1)
    assert pair.sent == [("d", "Hello"), ("p", "Ready"), ("d", "Done"), ("p", "DoneAck")]


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("when_s", [0.0005, 0.0015, 0.0025, 0.0505, 0.0515, 0.0525, 0.0535])
def test_an_abort_ends_the_other_side_in_one_round_trip(side, when_s):
    """V7, at every point of the hand-off: before binding, bound, offered, pulling, landed, done."""
    pair = Pair()
    pair.leg("p")
    pair.leg("d")
    pair.at(0.05, pair.prefill)
    pair.at(when_s, lambda: pair.event(side, Event("abort_local", reason="client_abort")))
    assert pair.run(pair.both_ended, 40)
    assert outcome(pair)["p"] == outcome(pair)["d"] or outcome(pair) == {"p": F, "d": S}
    if outcome(pair)["d"] == F:
        assert max(at for at, _ in pair.ends.values()) <= when_s + 2 * LINK_S + 0.0005
    pair.assert_forgotten()


@pytest.mark.parametrize("lost", ["Hello", "Pending", "Ready", "Done", "DoneAck", "Abort", "Failed"])
def test_two_losses_of_any_message_are_healed(lost):
    left = [2]

    def fate(message):
        if type(message).__name__ == lost and left[0]:
            left[0] -= 1
            return ()
        return (0.0,)

    pair = Pair(fate)
    pair.leg("p")
    pair.leg("d")
    pair.at(0.05, pair.prefill)
    if lost in ("Abort", "Failed"):
        pair.at(0.01, lambda: pair.event("d" if lost == "Abort" else "p", Event("abort_local", reason="x")))
    assert pair.run(pair.both_ended, 40)
    assert outcome(pair) == dict.fromkeys("pd", F if lost in ("Abort", "Failed") else S)
    assert pair.now < 5, "healed by repeats, not by a timeout"
    pair.assert_forgotten()
    assert left == [0] or lost == "Pending", "a ready says all that a pending does"


@pytest.mark.parametrize("seed", range(60))
def test_loss_repeats_and_reordering_leave_nothing_behind(seed):
    rng = random.Random(seed)

    def fate(message):
        copies = rng.choices((0, 1, 2), weights=(3, 6, 1))[0]
        return [rng.choice((0.0, 0.0, 0.01, 0.5)) for _ in range(copies)]

    pair = Pair(fate)
    for side in rng.sample("pd", 2):
        pair.at(rng.random() * 0.2, lambda side=side: pair.leg(side))
    pair.at(0.2 + rng.random(), pair.prefill)
    if seed % 3 == 0:
        side = rng.choice("pd")
        pair.at(rng.random() * 2, lambda: pair.event(side, Event("abort_local", reason="client_abort")))
    assert pair.run(pair.both_ended, 400)
    ended = outcome(pair)
    assert ended["p"] != S or ended["d"] == S, "P's success is D's word"
    pair.assert_forgotten()
