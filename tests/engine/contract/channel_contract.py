"""What every ``SideChannel`` must do (protocol §3), written once for the real one and for a simulated one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from pdjax.engine.ports import ChannelEvent, FrameIn, Refused, SideChannel


class ChannelPair(ABC):
    """P's channel, D's channel, and the largest frame that both accept."""

    p: SideChannel
    d: SideChannel
    max_frame_bytes: int

    @abstractmethod
    def new_d(self, name: str) -> SideChannel:
        """Another D; closed with the pair. name: unique, where the channel has one."""

    @abstractmethod
    def kill_p(self) -> None:
        """P's process is gone; its address is free."""

    @abstractmethod
    def revive_p(self) -> None:
        """A new P at the old address: replaces ``p``."""

    @abstractmethod
    def dead_address(self) -> str:
        """An address at which nobody listens."""

    @abstractmethod
    def settle(self, channel: SideChannel, until: Callable[[list[ChannelEvent]], bool]) -> list[ChannelEvent]:
        """Receive on this channel until the condition holds for what was received; fail when it never does."""

    @abstractmethod
    def idle(self, channel: SideChannel) -> list[ChannelEvent]:
        """Receive on this channel for longer than any prompt event takes."""

    # -------------------------------------------------------------- for the tests

    @property
    def address(self) -> str:
        assert self.p.address is not None
        return self.p.address

    def frames(self, channel: SideChannel, n: int) -> list[FrameIn]:
        events = self.settle(channel, lambda got: sum(isinstance(e, FrameIn) for e in got) >= n)
        return [e for e in events if isinstance(e, FrameIn)]

    def meet(self) -> str:
        """One frame each way. Returns where D is for P."""
        at_p = self.heard(self.d, b"hello")
        assert self.p.send(at_p, b"pending")
        assert self.frames(self.d, 1) == [FrameIn(self.address, b"pending")]
        return at_p

    def heard(self, d: SideChannel, frame: bytes) -> str:
        """D sends the frame and P, which has nothing else to read, gets it. Returns where that D is for P."""
        assert d.send(self.address, frame)
        (event,) = self.frames(self.p, 1)
        assert event.frame == frame
        return event.address


class ChannelContract:
    """Subclass it and override the fixture ``pair``."""

    @pytest.fixture
    def pair(self) -> ChannelPair:
        raise NotImplementedError

    def test_frames_go_both_ways(self, pair):
        pair.meet()
        assert pair.d.address is None
        ip, _, port = pair.address.rpartition(":")
        assert ip
        assert 0 < int(port) < 65536

    def test_frames_of_one_sender_keep_their_order(self, pair):
        frames = [b"%d" % i for i in range(40)]
        assert all(pair.d.send(pair.address, frame) for frame in frames)
        assert [e.frame for e in pair.frames(pair.p, 40)] == frames

    def test_empty_and_largest_frames(self, pair):
        largest = b"x" * pair.max_frame_bytes
        assert pair.d.send(pair.address, b"")
        assert pair.d.send(pair.address, largest)
        assert [e.frame for e in pair.frames(pair.p, 2)] == [b"", largest]

    def test_a_frame_too_long_is_not_sent(self, pair):
        at_p = pair.meet()
        too_long = b"x" * (pair.max_frame_bytes + 1)
        assert not pair.d.send(pair.address, too_long)
        assert not pair.p.send(at_p, too_long)
        pair.meet()

    def test_the_first_frame_is_not_lost_while_connecting(self, pair):
        for i in range(5):
            d = pair.new_d(f"d{i + 10}:1")
            assert d.send(pair.address, b"first")
        events = pair.frames(pair.p, 5)
        assert [e.frame for e in events] == [b"first"] * 5
        assert len({e.address for e in events}) == 5, "each D has an address of its own"

    def test_each_d_gets_its_own_answers(self, pair):
        other = pair.new_d("d1:7")
        d0, d1 = pair.heard(pair.d, b"a"), pair.heard(other, b"b")
        assert pair.p.send(d1, b"for d1")
        assert pair.p.send(d0, b"for d0")
        assert pair.frames(pair.d, 1) == [FrameIn(pair.address, b"for d0")]
        assert pair.frames(other, 1) == [FrameIn(pair.address, b"for d1")]
        assert pair.idle(pair.d) == pair.idle(other) == []

    def test_p_cannot_send_to_a_d_that_never_spoke(self, pair):
        assert not pair.p.send("stranger:1", b"x")
        pair.meet()

    def test_d_cannot_send_to_what_is_no_address(self, pair):
        for address in ("nonsense", "some.host:80", "127.0.0.1:0", "127.0.0.1:99999", ""):
            assert not pair.d.send(address, b"x")
        pair.meet()

    def test_nothing_to_receive_is_an_empty_list(self, pair):
        assert pair.p.receive() == pair.d.receive() == []

    # -------------------------------------------------------------- refusal

    def test_a_refused_address_is_reported(self, pair):
        dead = pair.dead_address()
        pair.d.send(dead, b"x")
        assert pair.settle(pair.d, bool) == [Refused(dead)]
        pair.meet()

    def test_a_refusal_is_repeated_when_sends_go_on_and_only_then(self, pair):
        dead = pair.dead_address()
        for _ in range(3):
            pair.d.send(dead, b"x")
            assert pair.settle(pair.d, bool) == [Refused(dead)]
        assert pair.idle(pair.d) == []

    def test_the_death_of_p_is_reported_without_a_send(self, pair):
        pair.meet()
        address = pair.address
        pair.kill_p()
        assert pair.settle(pair.d, bool) == [Refused(address)]

    def test_sends_reach_a_p_that_came_back(self, pair):
        pair.meet()
        address = pair.address
        pair.kill_p()
        pair.settle(pair.d, bool)
        assert pair.d.send(address, b"again")
        pair.revive_p()
        assert pair.address == address
        assert [e.frame for e in pair.frames(pair.p, 1)] == [b"again"]
        pair.meet()
        assert pair.p.receive() == []

    def test_frames_for_a_dead_p_are_bounded(self, pair):
        dead = pair.dead_address()
        sent = [pair.d.send(dead, b"x") for _ in range(3000)]
        assert sent[0]
        assert not all(sent)
        assert not sent[-1]

    def test_p_cannot_send_to_a_d_that_left(self, pair):
        other = pair.new_d("d1:7")
        there = pair.heard(other, b"b")
        other.close()
        pair.settle(pair.p, lambda _: not pair.p.send(there, b"x"))
        pair.meet()

    # -------------------------------------------------------------- forget and close

    def test_a_forgotten_address_can_be_used_again(self, pair):
        pair.meet()
        pair.d.forget(pair.address)
        pair.d.forget(pair.address)
        assert pair.idle(pair.d) == []
        pair.meet()

    def test_a_forgotten_dead_address_is_silent(self, pair):
        dead = pair.dead_address()
        pair.d.send(dead, b"x")
        pair.settle(pair.d, bool)
        pair.d.send(dead, b"x")
        pair.d.forget(dead)
        assert pair.idle(pair.d) == []

    def test_close_can_be_repeated_and_wake_survives_it(self, pair):
        pair.meet()
        for channel in (pair.d, pair.p):
            channel.close()
            channel.close()
            channel.wake()
