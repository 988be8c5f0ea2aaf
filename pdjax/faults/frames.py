"""Rules on side-channel frames: which message is dropped, delayed, repeated or spoilt, and what is sent instead.

The simulated network and the fault port of a real process apply the same rules. Must never send, wait or keep time:
whoever asks gets copies with their delays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdjax.core import wire

ANY_LENGTH = 1 << 62  # the frame was made here: its length is somebody else's business


@dataclass(frozen=True)
class Copy:
    """One copy of a frame on its way: beside the others of its link when ``by_s`` or ``alone`` says so."""

    frame: bytes
    by_s: float = 0.0
    alone: bool = False


@dataclass
class Rule:
    """A message or transfer rule that is in force. seen: matches so far; used: how often it acted."""

    index: int  # of its step
    value: Mapping[str, Any]
    seen: int = 0
    used: int = 0

    def turn(self) -> bool:
        """One more match: does the rule act on it?"""
        self.seen += 1
        times = self.value.get("times", 1)
        if self.seen < self.value.get("nth", 1) or (times is not None and self.used >= times):
            return False
        self.used += 1
        return True


@dataclass
class FrameRules:
    """The message rules of one file. hit(rule, message): one acts; by_s of a file's milliseconds: ms_s."""

    hit: Callable[[Rule, wire.AnyMessage], None]
    secret: bytes = b""
    ms_s: float = 0.001
    rules: list[Rule] = field(default_factory=list)
    _last_frame: bytes = b""
    _last_decoded: tuple[wire.AnyMessage, ...] = ()

    def copies(self, src: str, dst: str, frame: bytes) -> list[Copy]:
        """What is sent in place of this frame."""
        messages = self._decoded(frame)
        stay: list[wire.AnyMessage] = []
        copies: list[Copy] = []
        for m in messages:
            rule = self._rule_for(src, dst, m)
            if rule is None:
                stay.append(m)
                continue
            alone, by_s, do = self._repack(frame, [m]), rule.value.get("by", 0) * self.ms_s, rule.value["do"]
            self.hit(rule, m)
            if do == "duplicate":
                stay.append(m)
                copies.append(Copy(alone, by_s, alone=True))
            elif do == "delay":
                copies.append(Copy(alone, by_s, alone=True))
            elif do == "corrupt":
                copies.append(Copy(alone[:-1] + bytes([alone[-1] ^ 1])))
        if len(stay) == len(messages):
            return [Copy(frame), *copies]
        return ([Copy(self._repack(frame, stay))] if stay else []) + copies

    def _decoded(self, frame: bytes) -> tuple[wire.AnyMessage, ...]:
        if frame is not self._last_frame:
            decoded = wire.decode(frame, self.secret, ANY_LENGTH)
            self._last_frame = frame
            self._last_decoded = decoded.messages if isinstance(decoded, wire.Frame) else ()
        return self._last_decoded

    def _rule_for(self, src: str, dst: str, m: wire.AnyMessage) -> Rule | None:
        """The first rule whose turn it is; the others only count the message."""
        found = None
        kind = wire.EVENT_OF[type(m)]
        for rule in self.rules:
            match = rule.value["match"]
            if (
                match.get("type", kind) == kind
                and match.get("room", m.room) == m.room
                and match.get("from", src) == src
                and match.get("to", dst) == dst
            ):
                if found is not None:
                    rule.seen += 1
                elif rule.turn():
                    found = rule
        return found

    def _repack(self, frame: bytes, messages: list[wire.AnyMessage]) -> bytes:
        decoded = wire.decode(frame, self.secret, ANY_LENGTH)
        assert isinstance(decoded, wire.Frame)
        return wire.encode(msgspec.structs.replace(decoded, messages=tuple(messages)), self.secret)
