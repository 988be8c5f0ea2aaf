"""What P takes before it prefills, what D takes before it pulls, and whose pages a landing may touch."""

from __future__ import annotations

import pytest
from sched_fake_manager import FakeReceiver
from sched_harness import NORMAL
from sched_pair import LONG, assert_both_right, bytes_of

from pdjax.core.errors import PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.engine.base import KVEnded, KVLanded, KVReady, KVReleased
from pdjax.sched.decode import RECEIVE_RETRY_S
from pdjax.sched.request import SamplingParams

# ---------------------------------------------------------------- P: budget and pages


def test_budget_is_fifo_and_the_head_waits(make_pair):
    pair = make_pair()
    pair.link.budget_bytes = bytes_of(pair, 8) + bytes_of(pair, 4)
    legs = [pair.submit([i + 1] * n, LONG, sides="p") for i, n in enumerate((8, 16, 4))]
    for _ in range(20):
        pair.p.step()
    first, large, small = (p for p, _ in legs)
    assert first.end == "length"
    assert not large.outputs and not small.outputs  # the small one would fit, but it came later
    assert [name for name, _ in pair.p_runner.calls].count(
        "gather"
    ) == 1  # nothing is prefilled without budget
    assert pair.p.idle()
    pair.link.end("prefill", 1, "lease_expired")
    pair.settle()
    assert large.end == "length" and not small.outputs


def test_a_refused_head_is_asked_again_only_when_something_changed(make_pair):
    pair = make_pair(budget_bytes=1)
    pair.submit([1] * 8, LONG, sides="p")
    for _ in range(5):
        pair.p.step()
    pair.submit([2] * 8, LONG, sides="p")
    for _ in range(5):
        pair.p.step()
    asked = pair.link.admit_calls
    for _ in range(50):
        assert not pair.p.step()
    assert pair.link.admit_calls == asked
    pair.link.post("prefill", KVReleased())
    assert pair.p.step()
    assert pair.link.admit_calls == asked + 1


@pytest.mark.parametrize("how", ["abort", "ended"])
def test_when_the_head_goes_the_next_is_asked(make_pair, how):
    pair = make_pair(budget_bytes=1)
    pair.link.budget_bytes = bytes_of(pair, 4) * 2
    (first, _), (large, _), (small, _) = (pair.submit([1] * n, LONG, sides="p") for n in (4, 20, 4))
    for _ in range(5):
        pair.p.step()
    assert first.end == "length" and pair.p.stats()["budget_queue"] == 2
    if how == "abort":
        pair.p.abort("r2")
    else:
        pair.link.end("prefill", 2)
    for _ in range(5):
        pair.p.step()
    assert large.end == ("abort" if how == "abort" else "peer_lost")
    assert small.end == "length"


def test_p_frees_its_pages_at_send_and_keeps_no_request(make_pair):
    pair = make_pair(p_config=NORMAL)
    p, _ = pair.submit([1] * 8, LONG, sides="p")
    pair.p.step()
    assert pair.p.stats()["used_pages"] == 2
    pair.p.step()
    assert p.end == "length" and pair.p.stats()["used_pages"] == 0
    assert pair.link.half("prefill", 1).state == KVPoll.Transferring
    pair.link.end("prefill", 1, "lease_expired")  # nobody is left to be told
    pair.p.abort("r1")
    pair.settle()
    assert p.end == "length" and pair.p.stats()["stray_events"] == 1
    pair.assert_initial()


def test_a_room_that_ends_during_its_prefill_offers_nothing(make_pair, monkeypatch):
    """The driver ended it while the device worked; its event is not taken yet when send() says no."""
    pair = make_pair(p_config=NORMAL)
    p, _ = pair.submit([1] * 4, LONG, sides="p")
    real = pair.p_runner.prefill

    def prefill(chunk):
        pair.link.end("prefill", 1, "lease_expired")
        return real(chunk)

    monkeypatch.setattr(pair.p_runner, "prefill", prefill)
    pair.p.step()
    assert p.end == "lease_expired" and not p.tokens
    assert [name for name, _ in pair.p_runner.calls] == ["prefill"]
    pair.settle()
    pair.assert_initial()


# ---------------------------------------------------------------- D: pages, receive, landing


def until_pulling(pair) -> None:
    """D has begun a pull, and nothing has landed."""
    while pair.d.stats()["in_flight"] == 0:
        pair.p.step()
        for action in pair.link.actions():
            if not action[0].startswith("land"):
                pair.link.do(action)
        pair.d.step()


