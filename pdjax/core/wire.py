"""Side-channel messages and their bytes (protocol §3).

A frame is ``PDJX | version | MAC or checksum (16 bytes) | msgpack``. Decoding never raises and never runs
anything from the wire: a frame that is not exactly right is a counted drop. Must never use pickle.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdjax.core.pools import Manifest

PROTOCOL_VERSION: Final = 1
MAGIC: Final = b"PDJX"
_TAG_BYTES: Final = 16
HEAD_BYTES: Final = len(MAGIC) + 1 + _TAG_BYTES  # before the payload
MAX_ROOM: Final = (1 << 63) - 1
_U64: Final = (1 << 64) - 1
MAX_TOP_LOGPROBS: Final = (
    20  # of one token: what clients of OpenAI's API may ask for, and what a frame carries
)

MAX_FRAME_MESSAGES: Final = (
    256  # what one frame can make the receiver hold is bounded before it is read (S12)
)

Short = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=512)]
Unsigned = Annotated[int, Meta(ge=0)]


class FirstToken(msgspec.Struct, frozen=True):
    """What P hands over beside the KV, in ``ready``: D never computes it again (protocol §3)."""

    token: Unsigned
    logprob: float | None = None
    # The likeliest (token, log-probability) pairs at its position, as many as the client asked for.
    top: Annotated[tuple[tuple[Unsigned, float], ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()
    cached_tokens: Unsigned = 0
    queue_s: float = 0.0  # time in P's queue
    prefill_s: float = 0.0  # P's forward passes


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Every message is about one attempt at one room."""

    room: Unsigned
    attempt: Unsigned


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    ack_epoch: Unsigned  # the P epoch that acknowledged this room, 0: none yet
    fingerprint: Short
    digest: Short


class Unknown(Message, frozen=True, kw_only=True, tag="unknown"):
    pass


class Pending(Message, frozen=True, kw_only=True, tag="pending"):
    pass


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    manifest: Manifest
    lease_s: float
    first: FirstToken


class Done(Message, frozen=True, kw_only=True, tag="done"):
    uuid: Unsigned


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    uuid: Unsigned  # 0: none known
    quiet: bool
    reason: Short
    digest: Short


class DoneAck(Message, frozen=True, kw_only=True, tag="done_ack"):
    uuid: Unsigned


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    echo: bool
    reason: Short
    message: Text = ""


AnyMessage = Hello | Unknown | Pending | Ready | Done | Abort | DoneAck | Failed

TO_SENDER: Final = (Hello, Done, Abort)
EVENT_OF: Final[dict[type[Message], str]] = {
    Hello: "hello",
    Unknown: "unknown",
    Pending: "pending",
    Ready: "ready",
    Done: "done",
    Abort: "abort",
    DoneAck: "done_ack",
    Failed: "failed",
}


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What travels. Times are microseconds on the clock of the side that made them (S15).

    echo: the newest stamp of the receiver that the sender has seen, minted in the receiver's life echo_epoch
    (0: none); held_us: how long the sender has held it.
    """

    instance: Short
    epoch: Unsigned
    stamp_us: Unsigned
    echo_us: Unsigned
    echo_epoch: Unsigned
    held_us: Unsigned
    messages: Annotated[tuple[AnyMessage, ...], Meta(max_length=MAX_FRAME_MESSAGES)] = ()


@dataclass(frozen=True)
class BadFrame:
    """Why a frame was dropped: too_long, not_ours, version, checksum, schema, range."""

    why: str


_decoder = msgspec.msgpack.Decoder(Frame)
_encoder = msgspec.msgpack.Encoder()


def _tag(payload: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_TAG_BYTES, key=secret[:64]).digest()


def encode(frame: Frame, secret: bytes = b"") -> bytes:
    """Frame → bytes. With a secret the 16 bytes are a keyed MAC, else a checksum."""
    payload = _encoder.encode(frame)
    return MAGIC + bytes((PROTOCOL_VERSION,)) + _tag(payload, secret) + payload


def decode(data: bytes, secret: bytes = b"", max_frame_bytes: int = 1 << 20) -> Frame | BadFrame:
    """Bytes → frame, or why not. Never raises."""
    if len(data) > max_frame_bytes:
        return BadFrame("too_long")
    if len(data) <= HEAD_BYTES or data[: len(MAGIC)] != MAGIC:
        return BadFrame("not_ours")
    if data[len(MAGIC)] != PROTOCOL_VERSION:
        return BadFrame("version")
    payload = data[HEAD_BYTES:]
    if not hmac.compare_digest(_tag(payload, secret), data[len(MAGIC) + 1 : HEAD_BYTES]):
        return BadFrame("checksum")
    try:
        frame = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError):
        return BadFrame("schema")
    return frame if _in_range(frame) else BadFrame("range")


def _in_range(frame: Frame) -> bool:
    """uint64 bounds that the schema cannot state, and no NaN or negative duration."""
    if frame.epoch == 0 or max(frame.epoch, frame.echo_epoch) > _U64:
        return False
    for m in frame.messages:
        if m.room > MAX_ROOM or m.attempt > _U64 or getattr(m, "uuid", 0) > _U64:
            return False
        if isinstance(m, Hello) and m.ack_epoch > _U64:
            return False
        if isinstance(m, Ready) and not (0 < m.lease_s < 1e9 and 0 <= m.manifest.uuid <= _U64):
            return False
    return True
