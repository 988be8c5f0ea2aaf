"""The contract of the ports on the simulated ones: no fake behaves better than the real part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from contract.channel_contract import ChannelContract, ChannelPair
from contract.transport_contract import TransportContract, TransportPair

from pdjax.core.pools import Part
from pdjax.engine.base import Packed
from pdjax.engine.ports import ChannelEvent, SideChannel, TransportEvent
from pdjax.sim.net import SimChannel, SimNet
from pdjax.sim.transport import SimTransport

SETTLE_S, IDLE_S = 30.0, 0.5


class SimTransportPair(TransportPair):
    def __init__(self) -> None:
        self.net = SimNet()
        self.p, self.d = SimTransport(self.net, "p0@1"), SimTransport(self.net, "d0@1")
        self.events: list[TransportEvent] = []
        self.d.start(self.events.append)

    def arrays(self, seed: int, shapes: Sequence[tuple[int, ...]]) -> Packed:
        rng = np.random.default_rng([seed, len(shapes)])
        arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        parts = tuple(
            Part(0, 0, i, i, i + 1, 0, 1, a.shape, "float32", a.nbytes, checksum=xxhash.xxh3_64_intdigest(a))
            for i, a in enumerate(arrays)
        )
        return Packed(parts, arrays)

    def equal(self, array: object, packed: Packed, index: int) -> bool:
        return np.array_equal(np.asarray(array), packed.arrays[index])

    def settle(self, until: Callable[[], bool]) -> None:
        stop = self.net.clock() + SETTLE_S
        while not until():
            assert self.net.step(stop), f"nothing more will happen; events so far: {self.events}"

    def idle(self) -> None:
        stop = self.net.clock() + IDLE_S
        while self.net.step(stop):
            pass
        self.net.clock.advance_to(stop)
        self.p.tick()
        self.d.tick()


class TestSimTransport(TransportContract):
    @pytest.fixture
    def pair(self):
        return SimTransportPair()


class SimChannelPair(ChannelPair):
    max_frame_bytes = 1 << 16

    def __init__(self) -> None:
        self.net = SimNet()
        self.p = SimChannel(self.net, "p0@1", "10.0.0.1:7000", max_frame_bytes=self.max_frame_bytes)
        self.d = self.new_d("d0:1")

    def new_d(self, identity: str) -> SideChannel:
        return SimChannel(self.net, identity, None, max_frame_bytes=self.max_frame_bytes)

    def kill_p(self) -> None:
        self.p.close()

    def revive_p(self) -> None:
        self.p = SimChannel(self.net, "p0@2", "10.0.0.1:7000", max_frame_bytes=self.max_frame_bytes)

    def dead_address(self) -> str:
        return "10.0.9.9:7000"

    def settle(self, channel: SideChannel, until: Callable[[list[ChannelEvent]], bool]) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        stop = self.net.clock() + SETTLE_S
        while not until(events):
            assert self.net.step(stop), f"nothing more will happen; received {events}"
            events += channel.receive()
        return events

    def idle(self, channel: SideChannel) -> list[ChannelEvent]:
        stop = self.net.clock() + IDLE_S
        while self.net.step(stop):
            pass
        self.net.clock.advance_to(stop)
        return channel.receive()


class TestSimChannel(ChannelContract):
    @pytest.fixture
    def pair(self):
        return SimChannelPair()


# ------------------------------------------------------------------ what only a simulated net can be made to do


def test_a_withdrawn_registration_expires_and_a_later_pull_hangs():
    pair = SimTransportPair()
    uuid, packed = pair.uuid(), pair.arrays(1, [(2, 3)])
    pair.p.offer("d0", uuid, packed)
    pair.p.withdraw("d0", uuid, 0.2)
    pair.assert_all_failed(pair.pull(uuid, packed.parts), 1)
    pair.idle()
    late = pair.pull(uuid, packed.parts)
    pair.idle()
    assert pair.of(late) == []


def test_bytes_in_flight_outlive_the_withdraw_and_are_counted():
    pair = SimTransportPair()
    pair.net.page_s = 1.0
    uuid, packed = pair.uuid(), pair.arrays(1, [(2, 3), (4, 4)])
    pair.p.offer("d0", uuid, packed)
    pull = pair.pull(uuid, packed.parts)
    assert pair.net.step(pair.net.clock() + 0.1)
    pair.p.withdraw("d0", uuid, 60)
    assert pair.p.unpulled() == 0 and pair.p.flying_bytes() == 4 * (6 + 16)
    pair.assert_right(pull, packed)
    assert pair.p.flying_bytes() == 0


def test_a_stopped_peer_holds_up_its_own_pulls_only():
    pair = SimTransportPair()
    other = SimTransport(pair.net, "p1@1")
    a, b = pair.arrays(1, [(2, 3)]), pair.arrays(2, [(2, 3)])
    pair.p.offer("d0", 5, a)
    other.offer("d0", 6, b)
    pair.net.freeze("p0", 2.0)
    held = pair.d.pull("p0", pair.p.address_for("d0"), 5, a.parts)
    free = pair.d.pull("p1", other.address_for("d0"), 6, b.parts)
    pair.assert_right(free, b)
    assert pair.net.clock() < 0.1
    pair.assert_right(held, a)
    assert pair.net.clock() >= 2.0


def test_the_death_of_p_fails_what_is_in_flight_and_the_old_connection_stays_dead():
    pair = SimTransportPair()
    pair.net.page_s = 1.0
    packed = pair.arrays(1, [(2, 3), (2, 3)])
    pair.p.offer("d0", 5, packed)
    address = pair.p.address_for("d0")
    pull = pair.d.pull("p0", address, 5, packed.parts)
    pair.idle()
    pair.p.close(0)
    event = pair.assert_all_failed(pull, 2)
    assert set(event.errors) == {"Connection closed"}
    again = pair.d.pull("p0", address, 5, packed.parts)
    pair.assert_all_failed(again, 2)
    stranger = pair.d.pull("p9", address, 5, packed.parts)  # a fresh connect is tried for ever
    pair.idle()
    assert pair.of(stranger) == []


def test_a_cut_link_loses_frames_silently():
    pair = SimChannelPair()
    pair.meet()
    pair.net.cut("p0", "d0:1", 1.0)
    assert pair.d.send(pair.address, b"lost")
    assert pair.idle(pair.p) == pair.idle(pair.d) == []
    pair.idle(pair.p)
    pair.meet()