def test_d_takes_pages_for_the_whole_output_in_the_order_of_ready(make_pair):
    pair = make_pair(d={"num_pages": 9, "max_batch": 4})
    one, two, three = (
        pair.submit([i] * 4, SamplingParams(n, ignore_eos=True)) for i, n in ((1, 12), (2, 24), (3, 4))
    )
    while pair.p.step():
        pass
    pair.d.step()
    ready = dict(pair.link.actions())
    for room in (2, 1, 3):  # not the order of arrival
        ready[f"bind {room}"]()
    for room in (2, 1, 3):
        dict(pair.link.actions())[f"ready {room}"]()
    pair.d.step()
    stats = pair.d.stats()
    assert (stats["in_flight"], stats["page_queue"], stats["used_pages"]) == (1, 2, 7)
    assert two[1].req.times.scheduled is not None
    pair.link.land(2)
    while not two[1].end:
        assert one[1].req.times.scheduled is None and three[1].req.times.scheduled is None  # no overtaking
        assert pair.d.step()
    pair.settle()
    for p, d in (one, two, three):
        assert_both_right(pair, p, d)
    pair.assert_initial()


def test_a_p_that_never_answers_holds_up_nobody(make_pair):
    pair = make_pair(d={"num_pages": 9, "max_batch": 1})
    _, stuck = pair.submit([1] * 4, SamplingParams(20), sides="d")
    p, d = pair.submit([2] * 4, LONG)
    pair.settle()
    assert_both_right(pair, p, d)
    assert not stuck.outputs and pair.d.idle()


def test_receive_says_not_now(make_pair):
    pair = make_pair()
    pair.link.not_now = True
    p, d = pair.submit([1] * 4, LONG)
    pair.steps(4)
    assert pair.d.stats()["used_pages"] == 0 and pair.d.stats()["page_queue"] == 1
    assert pair.link.receive_calls == pair.d.stats()["receive_refusals"] == 1
    assert d.req.times.scheduled is None
    wake = pair.d.next_wake()
    assert wake == pair.clock() + RECEIVE_RETRY_S and pair.d.idle()
    for _ in range(5):
        assert not pair.d.step()
    assert pair.link.receive_calls == 1
    pair.clock.advance_to(wake)  # the delay is over
    assert not pair.d.idle()
    pair.d.step()
    assert pair.link.receive_calls == 2
    pair.link.post("decode", KVEnded(999, 503, "peer_lost", ""))  # any event ends the delay
    pair.d.step()
    assert pair.link.receive_calls == 3
    pair.link.not_now = False
    pair.settle()
    assert_both_right(pair, p, d)
    assert pair.d.next_wake() is None
    pair.assert_initial()


def test_receive_says_no_because_the_room_has_ended(make_pair):
    """The end is in the manager already, its event comes later: the pages are free and the next one goes on."""
    pair = make_pair()
    (_, first), (p2, second) = pair.submit([1] * 4, LONG), pair.submit([2] * 4, LONG)
    pair.link.not_now = True
    pair.steps(5)
    pair.link.not_now = False
    pair.link.end("decode", 1, "peer_lost")
    events, pair.link.events["decode"] = pair.link.events["decode"], []
    pair.clock.advance(1)
    pair.d.step()
    assert first.end == "peer_lost"
    assert pair.d.stats()["in_flight"] == 1
    pair.link.events["decode"] = events
    pair.settle()
    assert first.end == "peer_lost" and pair.d.stats()["stray_events"] == 1
    assert_both_right(pair, p2, second)
    pair.assert_initial()


def test_a_late_landing_touches_nothing(make_pair):
    """Incident B26: the pages of an aborted request are another's when its KV lands."""
    pair = make_pair(d={"num_pages": 8, "max_batch": 4})
    _, aborted = pair.submit([1] * 8, LONG)
    while pair.d.stats()["in_flight"] == 0:
        pair.p.step()
        for action in pair.link.actions():
            pair.link.do(action)
        pair.d.step()
    pages = list(aborted.req.pages)
    half = pair.link.half("decode", 1)
    landed = KVLanded(1, half.token, pair.link.half("prefill", 1).packed)
    pair.d.abort("r1")
    pair.d.step()
    assert aborted.end == "abort" and pair.d.stats()["used_pages"] == 0 and half.state == KVPoll.Failed
    p, d = pair.submit([2] * 8, LONG)
    while not d.outputs:
        pair.steps(1)
    assert set(d.req.pages) & set(pages)
    pair.link.post("decode", landed)
    before = pair.d_runner.kv.copy()
    pair.d._take_events()
    assert (pair.d_runner.kv == before).all()
    pair.settle()
    assert pair.d.stats()["late_landings"] == 1
    assert_both_right(pair, p, d)
    pair.assert_initial()


