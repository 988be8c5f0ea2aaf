"""Which rooms a peer concerns, without a walk over the table: protocol §7 lets an answer take 50 ms, tombstones are many."""

import pytest

from pdjax.core import transitions as t
from pdjax.core.budget import Budget
from pdjax.core.by_peer import RoomsByPeer
from pdjax.core.pools import PoolTransferSpec
from pdjax.core.receiver import ReceiverSide
from pdjax.core.room import Event
from pdjax.core.sender import SenderSide
from pdjax.core.settings import PDSettings
from pdjax.core.wire import Hello

POOLS = [PoolTransferSpec("kv", "kv", "float32", (32, 4, 8), 2, 128)]
EPOCH = 7 << 32


class Leg:
    digest, n_prompt = "digest", 4


class NotWalked(dict):
    """A table that is only asked for one room at a time."""

    def __iter__(self):
        raise AssertionError("somebody walks the table")

    keys = values = items = __iter__


def receiver():
    return ReceiverSide(PDSettings(), EPOCH, "print", 4, POOLS, NotWalked())


def asked(d, room, *peers):
    d.handle(room, Event("leg"), 0.0, Leg)
    d.handle(room, Event("candidates", data=[(peer, EPOCH) for peer in peers]), 0.0)


def test_d_names_live_rooms_that_ask_a_p_and_tombstones_that_have_something_to_tell_it():
    d = receiver()
    asked(d, 1, "p1")
    asked(d, 2, "p0", "p1")
    asked(d, 3, "p0")
    assert (d.rooms_of("p0"), d.rooms_of("p1"), d.rooms_of("p2")) == ([2, 3], [1, 2], [])
    d.handle(2, Event("abort_local", reason="client_abort"), 0.0)
    assert d.rooms_of("p0") == [2, 3] and d.n_notices == 2, "an abort is repeated to both"
    d.handle(2, Event("refused", "p0"), 0.0)
    assert (d.rooms_of("p0"), d.rooms_of("p1"), d.n_notices) == ([3], [1, 2], 1)
    d.handle(2, Event("refused", "p1"), 0.0)
    assert d.rooms_of("p1") == [1] and d.n_notices == 0 and 2 in d.rooms


def test_d_names_them_in_the_order_in_which_they_came_and_not_in_that_of_the_answers():
    d = receiver()
    for room in (5, 3, 4):
        d.handle(room, Event("leg"), 0.0, Leg)
    for room in (4, 5, 3):
        d.handle(room, Event("candidates", data=[("p0", EPOCH)]), 0.0)
    assert d.rooms_of("p0") == [5, 3, 4]


def test_what_ends_a_peer_can_change_nothing_in_a_tombstone_but_its_notice():
    """``ReceiverRoom.concerns`` leaves the others out: were a row to do more, it would have to name them."""
    ends = {"refused", "peer_silence", "peer_reborn"}
    of_d = [row for row in t.ROWS if row.role == t.RECEIVER and set(row.states) & set("SF")]
    rows = [row for row in of_d if ends & set(row.event.split())]
    assert {event for row in rows for event in row.event.split()} == ends
    assert {(row.to, row.effects) for row in rows} == {("=", ("end_notice",))}


def test_p_names_the_live_rooms_of_a_life_that_is_over_and_what_it_may_still_read():
    p = SenderSide(PDSettings(), EPOCH, "print", 4, Budget(1 << 20), NotWalked())
    for room, peer in ((2, "d0"), (1, "d0"), (3, "d1")):
        p.handle(room, Event("leg"), 0.0, "digest")
        hello = Hello(room=room, attempt=room, ack_epoch=EPOCH, fingerprint="print", digest="digest")
        p.handle(room, Event("hello", peer, 5, hello), 0.0)
        assert p.rooms[room].peer == peer
    assert p.rooms_of_older_life("d0", 6) == [2, 1] and p.rooms_of_older_life("d0", 5) == []
    p.handle(2, Event("abort_local", reason="client_abort"), 0.0)
    assert p.rooms_of_older_life("d0", 6) == [1] and 2 in p.rooms


class Record:
    def __init__(self, room, *peers):
        self.room, self.state, self.serial, self.noted, self.peers = room, t.LETTERS["B"], 0, {}, peers

    def concerns(self):
        return dict.fromkeys(self.peers)


def test_a_record_that_takes_the_place_of_another_takes_its_turn():
    rooms = {}
    table = RoomsByPeer(rooms)
    old, other, new = Record(1, "a"), Record(2, "a", "b"), Record(1, "b", "a")
    for record in (old, other, new):
        table.keep(record)
    assert table.of("a") == [new, other] and table.of("b") == [new, other] and rooms == {1: new, 2: other}
    old.state = t.ABSENT
    table.keep(old)
    assert rooms[1] is new, "what is gone already removes nobody"


@pytest.mark.parametrize("again", [False, True])
def test_a_room_that_is_forgotten_is_noted_nowhere(again):
    rooms = {}
    table = RoomsByPeer(rooms)
    first, second = Record(1, "a"), Record(2, "a")
    table.keep(first)
    table.keep(second)
    first.state = t.ABSENT
    table.keep(first)
    assert (rooms, table.of("a")) == ({2: second}, [second])
    if again:
        third = Record(1, "a")
        table.keep(third)
        assert table.of("a") == [second, third] == list(rooms.values())
