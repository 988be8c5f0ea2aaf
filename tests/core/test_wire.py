"""Bytes of the side channel: exact round trips, and nothing hostile gets past the decoder."""

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core import wire
from pdjax.core.pools import Manifest, Part

U64 = st.integers(0, (1 << 64) - 1)
ROOM = st.integers(0, wire.MAX_ROOM)
TEXT = st.text(max_size=128)
PART = st.builds(
    Part,
    *[st.integers(0, 9)] * 7,
    shape=st.just((1, 2, 4)),
    dtype=st.just("float32"),
    nbytes=st.integers(1, 1 << 40),
    checksum=U64,
)
MANIFEST = st.builds(
    Manifest, uuid=U64, transfer_address=TEXT, n_tokens=st.integers(1, 9), n_pages=st.integers(1, 9), page_size=st.integers(1, 9),
    fingerprint=TEXT, digest=TEXT, parts=st.lists(PART, max_size=3).map(tuple),
)  # fmt: skip
TOP = st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=wire.MAX_TOP_LOGPROBS).map(tuple)
FIRST = st.builds(wire.FirstToken, token=st.integers(0, 9), logprob=st.none() | st.floats(-9, 0), top=TOP)
MESSAGE = st.one_of(
    st.builds(wire.Hello, room=ROOM, attempt=U64, ack_epoch=U64, fingerprint=TEXT, digest=TEXT),
    st.builds(wire.Unknown, room=ROOM, attempt=U64),
    st.builds(wire.Pending, room=ROOM, attempt=U64),
    st.builds(wire.Ready, room=ROOM, attempt=U64, manifest=MANIFEST, lease_s=st.floats(0.1, 99), first=FIRST),
    st.builds(wire.Done, room=ROOM, attempt=U64, uuid=U64),
    st.builds(wire.Abort, room=ROOM, attempt=U64, uuid=U64, quiet=st.booleans(), reason=TEXT, digest=TEXT),
    st.builds(wire.DoneAck, room=ROOM, attempt=U64, uuid=U64),
    st.builds(wire.Failed, room=ROOM, attempt=U64, echo=st.booleans(), reason=TEXT, message=TEXT),
)
FRAME = st.builds(
    wire.Frame, instance=TEXT, epoch=st.integers(1, (1 << 64) - 1), stamp_us=st.integers(1, 1 << 60), echo_us=st.integers(0, 1 << 60),
    echo_epoch=U64, held_us=st.integers(0, 1 << 50), messages=st.lists(MESSAGE, max_size=4).map(tuple),
)  # fmt: skip


@given(FRAME, st.sampled_from([b"", b"secret"]))
@settings(max_examples=200, deadline=None)
def test_round_trip_is_exact(frame, secret):
    assert wire.decode(wire.encode(frame, secret), secret) == frame


@given(FRAME, st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_flipped_byte_is_dropped(frame, where, flip):
    data = bytearray(wire.encode(frame))
    data[where % len(data)] ^= flip
    assert isinstance(wire.decode(bytes(data)), wire.BadFrame)


@given(st.binary(max_size=300))
def test_garbage_is_dropped(data):
    assert isinstance(wire.decode(data), wire.BadFrame)


@given(st.binary(max_size=300))
def test_garbage_with_a_right_checksum_is_dropped(payload):
    tag = hashlib.blake2b(payload, digest_size=16).digest()
    result = wire.decode(wire.MAGIC + bytes([wire.PROTOCOL_VERSION]) + tag + payload)
    assert isinstance(result, wire.BadFrame | wire.Frame)


FRAME_0 = wire.Frame("d0", 1, 1, 0, 0, 0, (wire.Unknown(room=1, attempt=2),))


def test_another_key_version_or_length_is_dropped_with_its_reason():
    data = wire.encode(FRAME_0, b"one")
    assert wire.decode(data, b"two") == wire.BadFrame("checksum")
    assert wire.decode(data, b"") == wire.BadFrame("checksum")
    assert wire.decode(data[:4] + b"\x09" + data[5:], b"one") == wire.BadFrame("version")
    assert wire.decode(data, b"one", max_frame_bytes=20) == wire.BadFrame("too_long")
    assert wire.decode(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == wire.BadFrame("not_ours")


@pytest.mark.parametrize(
    "message",
    [
        wire.Unknown(room=1 << 63, attempt=2),
        wire.Unknown(room=1, attempt=1 << 64),
        wire.Done(room=1, attempt=2, uuid=1 << 64),
        wire.Hello(room=1, attempt=2, ack_epoch=1 << 64, fingerprint="", digest=""),
    ],
)
def test_ids_out_of_range_are_dropped(message):
    try:
        data = wire.encode(msgspec.structs.replace(FRAME_0, messages=(message,)))
    except OverflowError:
        return  # msgpack cannot even carry it
    assert isinstance(wire.decode(data), wire.BadFrame)


def test_room_2_63_minus_1_is_exact():
    frame = msgspec.structs.replace(
        FRAME_0, messages=(wire.Unknown(room=wire.MAX_ROOM, attempt=(1 << 64) - 1),)
    )
    assert wire.decode(wire.encode(frame)) == frame


def test_more_likeliest_tokens_than_anyone_may_ask_for_are_dropped():
    for extra, kept in ((0, True), (1, False)):
        top = tuple((i, -1.0) for i in range(wire.MAX_TOP_LOGPROBS + extra))
        manifest = Manifest(1, "a:1", 1, 1, 1, "f", "d", ())
        ready = wire.Ready(
            room=1, attempt=2, manifest=manifest, lease_s=1.0, first=wire.FirstToken(5, top=top)
        )
        got = wire.decode(wire.encode(msgspec.structs.replace(FRAME_0, messages=(ready,))))
        assert isinstance(got, wire.Frame) == kept
