from __future__ import annotations

import random

import pytest
from sched_fake_manager import LIVE, FakeReceiver
from sched_harness import EOS, Client, make_null, prompt_starting_with, random_client, random_prompt, run_out
from sched_opcodes import opcodes
from sched_real_pair import RealPair

from pdjax.core.errors import ConfigError, PDError
from pdjax.core.kvpoll import KVPoll
from pdjax.core.pools import packed_bytes, pages_for
from pdjax.engine.base import KVEnded, KVLanded, KVReady, KVReleased, Leg
from pdjax.sched.decode import RECEIVE_RETRY_S, DecodeScheduler, bootstrap_addr
from pdjax.sched.factory import make_scheduler
from pdjax.sched.prefill import PrefillScheduler
from pdjax.sched.request import Request, SamplingParams

LONG = SamplingParams(max_new_tokens=20, ignore_eos=True)


def assert_both_right(pair, p: Client, d: Client) -> None:
    """P answered with the first token alone, D with all of them: those of a lone request."""
    d.assert_right(pair.d_config)
    assert p.tokens == d.tokens[:1]
    assert p.end == ("stop" if d.end == "stop" and len(d.tokens) == 1 else "length")


# ---------------------------------------------------------------- the right answer


@pytest.mark.parametrize("seed", range(8))
def test_many_requests_get_the_tokens_of_a_lone_one(make_any_pair, seed):
    rng = random.Random(seed)
    pair = make_any_pair(
        budget_bytes=rng.choice([1, 2000, 1 << 40]),
        p={"num_pages": rng.choice([12, 40])},
        d={"num_pages": rng.choice([18, 60])},
        p_config={"chunked_prefill_size": rng.choice([1, 5, 8, 512])},
    )
    todo, legs = [random_client(rng, i) for i in range(30)], []
    while todo:
        for _ in range(rng.randrange(3)):
            if todo:
                client = todo.pop()
                legs.append(pair.submit(client.prompt, client.sampling))
        for _ in range(rng.randrange(4)):
            (pair.p if rng.random() < 0.5 else pair.d).step()
            pair.nudge(rng)
    pair.settle()
    for p, d in legs:
        assert_both_right(pair, p, d)
    assert pair.d.stats()["late_landings"] == pair.d.stats()["failed"] == pair.p.stats()["failed"] == 0
    assert all(name in ("scatter", "decode") for name, _ in pair.d_runner.calls)  # D prefills nothing
    assert all(name in ("prefill", "gather") for name, _ in pair.p_runner.calls)
    pair.assert_initial()


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("max_new", [1, 2, 5])
def test_page_edges(make_any_pair, n_prompt, max_new):
    pair = make_any_pair()
    p, d = pair.submit(
        random_prompt(random.Random(n_prompt), n_prompt), SamplingParams(max_new, ignore_eos=True)
    )
    pair.p.step()
    assert pair.p.stats()["used_pages"] in (0, pages_for(n_prompt, 4))  # P owns no page for outputs
    pair.settle()
    assert_both_right(pair, p, d)
    decodes = [name for name, _ in pair.d_runner.calls if name == "decode"]
    assert len(decodes) == max_new - 1  # the first token is P's: D never computes it again
    pair.assert_initial()


def test_eos_first_stops_both_and_decodes_nothing(make_any_pair):
    pair = make_any_pair()
    p, d = pair.submit(prompt_starting_with(EOS, 6), SamplingParams())
    pair.settle()
    assert p.tokens == d.tokens == [EOS] and p.end == d.end == "stop"
    assert [name for name, _ in pair.d_runner.calls] == ["scatter"]
    assert pair.half_state("decode", 1) == KVPoll.Success  # pulled and scattered all the same (protocol §5)
    pair.assert_initial()


def test_pd_equals_null(make_any_pair):
    rng = random.Random(3)
    pair, null = make_any_pair(), make_null()
    for i in range(12):
        client = random_client(rng, i)
        _, d = pair.submit(client.prompt, client.sampling)
        null.submit(client.req)
        run_out(null)
        pair.settle()
        assert d.tokens == client.tokens and d.end == client.end
        assert [o.logprobs for o in d.outputs] == [o.logprobs for o in client.outputs]


