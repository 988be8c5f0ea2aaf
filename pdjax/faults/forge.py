"""Frames that nobody sent: what a process would say now, but for what the trace wants said instead.

Must never change the manager that it looks at.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec

from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.link import Link
from pdjax.core.pools import Manifest
from pdjax.engine.manager import KVManager

NOBODY = "127.0.0.1:1"  # a transfer address at which nobody serves


def forged_frame(source: KVManager, to: str, given: Mapping[str, Any], secret: bytes = b"") -> bytes:
    """A frame with one message: what source would say to the instance `to` now, but for the fields that are given."""
    kind = next(k for k, name in wire.EVENT_OF.items() if name == given["type"])
    room = given.get("room", next(reversed(source.rooms), 0))
    fields = _defaults(source, room)
    fields |= {k: v for k, v in given.items() if k != "type"}
    if kind is wire.Ready and "uuid" in given:
        fields["manifest"] = msgspec.structs.replace(fields["manifest"], uuid=given["uuid"])
    message: Any = kind(**{name: fields[name] for name in kind.__struct_fields__})
    known = source.peers.links.get(to)
    link = copy.copy(known) if known is not None else Link(to, "")
    link.stash = []
    frame = link.frame(source.args.instance_id, source.epoch, source.ports.clock(), [message])
    return wire.encode(frame, secret)


def _defaults(source: KVManager, room: int) -> dict[str, Any]:
    """Every field of every message, as source would fill it for that room now."""
    args = source.args
    fingerprint = args.fingerprint.hash
    fields: dict[str, Any] = {
        "room": room, "attempt": 1, "ack_epoch": 0, "fingerprint": fingerprint, "digest": "", "uuid": 0,
        "quiet": True, "reason": "lost", "echo": False, "message": "", "lease_s": source.settings.lease_s,
        "first": wire.FirstToken(0),
    }  # fmt: skip
    offer = None
    if source.role == t.RECEIVER:
        record = source.receiver.rooms.get(room)
        if record is not None:
            uuid = record.manifest.uuid if record.manifest is not None else 0
            fields |= {
                "attempt": record.attempt, "ack_epoch": record.bound_epoch, "digest": record.digest,
                "uuid": uuid, "quiet": not record.pulling, "reason": record.reason or "client_abort",
            }  # fmt: skip
    else:
        sender = source.sender.rooms.get(room)
        if sender is not None:
            fields |= {
                "attempt": sender.attempt, "uuid": sender.uuid, "digest": sender.digest,
                "reason": sender.reason or "lost",
            }  # fmt: skip
            offer = sender.offer
    fields["manifest"] = Manifest(
        uuid=fields["uuid"],
        transfer_address=NOBODY,
        n_tokens=offer.n_tokens if offer else 1,
        n_pages=offer.n_pages if offer else 1,
        page_size=args.page_size,
        fingerprint=fingerprint,
        digest=fields["digest"],
        parts=offer.parts if offer else (),
    )
    if offer:
        fields["first"] = offer.first
    return fields
