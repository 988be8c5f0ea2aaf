"""What a registry answers, as its client reads it: one schema for each answer, so that none is half believed.

Without a configured registry whoever a request names answers (protocol §3), so every text here is a stranger's. Must
never hold more of an answer than is used, and never let one raise anything but NoAnswer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from pdjax.engine.bootstrap.asking import SHOWN_CHARS, NoAnswer, read
from pdjax.engine.bootstrap.registry import BadRegistration, parse_uint
from pdjax.engine.ports import Entry


class Peers(msgspec.Struct, frozen=True):
    """How many instances of the other role fit, and why each other one does not (name → reason)."""

    compatible: Annotated[int, msgspec.Meta(ge=0)]
    rejected: dict[str, str]


class _Heard(msgspec.Struct, frozen=True):
    peers: Peers


class _Told(msgspec.Struct, frozen=True):
    message: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    error: _Told = _Told()


class ListedSeat(msgspec.Struct, frozen=True):
    """One instance of a listing. An address that was registered as null is none. epoch: exact, a number or text (S8)."""

    instance_id: str
    epoch: int | str
    compatible: bool
    zmq_addr: str | None = None
    serving_url: str | None = None
    reason: str | None = None


class _Listing(msgspec.Struct, frozen=True):
    instances: list[ListedSeat]


def peers(body: bytes) -> Peers:
    """What a 200 to a registration or a heartbeat says. Raises NoAnswer."""
    return read(body, _Heard).peers


def refusal(body: bytes) -> str:
    """Why a registry refuses, "" when it does not say; cut to what a line holds. Raises NoAnswer for no registry."""
    return read(body, _Refusal).error.message[:SHOWN_CHARS]


def listing(body: bytes) -> tuple[tuple[Entry, ...], Mapping[str, str]]:
    """The instances that fit, and why the others do not (name → reason). Raises NoAnswer."""
    entries: list[Entry] = []
    rejected: dict[str, str] = {}
    for seat in read(body, _Listing).instances:
        if not seat.compatible:
            rejected[seat.instance_id] = seat.reason or ""
            continue
        try:
            epoch = parse_uint(seat.epoch, "epoch")
        except BadRegistration as error:
            raise NoAnswer(str(error)) from None
        entries.append(Entry(seat.instance_id, epoch, seat.zmq_addr or "", seat.serving_url or ""))
    return tuple(entries), rejected
