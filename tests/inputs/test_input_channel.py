"""Frames at the side channel: from who has no key, and from who has it and says anything. Nothing raises, nothing grows."""

import sys
from pathlib import Path

import pytest
import zmq
from fuzzing import no_growth, tries
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core import wire
from pdjax.core.settings import PDSettings
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.ports import FrameIn
from pdjax.engine.rooms import LEAST_TIMERS

for folder in ("engine", "core"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from manager_world import World  # noqa: E402
from test_wire import FRAME, MESSAGE  # noqa: E402

WAIT_MS = 30_000
FEW = {"max_peers": 4, "max_early": 8, "max_tombstones": 64}
NAMES = st.sampled_from(["d0", "p0", "d1", "d2", "d3", "d4", "", "x" * 128])


@pytest.fixture(scope="module")
def world():
    """P and D, each with what others may say of it; legs of none, so that every message is a stranger's."""
    made = World(**FEW)
    made.d = made.manager("decode", "d0")
    return made


def bounded(manager):
    assert len(manager.peers.links) <= FEW["max_peers"]
    assert manager.sender.n_early <= FEW["max_early"]
    assert not any(manager.quiescent().values()), manager.quiescent()


def says(world, to, data):
    world.wires["127.0.0.1:7" if to is world.p else "d0"].inbox.append(data)


@given(
    data=st.one_of(st.binary(max_size=300), FRAME.map(wire.encode)),
    cut=st.integers(0, 300),
    at=st.integers(0, 400),
)
@tries(150)
def test_any_bytes_at_a_manager(world, data, cut, at):
    """Whole, cut and with a bit turned; no frame of these proves its age."""
    broken = bytearray(data[: len(data) - cut] if cut % 3 == 0 else data)
    if broken and at % 2:
        broken[at % len(broken)] ^= 1 << at % 8
    for manager in (world.p, world.d):
        says(world, manager, FrameIn("someone", bytes(broken)))
        manager.turn()
        bounded(manager)


@given(
    name=NAMES,
    life=st.integers(1, 1 << 63),
    messages=st.lists(MESSAGE, min_size=1, max_size=8),
    to_p=st.booleans(),
)
@tries(150)
def test_anything_from_a_peer_that_is_believed(world, name, life, messages, to_p):
    """The frame proves that it is new: its messages reach the table, whatever they say and whoever they name."""
    manager = world.p if to_p else world.d
    now_us = int(world.clock() * 1e6) + 1
    frame = wire.Frame(name, life, now_us, now_us, manager.epoch, 0, tuple(messages))
    says(world, manager, FrameIn(name, wire.encode(frame)))
    world.clock.now += 0.01
    manager.turn()
    bounded(manager)


def flood(world, manager, names, rooms):
    """Hellos for rooms that nobody has heard of, in frames that are believed; logs and copies of the test are not kept."""
    for i in range(0, rooms, 64):
        now_us = int(world.clock() * 1e6) + 1
        hellos = tuple(
            wire.Hello(room=room, attempt=1, ack_epoch=0, fingerprint="f", digest="d" * 100)
            for room in range(i, i + 64)
        )
        frame = wire.Frame(f"n{i % names}", 1 << 63, now_us, now_us, manager.epoch, 0, hellos)
        says(world, manager, FrameIn("someone", wire.encode(frame)))
        manager.turn()
        manager.ports.channel.sent_bytes.clear()
        world.log_lines.clear()


def test_a_flood_of_rooms_and_of_names_leaves_nothing(world):
    for manager in (world.p, world.d):
        flood(world, manager, 7, 1 << 12)
        with no_growth(1 << 20):
            flood(world, manager, 300, 1 << 14)
        bounded(manager)
        assert len(manager._timers) <= 2 * LEAST_TIMERS and len(manager._armed) <= 2 * LEAST_TIMERS
    world.clock.now += 1000.0
    world.run(world.p, world.d)
    assert world.p.sender.n_early == 0


@given(parts=st.lists(st.binary(max_size=400), min_size=1, max_size=4))
@tries(60)
def test_any_parts_at_the_socket(socket_pair, parts):
    """Each message is one frame or one drop."""
    channel, dealer = socket_pair
    before = sum(channel.counters.as_dict().values())
    dealer.send_multipart(parts)
    while sum(channel.counters.as_dict().values()) == before:
        channel.wait(1.0)
        for event in channel.receive():
            assert event.frame == parts[-1] and len(parts) == 1
    assert sum(channel.counters.as_dict().values()) == before + 1


@pytest.fixture(scope="module")
def socket_pair():
    channel = ZmqSideChannel.bind("127.0.0.1", settings=PDSettings(max_frame_bytes=300))
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDTIMEO, WAIT_MS)
    dealer.connect(f"tcp://{channel.address}")
    yield channel, dealer
    dealer.close()
    context.term()
    channel.close()
