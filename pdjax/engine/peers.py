"""The peers of one process: links, addresses, outgoing frames (protocol §3).

Driver thread only. Bounded: the least recently heard link goes when a new peer comes (S12).
"""

from __future__ import annotations

from collections.abc import Callable

from pdjax.core import link as lk
from pdjax.core import wire
from pdjax.core.link import Link
from pdjax.core.settings import PDSettings
from pdjax.engine.ports import FrameIn, SideChannel

MAX_MESSAGES = 64  # of one frame


class PeerBook:
    """instance id → link. On P links come from frames, on D from the registry."""

    def __init__(
        self,
        me: str,
        epoch: int,
        settings: PDSettings,
        secret: bytes,
        channel: SideChannel,
        count: Callable[[str], None],
        log: Callable[[str, str, wire.AnyMessage], None],
        forgotten: Callable[[str, int], None],
    ) -> None:
        """forgotten(instance, epoch): the link is gone, and so may be whatever is held for that life."""
        self._me, self._epoch, self._settings, self._secret = me, epoch, settings, secret
        self._channel, self._count, self._log, self._forgotten = channel, count, log, forgotten
        self.links: dict[str, Link] = {}
        self._outbox: dict[str, list[wire.AnyMessage]] = {}

    def learn(self, instance: str, address: str, now: float) -> None:
        """D: the registry says where this P listens now."""
        link = self.links.get(instance)
        if link is None:
            self._make_room()
            self.links[instance] = Link(instance, address, last_heard=now)
        elif link.address != address:
            self._channel.forget(link.address)
            link.address = address

    def by_address(self, address: str) -> str | None:
        return next((k for k, v in self.links.items() if v.address == address), None)

    def address_of(self, peer: str) -> str:
        link = self.links.get(peer)
        return link.address if link is not None else ""

    def epoch_of(self, peer: str) -> int:
        link = self.links.get(peer)
        return link.epoch if link is not None else 0

    def receive(self, event: FrameIn, now: float, create: bool) -> tuple[Link, wire.Frame, int] | None:
        """Decode and judge one frame → (link, frame, the epoch it supersedes or 0); None: its messages may not act.

        A frame without proof of age changes nothing here, whoever it names: it is answered by a bare stamp, which
        the real peer echoes at once (protocol §3).
        """
        frame = wire.decode(event.frame, self._secret, self._settings.max_frame_bytes)
        if isinstance(frame, wire.BadFrame):
            self._count(f"bad_frame_{frame.why}")
            return None
        link = self.links.get(frame.instance)
        if link is None:
            if not create:
                self._count("unknown_peer")
                return None
            link = Link(frame.instance, event.address)
        newer = link.is_newer(frame)
        verdict = link.judge(frame, self._epoch, now, self._settings.message_life_s)
        if verdict != lk.OK:
            self._count("stale_epoch" if verdict == lk.OLD_EPOCH else verdict)
            if verdict != lk.OLD_EPOCH and frame.messages:
                bare = lk.challenge(self._me, self._epoch, now, frame)
                self._channel.send(event.address, wire.encode(bare, self._secret))
            return None
        if link.instance not in self.links:
            self._make_room()
            self.links[link.instance] = link
        if create and newer:
            # Only the peer itself can say something newer: a frame recorded on the way and sent again from another
            # connection proves its age, too, and must not bring that connection what is meant for the peer.
            link.address = event.address
        reborn_from = link.epoch if 0 < link.epoch < frame.epoch else 0
        link.epoch, link.last_heard = frame.epoch, now
        for m in link.take_stash():
            self.send(link.instance, m)
        return link, frame, reborn_from

    def send(self, peer: str, message: wire.AnyMessage) -> None:
        self._outbox.setdefault(peer, []).append(message)

    def flush(self, now: float) -> None:
        """One frame, or several that fit, to each peer that has something to hear."""
        outbox, self._outbox = self._outbox, {}
        for peer, messages in outbox.items():
            link = self.links.get(peer)
            if link is None:
                self._count("send_to_unknown_peer")
                continue
            for i in range(0, len(messages), MAX_MESSAGES):
                self._send_frame(link, messages[i : i + MAX_MESSAGES], now)

    def _send_frame(self, link: Link, messages: list[wire.AnyMessage], now: float) -> None:
        dropped = link.stash_dropped
        data = wire.encode(link.frame(self._me, self._epoch, now, messages), self._secret)
        if link.stash_dropped > dropped:
            self._count("stash_dropped")
        if len(data) > self._settings.max_frame_bytes and len(messages) > 1:
            # Manifests of long prompts: together too long, and the same rooms would ask together again.
            half = len(messages) // 2
            self._send_frame(link, messages[:half], now)
            self._send_frame(link, messages[half:], now)
            return
        for m in messages:
            self._log("sent", link.instance, m)
        if len(data) > self._settings.max_frame_bytes:
            self._count("frame_too_long")
        elif not self._channel.send(link.address, data):
            self._count("send_dropped")

    def silent(self, since: float) -> list[tuple[str, int]]:
        """(instance, epoch) of the links that nothing was heard of after ``since``."""
        return [(link.instance, link.epoch) for link in self.links.values() if link.last_heard < since]

    def forget(self, instance: str) -> None:
        """The peer is a stranger from now on."""
        link = self.links.pop(instance)
        self._outbox.pop(instance, None)
        self._channel.forget(link.address)
        self._forgotten(instance, link.epoch)

    def _make_room(self) -> None:
        if len(self.links) < self._settings.max_peers:
            return
        self._count("peers_evicted")
        self.forget(min(self.links.values(), key=lambda link: link.last_heard).instance)