def test_times_of_both_sides(make_pair):
    pair = make_pair(p_config={"chunked_prefill_size": 4})
    pair.clock.advance(10)
    p, d = pair.submit([1] * 6, SamplingParams(2, ignore_eos=True))
    for _ in range(8):
        pair.clock.advance(1)
        pair.steps(1)
    t = p.req.times
    assert (t.arrived, t.scheduled, t.prefilled, t.first_token, t.finished) == (10, 11, 12, 12, 12)
    t = d.req.times
    assert (t.arrived, t.ready, t.scheduled, t.landed, t.scattered, t.first_token) == (10, 13, 13, 14, 14, 14)
    assert t.finished == 14 and t.prefilled is None
    assert (t.peer_queue_s, t.peer_prefill_s) == (1.0, 0.0)
    assert d.end == "length"


# ---------------------------------------------------------------- P: budget and pages


def bytes_of(pair, n_prompt):
    return packed_bytes(pair.p_runner.pools, pages_for(n_prompt, pair.p_runner.page_size))


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
    pair = make_pair()
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
    pair = make_pair()
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
    while pair.d.stats()["in_flight"] == 0:
        pair.p.step()
        for action in pair.link.actions():
            if not action[0].startswith("land"):
                pair.link.do(action)
        pair.d.step()
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
    while pair.d.stats()["in_flight"] == 0:
        pair.p.step()
        for action in pair.link.actions():
            if not action[0].startswith("land"):
                pair.link.do(action)
        pair.d.step()
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
    pair = make_pair()
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


# ---------------------------------------------------------------- ends at every stage


N_TICKS = 20


def staged(make_pair):
    """Five requests, of which different ones soon stand at different stages."""
    pair = make_pair(
        p={"num_pages": 4}, d={"num_pages": 17, "max_batch": 2}, p_config={"chunked_prefill_size": 5}
    )
    pair.link.budget_bytes = 3 * bytes_of(pair, 10)
    return pair, [pair.submit([i + 1] * 10, SamplingParams(12, ignore_eos=True)) for i in range(5)]


def tick(pair):
    """One small event at a time."""
    pair.p.step()
    for action in pair.link.actions()[:2]:
        pair.link.do(action)
    pair.d.step()


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("how", ["abort", "abort_all", "ended", "peer ended"])
@pytest.mark.parametrize("ticks", range(N_TICKS))
def test_an_end_at_every_stage(make_pair, side, how, ticks):
    """P: inbox, budget, pages, prefill, sent. D: inbox, ready, page queue, in flight, running, finished."""
    pair, legs = staged(make_pair)
    for _ in range(ticks):
        tick(pair)
    role, scheduler = ("prefill", pair.p) if side == "p" else ("decode", pair.d)
    live = [room for room in range(1, 6) if pair.link.half(role, room).state in LIVE]
    if how == "abort":
        for room in range(1, 6):
            scheduler.abort(f"r{room}")
    elif how == "abort_all":
        scheduler.abort_all()
    else:
        other = "decode" if role == "prefill" else "prefill"
        for room in range(1, 6):
            pair.link.end(role if how == "ended" else other, room)
    if how.startswith("abort"):
        scheduler.step()
        assert scheduler.stats()["used_pages"] == 0  # at once, whatever is in flight
        for room in live:
            state = pair.link.half(role, room).state
            assert state == KVPoll.Failed or (side == "p" and state == KVPoll.Transferring)
    pair.settle()
    for p, d in legs:
        p.assert_prefix(pair.p_config)
        d.assert_prefix(pair.d_config)
        assert p.end and d.end
        if how == "abort" and side == "d":
            assert d.end in ("abort", "length")
        if "ended" in how:  # a request that has begun to decode is no longer touched by its peer's end
            assert d.end == "length" if d.tokens else d.end in ("peer_lost", "peer_failed")
    pair.assert_initial()


def test_every_stage_is_reached(make_pair):
    """The test above means something: its ticks meet requests in every queue of both sides."""
    pair, _ = staged(make_pair)
    seen = set()
    for _ in range(N_TICKS - 1):
        tick(pair)
        seen |= {queue.name for scheduler in (pair.p, pair.d) for queue in scheduler._queues() if queue}
    assert seen == {
        *("budget_queue", "waiting", "prefilling"),
        *("bootstrapping", "page_queue", "in_flight", "running"),
    }


def test_a_room_that_ended_between_claim_and_submit(make_pair):
    pair = make_pair()
    for side, scheduler, role in (("p", pair.p, "prefill"), ("d", pair.d, "decode")):
        client = Client([1] * 4, LONG, "r9", 9)
        scheduler.manager.claim(Leg(9, "r9", "digest", 4, "p.test", None))
        pair.link.end(role, 9, "client_abort")
        scheduler.step()  # its event meets nobody
        scheduler.submit(client.req)
        scheduler.step()
        assert client.end == "client_abort", side
    pair.assert_initial()


