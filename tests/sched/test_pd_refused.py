"""A half that refuses a request as wrong: the other half's client gets a 400 too, at once (facts/router §0.7)."""

import pytest
from sched_harness import Client
from sched_real_pair import RealPair

from pdjax.core.errors import PDError
from pdjax.core.pools import request_digest
from pdjax.engine.base import Leg
from pdjax.sched.request import SamplingParams

WRONG, BUSY = ("bad_request", 400), ("queue_full", 503)


def refuse(manager, room, digest, reason):
    with pytest.raises(PDError) as caught:
        manager.refuse(Leg(room, "r", digest, 3, "p.test", None), reason)
    return caught.value.status


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
    began = pair.clock()
    while not client.finals and pair.clock() < began + 1:
        pair.p.step()
        pair.d.step()
        pair.clock.advance(0.001)
        pair.net.run_due()
        pair.p_manager.turn()
        pair.d_manager.turn()
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
