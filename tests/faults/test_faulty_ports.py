"""Ports with faults: without a rule they are the ports that they wrap, by the same contract; with one they do what it says."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from contract.channel_contract import ChannelContract
from contract.real_transport import RealPair
from contract.transport_contract import TransportContract
from test_channel import ZmqPair

from pdjax.core import wire
from pdjax.engine.ports import FrameIn
from pdjax.faults.channel import Cuts, FaultyChannel
from pdjax.faults.frames import FrameRules, Rule
from pdjax.faults.transport import FaultyTransport

SECRET = b"of the test"


def peer_of(address: str) -> str:
    return "p0" if ":" in address else "d0"


class FaultyPair(ZmqPair):
    """The real channels, each behind its faults. acted: (rule, message) in order."""

    def __init__(self) -> None:
        self.acted: list[tuple[int, str]] = []
        super().__init__()

    def _keep(self, channel):
        me = "p0" if channel.address else "d0"
        rules = FrameRules(lambda rule, m: self.acted.append((rule.index, wire.EVENT_OF[type(m)])), SECRET)
        cuts = Cuts(time.monotonic)
        faulty = FaultyChannel(channel, me, rules, cuts, time.monotonic, peer_of, holding=lambda: faulty.held)
        faulty.rules, faulty.cuts, faulty.held = rules, cuts, False
        return super()._keep(faulty)


class TestFaultyChannel(ChannelContract):
    @pytest.fixture
    def pair(self):
        pair = FaultyPair()
        yield pair
        pair.close()


class FaultyTransferPair(RealPair):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.acted: list[tuple[int, int]] = []
        self.cuts = Cuts(time.monotonic)
        self.p = FaultyTransport(
            self.p,
            "p0",
            self.cuts,
            lambda uuid: 7,
            lambda rule, room, uuid: self.acted.append((rule.index, room)),
        )

    def rule(self, do: str, **value) -> None:
        self.p.rules.append(Rule(0, {"match": {"room": 7}, "do": do, **value}))


class TestFaultyTransport(TransportContract):
    @pytest.fixture
    def pair(self):
        pair = FaultyTransferPair()
        yield pair
        pair.close()


@pytest.fixture
def channels():
    pair = FaultyPair()
    pair.meet()
    yield pair
    pair.close()


def hello(room: int) -> wire.Hello:
    return wire.Hello(room=room, attempt=1, ack_epoch=0, fingerprint="f", digest="x")


def frame(*messages: wire.AnyMessage) -> bytes:
    return wire.encode(wire.Frame("d0", 1, 1, 0, 0, 0, messages), SECRET)


def rooms_of(events) -> list[list[int]]:
    decoded = [wire.decode(e.frame, SECRET) for e in events if isinstance(e, FrameIn)]
    return [[m.room for m in f.messages] if isinstance(f, wire.Frame) else [] for f in decoded]


def rule_on_d(pair: FaultyPair, do: str, **value) -> None:
    pair.d.rules.rules.append(Rule(3, {"match": {"type": "hello", "room": 7, "to": "p0"}, "do": do, **value}))


def test_a_dropped_message_leaves_the_others_of_its_frame(channels):
    rule_on_d(channels, "drop")
    assert channels.d.send(channels.address, frame(hello(6), hello(7)))
    assert channels.d.send(channels.address, frame(hello(7)))  # the rule has acted once, as it says
    assert rooms_of(channels.frames(channels.p, 2)) == [[6], [7]]
    assert channels.acted == [(3, "hello")]


def test_the_nth_message_is_repeated_alone(channels):
    rule_on_d(channels, "duplicate", nth=2)
    for _ in range(2):
        channels.d.send(channels.address, frame(hello(7), hello(8)))
    assert rooms_of(channels.frames(channels.p, 3)) == [[7, 8], [7, 8], [7]]


def test_a_delayed_message_comes_later_and_wakes_the_sender(channels):
    rule_on_d(channels, "delay", by=150)
    began = time.monotonic()
    channels.d.send(channels.address, frame(hello(7)))
    channels.d.send(channels.address, frame(hello(8)))
    assert rooms_of(channels.frames(channels.p, 1)) == [[8]]
    while not (got := channels.p.receive()):
        channels.d.wait(5.0)  # the driver of D sleeps no longer than the delay
        channels.d.receive()
        channels.p.wait(0.01)
        assert time.monotonic() - began < 10
    assert rooms_of(got) == [[7]] and time.monotonic() - began >= 0.15


def test_a_corrupt_message_arrives_and_cannot_be_read(channels):
    rule_on_d(channels, "corrupt")
    channels.d.send(channels.address, frame(hello(7)))
    (event,) = channels.frames(channels.p, 1)
    assert wire.decode(event.frame, SECRET) == wire.BadFrame("checksum")


def test_nothing_passes_a_cut_in_either_direction_until_it_is_over(channels):
    at_p = channels.meet()
    channels.p.cuts.cut("d0", 0.3)
    assert channels.p.send(at_p, b"lost") and channels.d.send(channels.address, b"lost, too")
    assert channels.idle(channels.p) == channels.idle(channels.d) == []
    channels.meet()


def test_an_injected_frame_arrives_as_if_its_sender_had_sent_it(channels):
    channels.p.inject("stranger:1", b"\x00")
    assert channels.frames(channels.p, 1) == [FrameIn("stranger:1", b"\x00")]


def test_what_is_sent_while_somebody_acts_leaves_with_the_next_turn(channels):
    channels.d.held = True
    assert channels.d.send(channels.address, frame(hello(7)))
    assert channels.idle(channels.p) == []
    channels.d.held = False
    assert channels.d.receive() == []
    assert rooms_of(channels.frames(channels.p, 1)) == [[7]]


def test_after_a_reset_no_rule_holds_and_what_was_delayed_has_gone(channels):
    rule_on_d(channels, "delay", by=60_000, times=None)
    channels.d.send(channels.address, frame(hello(7)))
    channels.d.reset()
    channels.d.send(channels.address, frame(hello(7)))
    assert rooms_of(channels.frames(channels.p, 2)) == [[7], [7]]


def test_a_reset_sends_what_was_delayed_in_the_order_of_its_sending(channels):
    for room in range(12):  # the later ones are due earlier
        rule = {
            "match": {"type": "hello", "room": room, "to": "p0"},
            "do": "delay",
            "by": 90_000 - 1000 * room,
        }
        channels.d.rules.rules.append(Rule(3, rule))
        channels.d.send(channels.address, frame(hello(room)))
    channels.d.reset()
    assert rooms_of(channels.frames(channels.p, 12)) == [[room] for room in range(12)]


# ---------------------------------------------------------------- transfers


@pytest.fixture
def transfers():
    pair = FaultyTransferPair()
    yield pair
    pair.close()


def test_a_slow_hand_off_arrives_right_and_late_also_when_it_was_withdrawn_meanwhile(transfers):
    transfers.rule("slow", by=300)
    began = time.monotonic()
    for seed, withdraw in ((1, False), (2, True)):
        uuid, packed = transfers.uuid(), transfers.arrays(seed, [(2, 3)])
        transfers.p.rules[0].used = 0
        transfers.p.offer("d0", uuid, packed)
        pull = transfers.pull(uuid, packed.parts)
        if withdraw:
            transfers.p.withdraw("d0", uuid, 60)
        transfers.assert_right(pull, packed)
    assert time.monotonic() - began >= 0.6 and transfers.acted == [(0, 7)] * 2
    transfers.assert_all_failed(transfers.pull(uuid, packed.parts), 1)  # and now it is fenced


def test_a_hand_off_that_hangs_never_settles_until_its_peer_is_dropped(transfers):
    transfers.rule("hang")
    uuid, packed = transfers.uuid(), transfers.arrays(1, [(2, 3)])
    transfers.p.offer("d0", uuid, packed)
    pull = transfers.pull(uuid, packed.parts)
    transfers.p.withdraw("d0", uuid, 60)
    transfers.idle()
    assert transfers.of(pull) == []
    transfers.d.drop_peer("p0")
    transfers.assert_all_failed(pull, 1)


@pytest.mark.parametrize("do", ["fail", "truncate", "corrupt"])
def test_a_spoilt_hand_off_is_an_error_and_the_next_one_is_right(transfers, do):
    transfers.rule(do)
    uuid, packed = transfers.uuid(), transfers.arrays(1, [(2, 3)])
    transfers.p.offer("d0", uuid, packed)
    (error,) = transfers.assert_all_failed(transfers.pull(uuid, packed.parts), 1).errors
    assert {"fail": "out of range", "truncate": "deleted", "corrupt": "checksum"}[do] in error, error
    uuid, packed = transfers.uuid(), transfers.arrays(2, [(2, 3)])
    transfers.p.offer("d0", uuid, packed)
    transfers.assert_right(transfers.pull(uuid, packed.parts), packed)


def test_a_cut_peer_waits_for_its_hand_off(transfers):
    transfers.cuts.cut("d0", 0.3)
    began = time.monotonic()
    uuid, packed = transfers.uuid(), transfers.arrays(1, [(2, 3)])
    transfers.p.offer("d0:1", uuid, packed)
    transfers.assert_right(
        transfers.d.pull("p0", transfers.p.address_for("d0:1"), uuid, packed.parts), packed
    )
    assert time.monotonic() - began >= 0.25


def test_a_late_hand_off_that_cannot_be_offered_any_more_is_counted(transfers, monkeypatch):
    transfers.rule("slow", by=20)
    tried = threading.Event()

    def offer(*args):
        tried.set()
        raise RuntimeError("the arrays are gone")

    monkeypatch.setattr(transfers.p._real, "offer", offer)
    transfers.p.offer("d0", transfers.uuid(), transfers.arrays(1, [(2, 3)]))
    assert tried.wait(30)
    with transfers.p._lock:  # it is held until the attempt is over
        assert (transfers.p.late_lost, transfers.p._held) == (1, {})