def test_a_room_the_manager_does_not_know(make_pair):
    pair = make_pair()
    for scheduler in (pair.p, pair.d):
        client = Client([1] * 4, LONG, "r9", 9)
        scheduler.submit(client.req)
        scheduler.step()
        assert client.end == "lost"
    pair.assert_initial()


def test_a_refused_request_ends_its_claimed_room(make_any_pair):
    pair = make_any_pair(p_config={"max_queue": 1}, d_config={"max_queue": 1})
    kept = pair.submit([1] * 4, LONG)
    assert pair.submit([2] * 4, LONG) == (None, None)
    pair.p.step()
    pair.d.step()
    for role in ("prefill", "decode"):
        assert pair.half_reason(role, 2) == "queue_full"
    pair.settle()
    assert_both_right(pair, *kept)
    pair.assert_initial()


def test_half_a_request_needs_a_room(make_pair):
    pair = make_pair()
    for scheduler in (pair.p, pair.d):
        with pytest.raises(PDError, match="no bootstrap_room") as refusal:
            scheduler.submit(Client([1] * 4).req)
        assert refusal.value.status == 400


def test_a_room_in_use_goes_on(make_pair):
    """Both schedulers survive a duplicate that the manager let through (S8)."""
    pair = make_pair()
    p, d = pair.submit([1] * 8, LONG)
    for scheduler in (pair.p, pair.d):
        twin = Client([2] * 8, LONG, "twin", 1)
        scheduler.submit(twin.req)
        scheduler.step()
        assert twin.end == "duplicate_room" and twin.finals[0].failure.status == 400
    pair.settle()
    assert_both_right(pair, p, d)
    pair.assert_initial()


# ---------------------------------------------------------------- failures


def pd_scenario(make_pair, p_fail=(), d_fail=(), after=False):
    pair = make_pair(
        p={"num_pages": 12, "fail_at": set(p_fail), "after": after},
        d={"num_pages": 24, "max_batch": 3, "fail_at": set(d_fail), "after": after},
    )
    rng = random.Random(7)
    legs = [
        pair.submit(
            random_prompt(rng, rng.randint(1, 16)), SamplingParams(rng.randint(1, 6), ignore_eos=True)
        )
        for _ in range(6)
    ]
    pair.settle()
    return pair, legs


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_failing_call_costs_only_its_own_requests(make_any_pair, side, after):
    pair, _ = pd_scenario(make_any_pair)
    calls = pair.p_runner.calls if side == "p" else pair.d_runner.calls
    assert {name for name, _ in calls} == ({"prefill", "gather"} if side == "p" else {"scatter", "decode"})
    for k, (name, _) in enumerate(calls):
        pair, legs = pd_scenario(make_any_pair, **{f"{side}_fail": {k}}, after=after)
        failed = [(p, d) for p, d in legs if "engine_error" in (p.end, d.end)]
        assert len(failed) == 1 or (name == "decode" and failed), (k, name)
        for p, d in legs:
            if (p, d) not in failed:
                assert_both_right(pair, p, d)
            elif side == "p":
                assert (p.end, d.end) == ("engine_error", "peer_failed") and not d.tokens
            else:
                assert p.end in ("length", "stop") and bool(d.tokens) == (name == "decode")
        for room in (p.room for p, d in failed):
            role = {"p": "prefill", "d": "decode"}[side]
            if name == "decode":
                assert pair.half_state(role, room) == KVPoll.Success
            else:
                assert pair.half_reason(role, room) == "engine_error"
        pair.assert_initial()


@pytest.mark.parametrize("side, call", [
    ("p", "create_sender"), ("p", "admit"), ("p", "send"), ("d", "create_receiver"), ("d", "receive"), ("d", "commit"),
    ("p", "abort"), ("d", "abort"),
])  # fmt: skip
def test_a_manager_call_that_raises_costs_one_request(make_pair, monkeypatch, side, call):
    pair = make_pair()
    manager = pair.p_manager if side == "p" else pair.d_manager
    target = manager if call.startswith("create") else None
    if target is None:
        import sched_fake_manager as fakes

        target = fakes.FakeSender if side == "p" else fakes.FakeReceiver
    real = getattr(target, call)

    def raising(*args, **kwargs):
        room = args[0] if target is manager else args[0].room
        if room == 1:
            raise RuntimeError(call)
        return real(*args, **kwargs)

    monkeypatch.setattr(target, call, raising)
    (p, d), others = pair.submit([1] * 8, LONG), [pair.submit([i] * 8, LONG) for i in (2, 3)]
    if call == "abort":
        pair.steps(1)
        (pair.p if side == "p" else pair.d).abort("r1")
    pair.settle()
    assert (p if side == "p" else d).end == "engine_error"
    for legs in others:
        assert_both_right(pair, *legs)
    assert pair.p.stats()["used_pages"] == pair.d.stats()["used_pages"] == 0