def test_a_landing_of_another_attempt_is_dropped(make_pair):
    """A room that is used again (S5): the token, not the room, owns the pages."""
    pair = make_pair()
    p, d = pair.submit([1] * 8, LONG)
    until_pulling(pair)
    pair.link.post(
        "decode", KVLanded(1, pair.link.half("decode", 1).token - 1, pair.link.half("prefill", 1).packed)
    )
    pair.d.step()
    assert pair.d.stats()["late_landings"] == 1 and not d.outputs
    pair.settle()
    assert_both_right(pair, p, d)


def test_landing_twice_is_landing_once(make_pair):
    pair = make_pair()
    p, d = pair.submit([1] * 8, LONG)
    while not d.outputs:
        pair.steps(1)
    landed = KVLanded(1, pair.link.half("decode", 1).token, pair.link.half("prefill", 1).packed)
    pair.link.post("decode", landed)
    pair.settle()
    assert pair.d.stats()["late_landings"] == 1
    assert_both_right(pair, p, d)


def test_nothing_is_said_before_commit(make_pair):
    """commit() says no: the KV is here and right, and still no token of it may be given out (S2, S13)."""
    pair = make_pair()
    _, d = pair.submit([1] * 8, LONG)
    until_pulling(pair)
    pair.link.land(1)
    half = pair.link.half("decode", 1)
    half.state, half.error = KVPoll.Failed, PDError("late", reason="transfer_timeout", room=1)
    pair.d.step()
    assert d.end == "transfer_timeout" and not d.tokens
    assert [name for name, _ in pair.d_runner.calls] == ["scatter"]
    pair.settle()
    assert pair.d.stats()["used_pages"] == 0


def test_success_stands_whatever_p_says_later(make_pair):
    pair = make_pair()
    p, d = pair.submit([1] * 8, LONG)
    while not d.outputs:
        pair.steps(1)
    pair.link.post("decode", KVEnded(1, 503, "peer_lost", "too late"))
    pair.settle()
    assert_both_right(pair, p, d)
    assert pair.d.stats()["stray_events"] == 1


def test_an_abort_while_decoding_leaves_the_hand_off_alone(make_pair, monkeypatch):
    """Protocol §5: the request ends, the hand-off stays S, and its room may be another's by now."""
    pair = make_pair()
    _, d = pair.submit([1] * 8, SamplingParams(50, ignore_eos=True))
    while not d.outputs:
        pair.steps(1)
    told = []
    monkeypatch.setattr(FakeReceiver, "abort", lambda self, reason="": told.append(self.room))
    pair.d.abort("r1")
    pair.d.step()
    assert d.end == "abort" and told == [] and pair.half_state("decode", 1) == KVPoll.Success
    pair.settle()
    pair.assert_initial()


def test_a_room_may_be_used_again_while_its_first_user_decodes(make_pair):
    """The tombstone of a hand-off is shorter than a long answer."""
    pair = make_pair()
    p, d = pair.submit([1] * 8, SamplingParams(50, ignore_eos=True))
    while not d.outputs:
        pair.steps(1)
    pair.link.halves.clear()
    p2, d2 = pair.submit([2] * 8, LONG, room=1, rid="again")
    pair.settle()
    assert_both_right(pair, p, d)
    assert_both_right(pair, p2, d2)


def test_p_states_another_length(make_pair):
    pair = make_pair(p_config=NORMAL)
    _, d = pair.submit([1] * 8, LONG)
    pair.p.step(), pair.p.step()
    pair.d.step()
    for action in pair.link.actions():
        pair.link.do(action)
    first = pair.link.half("prefill", 1).first
    pair.link.post("decode", KVReady(1, 9, 3, first))
    pair.d.step()
    assert d.end == "manifest_mismatch" and d.finals[0].failure.status == 503
    assert pair.link.half("decode", 1).error.reason == "manifest_mismatch"
