"""A half that refuses a request as wrong: the other half's client gets a 400 too, at once (facts/router §0.7)."""

import pytest
from sched_harness import Client
from sched_real_pair import RealPair

from pdjax.core.errors import PDError
from pdjax.core.pools import request_digest
from pdjax.engine.base import Leg
from pdjax.sched.request import SamplingParams

ABORTED = ("client_abort", 499)
WRONG, BUSY = ("bad_request", 400), ("queue_full", 503)


def refuse(manager, room, digest, reason):
    with pytest.raises(PDError) as caught:
        manager.refuse(Leg(room, "r", digest, 3, "p.test", None), reason)
    return caught.value.status


def let_pass(pair, seconds):
    """Shorter than any timer that would end a room."""
    until = pair.clock() + seconds
    while pair.clock() < until:
        pair.p.step()
        pair.d.step()
        pair.clock.advance(0.001)
        pair.net.run_due()
        pair.p_manager.turn()
        pair.d_manager.turn()


@pytest.mark.parametrize("first", ["refusal", "leg"])
@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize(("reason", "status"), [WRONG, BUSY])
def test_the_other_half_ends_at_once_with_the_same_status(side, first, reason, status):
    pair = RealPair()
    prompt, sampling = [9, 8, 7], SamplingParams(4, ignore_eos=True)
    refusing, other = (pair.p_manager, "d") if side == "p" else (pair.d_manager, "p")
    digest = request_digest(prompt, sampling.first_token_key())
    pair.p.pause(True, lambda: None)  # a prefill that is over sooner has ended P's leg well
    if first == "refusal":
        assert refuse(refusing, 1, digest, reason) == status
    client = pair.submit(prompt, sampling, sides=other, room=1)["pd".index(other)]
    if first == "leg":
        assert refuse(refusing, 1, digest, reason) == status
    let_pass(pair, 1.0)
    assert client.finals and client.finals[0].failure.status == status, client.outputs
    pair.p.pause(False, lambda: None)
    pair.settle()
    pair.assert_initial()


def test_a_refusal_of_p_that_knows_no_digest_ends_any_d_of_the_room():
    """As the HTTP layer refuses a body that it cannot make a prompt of."""
    pair = RealPair()
    assert refuse(pair.p_manager, 1, "", "bad_request") == 400
    _, d = pair.submit([9, 8, 7], SamplingParams(4), sides="d", room=1)
    pair.settle()
    assert isinstance(d, Client) and d.finals[0].failure.status == 400


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize(("reason", "status"), [ABORTED, ("draining", 503)])
def test_what_the_other_half_hears_of_an_abort(side, reason, status):
    """A client's abort ends both as aborted; a process that leaves fails the other half, which may be tried again."""
    pair = RealPair()
    pair.p.pause(True, lambda: None)
    p, d = pair.submit([9, 8, 7], SamplingParams(4))
    let_pass(pair, 0.2)
    scheduler, other = (pair.p, d) if side == "p" else (pair.d, p)
    scheduler.abort_all(reason)
    let_pass(pair, 0.5)
    assert other.finals[0].failure.status == status
    pair.p.pause(False, lambda: None)
    pair.settle()
    pair.assert_initial()


@pytest.mark.parametrize(("reason", "status"), [ABORTED, ("draining", 503)])
def test_a_leg_that_comes_after_ds_end_hears_why(reason, status):
    """Aborted, it is not tried again; a D that leaves is told from one whose client has left."""
    pair = RealPair()
    prompt, sampling = [9, 8, 7], SamplingParams(4)
    pair.submit(prompt, sampling, sides="d", room=1)
    let_pass(pair, 0.2)
    pair.d.abort_all(reason)
    let_pass(pair, 0.5)
    with pytest.raises(PDError) as caught:
        pair.submit(prompt, sampling, sides="p", room=1)
    assert (caught.value.status, caught.value.reason) == (status, reason)


@pytest.mark.parametrize(("reason", "status"), [WRONG, BUSY])
def test_a_leg_that_comes_after_ds_refusal_gets_the_same_status(reason, status):
    pair = RealPair()
    prompt, sampling = [9, 8, 7], SamplingParams(4)
    refuse(pair.d_manager, 1, request_digest(prompt, sampling.first_token_key()), reason)
    let_pass(pair, 0.5)
    with pytest.raises(PDError) as caught:
        pair.submit(prompt, sampling, sides="p", room=1)
    assert caught.value.status == status
