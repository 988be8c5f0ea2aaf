"""Freshness: first contact, replays, late messages, restarts (protocol §3)."""

from pdjax.core import link as lk
from pdjax.core import wire
from pdjax.core.link import Link

LIFE_S = 15.0
MESSAGE = wire.Unknown(room=1, attempt=2)


def pair():
    return Link("d", "d-address"), Link("p", "p-address")  # P's link to D, D's link to P


def acquaint(to_d, to_p):
    """D (epoch 7, its clock at 10) and P (epoch 5, at 100) have proved their age to each other."""
    to_p.judge(lk.challenge("p", 5, 100.0, to_p.frame("d", 7, 10.0, [])), 7, 10.0, LIFE_S)
    assert to_d.judge(to_p.frame("d", 7, 10.0, []), 5, 100.0, LIFE_S) == lk.OK


def test_first_contact_costs_one_round_trip_and_nothing_is_lost():
    to_d, to_p = pair()
    first = to_p.frame("d", 7, 10.0, [MESSAGE])
    assert to_d.judge(first, 5, 100.0, LIFE_S) == lk.NO_ECHO
    bare = lk.challenge("p", 5, 100.1, first)
    assert to_p.judge(bare, 7, 10.2, LIFE_S) == lk.OK
    assert to_p.take_stash() == [MESSAGE]
    again = to_p.frame("d", 7, 10.2, [MESSAGE])
    assert to_d.judge(again, 5, 100.3, LIFE_S) == lk.OK
    assert to_p.take_stash() == []


def test_a_late_message_is_dropped_and_an_idle_channel_is_not():
    to_d, to_p = pair()
    acquaint(to_d, to_p)
    late = to_p.frame("d", 7, 11.0, [MESSAGE])
    assert to_d.judge(late, 5, 101.0 + LIFE_S + 0.1, LIFE_S) == lk.TOO_OLD
    idle = to_p.frame("d", 7, 1000.0, [MESSAGE])  # D held P's stamp for long, and says so
    assert to_d.judge(idle, 5, 1090.0, LIFE_S) == lk.OK


def test_a_replay_is_refused_after_the_message_life():
    to_d, to_p = pair()
    acquaint(to_d, to_p)
    frame = to_p.frame("d", 7, 11.0, [MESSAGE])
    assert to_d.judge(frame, 5, 101.0, LIFE_S) == lk.OK
    assert to_d.judge(frame, 5, 101.0 + 2 * LIFE_S, LIFE_S) == lk.TOO_OLD


def test_an_echo_of_my_former_life_proves_nothing():
    to_d, to_p = pair()
    acquaint(to_d, to_p)
    frame = to_p.frame("d", 7, 11.0, [MESSAGE])
    assert to_d.judge(frame, 6, 101.0, LIFE_S) == lk.NO_ECHO


def test_a_former_life_of_the_peer_is_refused():
    to_d, to_p = pair()
    to_d.epoch = 8
    assert to_d.judge(to_p.frame("d", 7, 10.0, []), 5, 100.0, LIFE_S) == lk.OLD_EPOCH


def test_the_stash_is_bounded_and_counted():
    _, to_p = pair()
    for room in range(lk.MAX_STASH + 5):
        to_p.frame("d", 7, 10.0, [wire.Unknown(room=room, attempt=2)])
    assert len(to_p.stash) == lk.MAX_STASH and to_p.stash_dropped == 5


def test_a_repetition_is_not_stashed_again():
    """A notice to a peer that is stopped is repeated for as long as it lives; the peer needs it once."""
    _, to_p = pair()
    for _ in range(50):
        to_p.frame("d", 7, 10.0, [MESSAGE])
    assert to_p.take_stash() == [MESSAGE]


def test_a_frame_without_proof_changes_nothing():
    """One forged frame with a peer's name, a huge epoch and stamp must not lock the real peer out."""
    to_d, to_p = pair()
    acquaint(to_d, to_p)
    before = vars(to_d).copy()
    forged = wire.Frame("d", (1 << 64) - 1, 1 << 60, 0, 0, 0, (MESSAGE,))
    assert to_d.judge(forged, 5, 101.0, LIFE_S) == lk.NO_ECHO
    replayed = wire.Frame("d", (1 << 64) - 1, 1 << 60, 1, 5, 0, (MESSAGE,))
    assert to_d.judge(replayed, 5, 101.0, LIFE_S) == lk.TOO_OLD
    assert vars(to_d) == before
    assert to_d.judge(to_p.frame("d", 7, 11.0, [MESSAGE]), 5, 101.0, LIFE_S) == lk.OK
