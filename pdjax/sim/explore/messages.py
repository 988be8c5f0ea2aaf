"""Messages of the protocol as small tuples, for the wires of the model. Must never drop what the table reads."""

from __future__ import annotations

from typing import Any

from pdjax.core import wire
from pdjax.core.pools import Manifest, PoolTransferSpec, plan_parts

POOLS = [PoolTransferSpec("kv", "main_kv", "uint8", (4, 1, 1), 1, 1)]
PARTS = plan_parts(POOLS, 1)
FIRST = wire.FirstToken(1)


def pack(m: wire.AnyMessage) -> tuple[Any, ...]:
    """A message without what the table never reads (reasons, durations, sizes)."""
    kind = wire.EVENT_OF[type(m)]
    if isinstance(m, wire.Hello):
        return (kind, m.room, m.attempt, m.ack_epoch, m.digest, m.fingerprint)
    if isinstance(m, wire.Abort):
        return (kind, m.room, m.attempt, m.uuid, m.quiet, m.digest)
    if isinstance(m, wire.Done | wire.DoneAck):
        return (kind, m.room, m.attempt, m.uuid)
    if isinstance(m, wire.Ready):
        return (kind, m.room, m.attempt, m.manifest.uuid, m.manifest.digest)
    if isinstance(m, wire.Failed):
        return (kind, m.room, m.attempt, m.echo)
    return (kind, m.room, m.attempt)


def manifest(uuid: int, digest: str, fingerprint: str = "f") -> Manifest:
    return Manifest(uuid, "", 1, 1, 1, fingerprint, digest, PARTS)


def unpack(m: tuple[Any, ...]) -> wire.AnyMessage:
    kind, room, attempt, *rest = m
    if kind == "hello":
        return wire.Hello(room=room, attempt=attempt, ack_epoch=rest[0], digest=rest[1], fingerprint=rest[2])
    if kind == "abort":
        return wire.Abort(
            room=room, attempt=attempt, uuid=rest[0], quiet=rest[1], digest=rest[2], reason="client_abort"
        )
    if kind == "done":
        return wire.Done(room=room, attempt=attempt, uuid=rest[0])
    if kind == "done_ack":
        return wire.DoneAck(room=room, attempt=attempt, uuid=rest[0])
    if kind == "ready":
        return wire.Ready(
            room=room, attempt=attempt, manifest=manifest(rest[0], rest[1]), lease_s=1.0, first=FIRST
        )
    if kind == "failed":
        return wire.Failed(room=room, attempt=attempt, echo=rest[0], reason="lost")
    return (wire.Unknown if kind == "unknown" else wire.Pending)(room=room, attempt=attempt)
