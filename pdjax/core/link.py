"""Freshness of what comes from one peer: stamps, echoes, epochs (protocol §3).

A peer echoes my newest stamp and says how long it held it, so on my own clock a message is at most
now − stamp − held old. That bounds how long anything can travel and is the replay guard. Pure: time comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdjax.core.wire import AnyMessage, Frame

OK = "ok"
OLD_EPOCH = "old_epoch"  # from a life of the peer that is over
NO_ECHO = "no_echo"  # no proof of age: answer with a bare stamp
TOO_OLD = "too_old"  # older than the message life: answer with a bare stamp

MAX_STASH = 256  # messages kept for the first contact; beyond it the oldest are dropped and counted


def _us(now: float) -> int:
    return int(now * 1e6) + 1  # 0 means "none"


def challenge(me: str, my_epoch: int, now: float, frame: Frame) -> Frame:
    """The bare stamp that answers a frame without proof of age. It is made from the frame alone: nothing is kept."""
    return Frame(
        instance=me,
        epoch=my_epoch,
        stamp_us=_us(now),
        echo_us=frame.stamp_us,
        echo_epoch=frame.epoch,
        held_us=0,
    )


@dataclass
class Link:
    """One peer instance. ``epoch`` is its newest life seen (0: none)."""

    instance: str
    address: str
    epoch: int = 0
    last_heard: float = float("-inf")  # a valid frame, or that the peer became known
    _stamp_us: int = 0
    _stamp_at: float = 0.0
    _stamp_epoch: int = 0  # the life of the peer that minted the stamp
    stash: list[AnyMessage] = field(default_factory=list)
    stash_dropped: int = 0

    def is_newer(self, frame: Frame) -> bool:
        """Than everything of this peer that was noted. A frame that is sent again by somebody else is not."""
        return (frame.epoch, frame.stamp_us) > (self._stamp_epoch, self._stamp_us)

    def judge(self, frame: Frame, my_epoch: int, now: float, life_s: float) -> str:
        """Whether the frame's messages may act. Only a frame that proves its age is noted: a forged or replayed one
        must not move the stamp that the real peer is echoed, nor its epoch (``epoch`` is set by the caller)."""
        if frame.epoch < self.epoch:
            return OLD_EPOCH
        if frame.echo_us == 0 or frame.echo_epoch != my_epoch:
            return NO_ECHO
        age_s = (_us(now) - frame.echo_us - frame.held_us) / 1e6
        if age_s > life_s or age_s < -1.0:
            return TOO_OLD
        if self.is_newer(frame):
            self._stamp_us, self._stamp_at, self._stamp_epoch = frame.stamp_us, now, frame.epoch
        return OK

    def frame(self, me: str, my_epoch: int, now: float, messages: Sequence[AnyMessage]) -> Frame:
        """The next frame to this peer. First contact carries no echo and will be dropped: keep its messages."""
        if messages and not self._stamp_us:
            # A repetition says nothing new: a peer that wakes after a long stop must not get each of them again (S12).
            self.stash.extend(m for m in messages if m not in self.stash)
            if len(self.stash) > MAX_STASH:
                self.stash_dropped += len(self.stash) - MAX_STASH
                del self.stash[:-MAX_STASH]
        held_us = int((now - self._stamp_at) * 1e6) if self._stamp_us else 0
        return Frame(
            instance=me,
            epoch=my_epoch,
            stamp_us=_us(now),
            echo_us=self._stamp_us,
            echo_epoch=self._stamp_epoch,
            held_us=max(held_us, 0),
            messages=tuple(messages),
        )

    def take_stash(self) -> list[AnyMessage]:
        """What was sent before the peer could believe us: repeat it at once."""
        stash, self.stash = self.stash, []
        return stash
