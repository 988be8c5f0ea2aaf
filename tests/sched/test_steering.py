"""What options and outputs make of a draw, and that P's first token counts on D like any other."""

from __future__ import annotations

import numpy as np
import pytest
from sched_harness import EOS, MODEL, Client, FlakyRunner, make_null, prompt_starting_with, run_out
from sched_pair import Pair
from sched_real_pair import RealPair

from pdjax.core.errors import PDError
from pdjax.sched.factory import make_scheduler
from pdjax.sched.pages import PageAllocator
from pdjax.sched.radix_cache import RadixCache
from pdjax.sched.request import SamplingParams
from pdjax.sched.scheduler import SchedulerConfig
from pdjax.sched.steering import Steering
from pdjax.sim.ports import VirtualClock

V = MODEL.n_vocab
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


class Alternates:
    """A grammar: even and odd tokens in turn, n of them, then only EOS."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.seen: list[int] = []

    @property
    def complete(self) -> bool:
        return self.left < 0

    def allowed(self) -> np.ndarray:
        bits = np.zeros(64, np.uint8)
        if self.left:
            bits[len(self.seen) % 2 :: 2] = 1
        else:
            bits[EOS] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        if self.left and token % 2 != len(self.seen) % 2:
            raise ValueError(f"token {token} is not allowed here")
        self.seen.append(token)
        self.left -= 1


def steered(sampling: SamplingParams, *said: int, grammar: Alternates | None = None) -> Steering:
    steering = Steering.of(sampling, grammar, {EOS})
    assert steering is not None
    for token in said:
        steering.push(token)
    return steering


def edits(steering: Steering) -> dict[int, tuple[float, float]]:
    """Token → (scale, add)."""
    spec = steering.spec()
    if spec.edits is None:
        return {}
    e = spec.edits
    return {int(t): (float(s), float(a)) for t, s, a in zip(e.ids, e.scale, e.add, strict=True)}


def test_a_plain_request_has_no_steering() -> None:
    assert Steering.of(SamplingParams(temperature=1, top_p=0.5, top_logprobs=3), None, {EOS}) is None


def test_penalties_follow_the_counts() -> None:
    steering = steered(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), 7, 7, 9)
    assert edits(steering) == {7: (1, -1.0), 9: (1, -0.75)}
    steering.push(9)
    assert edits(steering) == {7: (1, -1.0), 9: (1, -1.0)}
    assert edits(steered(SamplingParams(repetition_penalty=1.5), 4)) == {4: (1.5, 0)}
    assert edits(steered(SamplingParams(repetition_penalty=1.5))) == {}


def test_many_tokens_outgrow_the_first_table() -> None:
    said = [t % 50 for t in range(170)]
    got = edits(steered(SamplingParams(frequency_penalty=1.0, logit_bias=((60, 2.0),)), *said))
    assert got == {60: (1, 2.0), **{t: (1, -float(said.count(t))) for t in range(50)}}


def test_ends_are_banned_until_min_new_tokens() -> None:
    how = SamplingParams(min_new_tokens=2, stop_token_ids=frozenset({8}), logit_bias=((8, 5.0), (3, -1.0)))
    assert edits(steered(how)) == {8: (1, -np.inf), 3: (1, -1.0), EOS: (1, -np.inf)}
    assert edits(steered(how, 1)) == edits(steered(how))
    assert edits(steered(how, 1, 1)) == {8: (1, 5.0), 3: (1, -1.0)}
    only = SamplingParams(min_new_tokens=1)
    assert edits(steered(only)) == {EOS: (1, -np.inf)}
    assert steered(only, 1).spec().plain, "once the bans are over the draw is an ordinary one"


def test_a_complete_text_may_end_before_min_new_tokens() -> None:
    """A ban that leaves nothing to draw is void: the grammar knows that the text is whole."""
    how = SamplingParams(min_new_tokens=9, grammar="alternates")
    early = steered(how, 2, 3, grammar=Alternates(3)).spec()
    assert early.edits is not None and early.allowed is not None
    done = steered(how, 2, 3, 4, grammar=Alternates(3)).spec()
    assert done.edits is None and done.allowed[EOS // 32] == 1 << EOS


def test_the_digest_holds_what_decides_the_first_token() -> None:
    base = SamplingParams(temperature=1.0, seed=1)
    others = [
        {"temperature": 0.5},
        {"seed": 2},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"logit_bias": ((1, 2.0),)},
        {"min_new_tokens": 2},
        {"grammar": "x"},
        {"top_logprobs": 2},
    ]
    keys = [SamplingParams(**{"temperature": 1.0, "seed": 1, **o}).first_token_key() for o in [{}, *others]]
    assert len({repr(key) for key in keys}) == len(keys)
    assert base.first_token_key() == keys[0]
    same = SamplingParams(temperature=1.0, seed=1, presence_penalty=1.0, max_new_tokens=3)
    assert same.first_token_key() == keys[0], "nothing has been said yet: penalties decide nothing"
    assert SamplingParams(seed=1, top_p=0.5).first_token_key() == SamplingParams().first_token_key(), "greedy"


OPTIONS = {
    "penalties": SamplingParams(12, ignore_eos=True, presence_penalty=2.0, frequency_penalty=0.5),
    "bias": SamplingParams(8, logit_bias=((11, 9.5), (12, 20.0)), ignore_eos=True),
    "min_new_tokens": SamplingParams(12, min_new_tokens=3, logit_bias=((EOS, 99.0),)),
    "min_1": SamplingParams(12, min_new_tokens=1, logit_bias=((EOS, 99.0),)),
    "eos_at_once": SamplingParams(12, logit_bias=((EOS, 99.0),)),
    "stop_id_at_once": SamplingParams(12, logit_bias=((9, 99.0),), stop_token_ids=frozenset({9})),
    "eos_ignored": SamplingParams(4, logit_bias=((EOS, 99.0),), ignore_eos=True),
    "top": SamplingParams(5, ignore_eos=True, top_logprobs=4),
    "seeded": SamplingParams(6, ignore_eos=True, temperature=1.0, seed=77, top_p=0.9, frequency_penalty=1.0),
}


def run_both(pair_class: type[Pair], client: Client, make) -> tuple[Client, Client, Client]:
    """The same request on one server and on a pair: (plain, P's leg, D's leg)."""
    make(client)
    plain = make_null()
    plain.submit(client.req)
    run_out(plain)
    pair = pair_class()
    p, d = pair.submit(client.prompt, client.sampling, prepare=make)
    pair.settle()
    pair.assert_initial()
    return client, p, d


@pytest.mark.parametrize("pair_class", [Pair, RealPair])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_pair_answers_as_one_server(name: str, pair_class: type[Pair]) -> None:
    client, p, d = run_both(pair_class, Client([3, 1, 4, 1, 5, 9, 2, 6, 5], OPTIONS[name]), lambda c: None)
    assert d.tokens == client.tokens and p.tokens == client.tokens[:1]
    assert d.finals[0].finish == client.finals[0].finish
    for field in ("logprobs", "tops"):
        assert [getattr(o, field) for o in d.outputs] == [getattr(o, field) for o in client.outputs]
    if name in ("eos_at_once", "stop_id_at_once"):
        assert len(d.tokens) == 1 and d.end == "stop"
    if name == "min_new_tokens":
        assert len(d.tokens) == 4 and EOS not in d.tokens[:3]
    if name == "min_1":
        assert len(d.tokens) == 2
    if name == "penalties":
        assert len(set(d.tokens)) == 12, "a token that was said is never the likeliest again"
    if name == "top":
        assert all(
            len(top) == 4 and top[0][0] == t
            for o in d.outputs
            for t, top in zip(o.token_ids, o.tops, strict=True)
        )


@pytest.mark.parametrize("pair_class", [Pair, RealPair])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_the_grammar_goes_on_where_the_first_token_left_it(n: int, pair_class: type[Pair]) -> None:
    def with_grammar(client: Client) -> None:
        client.req.grammar = Alternates(n)

    how = SamplingParams(20, grammar=f"alternates {n}")
    client, _, d = run_both(pair_class, Client([3, 1, 4, 1, 5], how), with_grammar)
    assert d.tokens == client.tokens and len(d.tokens) == n + 1
    assert d.end == "stop" and d.finals[0].finish.matched == EOS == d.tokens[-1]
    assert all(t % 2 == i % 2 for i, t in enumerate(d.tokens[:-1]))


def test_a_grammar_that_is_over_ends_the_request() -> None:
    """With ignore_eos nothing else would: no token is allowed any more."""
    client = Client([3, 1, 4], SamplingParams(20, ignore_eos=True, grammar="x"))
    client.req.grammar = Alternates(2)
    plain = make_null()
    plain.submit(client.req)
    run_out(plain)
    assert len(client.tokens) == 3 and client.finals[0].finish.matched == EOS


def test_a_token_that_the_grammar_forbids_ends_its_request_alone() -> None:
    """It can only be a mistake of ours: that request fails, its neighbour goes on (S11)."""

    class Wrong(Alternates):
        def accept(self, token: int) -> None:
            raise ValueError("not allowed here")

    bad, good = Client([3, 1, 4], SamplingParams(5, grammar="x"), "a"), Client([1, 1, 4], GREEDY, "b")
    bad.req.grammar = Wrong(9)
    plain = make_null()
    for client in (bad, good):
        plain.submit(client.req)
    run_out(plain)
    assert bad.end == "engine_error" and good.end == "length"
    assert plain.counts["engine_errors"] == 1 and plain.cache.available_pages() == 39

    pair = Pair()
    p, d = pair.submit(bad.prompt, bad.sampling, prepare=lambda c: setattr(c.req, "grammar", Wrong(9)))
    pair.settle()
    assert p.end == "engine_error" and d.end != "" and d.tokens == []
    pair.assert_initial()


class Stuck(Alternates):
    """Cannot go on after n tokens: the library gives up on a schema that is too ambiguous."""

    def allowed(self) -> np.ndarray:
        if not self.left:
            raise PDError("simplify the schema", reason="bad_request", status=400)
        return super().allowed()


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(n: int) -> None:
    """Also before the first token: neither the loop nor a neighbour in the batch hears of it (S11)."""
    bad, good = Client([3, 1, 4], SamplingParams(9, grammar="x"), "a"), Client([1, 1, 4], GREEDY, "b")
    bad.req.grammar = Stuck(n)
    plain = make_null()
    for client in (bad, good):
        plain.submit(client.req)
    run_out(plain)
    assert bad.end == "bad_request" and bad.finals[0].failure.status == 400 and len(bad.tokens) == n
    assert good.end == "length" and good.tokens == good.right_tokens(plain.config)
    assert plain.counts["engine_errors"] == 0 and plain.cache.available_pages() == 39

    pair = RealPair()
    p, d = pair.submit(bad.prompt, bad.sampling, prepare=lambda c: setattr(c.req, "grammar", Stuck(n)))
    pair.settle()
    assert len(d.tokens) == n and d.finals[0].failure.status == 400
    assert p.end == ("bad_request" if not n else "length")
    pair.assert_initial()


@pytest.mark.parametrize("pair_class", [Pair, RealPair])
def test_a_stop_text_that_the_first_token_completes_costs_no_decode_step(pair_class: type[Pair]) -> None:
    start = prompt_starting_with(9, 6)

    def watched(client: Client) -> None:
        client.req.find_stop = lambda token: "nine" if token == 9 else None

    client, p, d = run_both(pair_class, Client(start, SamplingParams(20)), watched)
    assert client.tokens == p.tokens == d.tokens == [9]
    assert {c.finals[0].finish.matched for c in (client, p, d)} == {"nine"}


@pytest.mark.parametrize("cached_from", [None, 0, 5, 8, 9])
def test_scores_of_the_prompt_come_with_the_first_token(cached_from: int | None) -> None:
    """From every start, through chunks of 7: one entry for each token after it; P knows them, D says nothing."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    how = SamplingParams(3, ignore_eos=True, prompt_logprobs_from=cached_from, top_logprobs=2)
    client, p, d = run_both(Pair, Client(prompt, how), lambda c: None)
    expected = [] if cached_from is None else prompt[cached_from + 1 :]
    for leg in (client, p):
        assert [s.token for s in leg.outputs[0].prompt] == expected
        assert all(len(s.top) == 2 for s in leg.outputs[0].prompt)
        assert not any(output.prompt for output in leg.outputs[1:])
    assert p.outputs[0].prompt == client.outputs[0].prompt
    assert not any(output.prompt for output in d.outputs)


def test_a_prompt_that_is_scored_is_not_taken_from_the_cache() -> None:
    """What comes from the cache was computed for another request: it has no logits any more."""
    runner = FlakyRunner(num_pages=40, max_batch=4)
    config = SchedulerConfig(context_length=64, eos_ids=frozenset({EOS}), chunked_prefill_size=7)
    cache = RadixCache(PageAllocator(runner.num_pages), runner.page_size)
    plain = make_scheduler("null", config, runner, VirtualClock(), cache=cache)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    for start, cached in ((None, 0), (None, 8), (5, 4), (0, 0), (11, 8)):
        how = SamplingParams(2, ignore_eos=True, prompt_logprobs_from=start)
        client = Client(prompt, how)
        plain.submit(client.req)
        run_out(plain)
        assert client.req.cached_tokens == cached
        assert len(client.outputs[0].prompt) == (0 if start is None else 11 - start)
