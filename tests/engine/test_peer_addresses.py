"""Where P sends what is meant for a peer: to the connection of its newest believed frame, and to no stranger's (docs/security.md)."""

from __future__ import annotations

import pytest

from pdjax.core import wire
from pdjax.core.settings import PDSettings
from pdjax.engine.peers import PeerBook
from pdjax.engine.ports import FrameIn

SECRET, P_EPOCH, D_EPOCH = b"of the deployment", 7, 3
BEGAN_S = 100.0
ABORT = wire.Abort(room=1, attempt=1, uuid=0, quiet=True, reason="client", digest="d")


class Channel:
    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, address: str, frame: bytes) -> bool:
        self.sent.append(address)
        return True

    def forget(self, address: str) -> None:
        pass


class AtP:
    def __init__(self, secret: bytes = SECRET, **settings: int) -> None:
        self.channel, self.counted = Channel(), []
        self.book = PeerBook(
            "p0", P_EPOCH, PDSettings(**settings), secret, self.channel, self.counted.append,
            lambda *_: None, lambda *_: None,
        )  # fmt: skip

    def hears(self, address: str, data: bytes, at_s: float = BEGAN_S) -> bool:
        return self.book.receive(FrameIn(address, data), at_s, create=True) is not None

    def sends_to(self, peer: str = "d0") -> str:
        self.channel.sent.clear()
        self.book.send(peer, ABORT)
        self.book.flush(BEGAN_S)
        (address,) = self.channel.sent
        return address


def of_d(at_s: float, *, epoch: int = D_EPOCH, echo_epoch: int = P_EPOCH, secret: bytes = SECRET, name="d0"):
    """A frame that D made then; P's stamp that it echoes is of the same time."""
    us = int(at_s * 1e6)
    return wire.encode(wire.Frame(name, epoch, us, us, echo_epoch, 0, (ABORT,)), secret)


@pytest.fixture
def p():
    at_p = AtP()
    assert at_p.hears("first", of_d(BEGAN_S))
    assert at_p.sends_to() == "first"
    return at_p


def test_a_peer_that_comes_back_over_another_connection_is_sent_to_there(p):
    assert p.hears("second", of_d(BEGAN_S + 1.0), BEGAN_S + 1.0)
    assert p.sends_to() == "second"
    assert p.hears("third", of_d(BEGAN_S + 0.5, epoch=D_EPOCH + 1), BEGAN_S + 1.0), (
        "a new life's clock may be behind"
    )
    assert p.sends_to() == "third"


def test_what_was_on_its_way_over_the_old_connection_is_read_and_moves_nothing(p):
    assert p.hears("second", of_d(BEGAN_S + 1.0), BEGAN_S + 1.0)
    assert p.hears("first", of_d(BEGAN_S + 0.5), BEGAN_S + 1.0)
    assert p.sends_to() == "second"


def test_a_recorded_frame_brings_its_sender_nothing(p):
    """It has the MAC and proves its age: it was said within the message life."""
    assert p.hears("stranger", of_d(BEGAN_S), BEGAN_S + 0.1)
    assert p.sends_to() == "first"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"secret": b"another"}, "bad_frame_checksum"),
        ({"secret": b""}, "bad_frame_checksum"),
        ({"echo_epoch": P_EPOCH - 1}, "no_echo"),
        ({"epoch": D_EPOCH - 1}, "stale_epoch"),
    ],
)
def test_a_frame_that_is_not_believed_moves_nothing(p, made, why):
    assert not p.hears("stranger", of_d(BEGAN_S + 1.0, **made), BEGAN_S + 1.0)
    assert p.counted == [why]
    assert p.sends_to() == "first"


def test_without_a_secret_who_speaks_in_a_peers_name_is_sent_what_is_meant_for_it():
    """As the page says: frames are only checksummed then."""
    p = AtP(secret=b"")
    assert p.hears("first", of_d(BEGAN_S, secret=b""))
    assert p.hears("stranger", of_d(BEGAN_S + 1.0, secret=b""), BEGAN_S + 1.0)
    assert p.sends_to() == "stranger"


def test_one_address_for_each_peer_and_so_many_peers():
    p = AtP(max_peers=2)
    for i in range(20):
        assert p.hears(f"connection{i}", of_d(BEGAN_S + i, name=f"d{i % 3}"), BEGAN_S + i)
        assert len(p.book.links) <= 2
    assert p.sends_to("d1") == "connection19"