# ---------------------------------------------------------------- cost and wiring


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_step_costs_the_same_however_many_wait(make_pair, side):
    def cost(n):
        pair = make_pair(budget_bytes=1, p_config={"max_queue": 20_000}, d_config={"max_queue": 20_000})
        for i in range(n):
            pair.submit([1 + i % 9] * 4, LONG, sides=side)
        scheduler = pair.p if side == "p" else pair.d
        for _ in range(5):
            scheduler.step()
        assert scheduler.stats()["queued"] >= n - 1
        steady = opcodes(scheduler.step)
        role = {"p": "prefill", "d": "decode"}[side]
        pair.link.post(role, KVEnded(n // 2, 503, "peer_lost", "x"))
        ended = opcodes(scheduler.step)
        assert not scheduler.step() and scheduler.idle()
        return steady, ended

    assert cost(10) == cost(10_000)


def test_the_page_queue_is_not_scanned(make_pair):
    def cost(n):
        pair = make_pair(
            d={"num_pages": 7, "max_batch": 4}, d_config={"max_queue": 20_000}, p_config={"max_queue": 20_000}
        )
        for _ in range(n):
            pair.submit([1] * 4, LONG)
        while pair.p.step():
            pass
        pair.d.step()
        for room in range(1, n + 1):
            half = pair.link.half("prefill", room)
            pair.link.half("decode", room).state = KVPoll.WaitingForInput
            pair.link._ready(room)
            assert half.n_pages == 1
        pair.d.step()
        assert pair.d.stats()["page_queue"] == n - 1
        return opcodes(pair.d.step)

    assert cost(10) == cost(2_000)


def test_wiring(make_pair):
    pair = make_pair()
    assert type(pair.p) is PrefillScheduler and type(pair.d) is DecodeScheduler
    assert pair.p_manager.runner is pair.p_runner and pair.d_manager.runner is pair.d_runner
    with pytest.raises(ConfigError, match="takes no KV manager"):
        make_scheduler("null", pair.p_config, pair.p_runner, pair.clock, pair.p_manager)
    with pytest.raises(ConfigError, match="needs a KV manager"):
        DecodeScheduler(pair.d_config, pair.d_runner, pair.clock)
    request = Request("r", [1], LONG, print, bootstrap_host="10.0.0.1", bootstrap_port=8998)
    assert bootstrap_addr(request) == "10.0.0.1:8998"
    request.bootstrap_port = None
    assert bootstrap_addr(request) == "10.0.0.1"


@pytest.mark.parametrize("seed", range(12))
def test_random_ends_on_both_sides(make_any_pair, seed):
    """Aborts, failing calls and missing legs at random: everything ends once, rightly, and everything is free."""
    rng = random.Random(seed)
    pair = make_any_pair(
        budget_bytes=rng.choice([1, 2000, 1 << 40]),
        p={"num_pages": rng.choice([12, 40]), "fail_at": set(rng.sample(range(40), 3))},
        d={"num_pages": rng.choice([18, 60]), "fail_at": set(rng.sample(range(60), 3))},
    )
    legs = []
    for i in range(25):
        client = random_client(rng, i)
        both = rng.random() < 0.9 or not isinstance(
            pair, RealPair
        )  # a lone leg ends by a timer of the manager
        legs.append(pair.submit(client.prompt, client.sampling, sides="pd" if both else rng.choice("pd")))
        for _ in range(rng.randrange(8)):
            (pair.p if rng.random() < 0.5 else pair.d).step()
            pair.nudge(rng)
        if rng.random() < 0.3:
            (pair.p if rng.random() < 0.5 else pair.d).abort(f"r{rng.randint(1, i + 1)}")
    pair.settle()
    ends = set()
    for p, d in legs:
        for client in filter(None, (p, d)):
            client.assert_prefix(pair.d_config)
            assert client.end
            ends.add(client.end)
        if d is not None and d.end in ("stop", "length"):
            assert_both_right(pair, p, d)
    assert {"abort", "engine_error", "length"} <= ends
    pair.assert_initial()
