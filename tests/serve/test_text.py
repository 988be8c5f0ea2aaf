"""Stop strings: the token that completes one ends the request, and no stream shows a part of it."""

from __future__ import annotations

import itertools
import random

import pytest
from serve_fakes import EOS, ByteTokenizer

from pdjax.sched.request import Finish
from pdjax.serve.text import StopFinder, TextOptions, TextOut

TOKENIZER = ByteTokenizer()


def found(text: str, *stop: str) -> tuple[int, str] | None:
    """How many tokens (bytes) were needed, and which string it was."""
    finder = StopFinder(TOKENIZER.detokenizer(), stop)
    for n, token in enumerate(text.encode(), 1):
        if (match := finder(token)) is not None:
            return n, match
    return None


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world", ["lo w"], (7, "lo w")),
        ("hello", ["help"], None),
        ("aab", ["ab"], (3, "ab")),
        ("abcd", ["cd", "bc"], (3, "bc")),
        ("x", ["x"], (1, "x")),
        ("aéb", ["é"], (3, "é")),
        ("ababac", ["abac"], (6, "abac")),
    ],
)
def test_the_token_that_completes_a_stop_string_is_known(text, stop, expected):
    assert found(text, *stop) == expected


def test_of_two_that_one_token_completes_the_leftmost_counts():
    class Whole(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            return "".join({1: "say ", 2: "one and two"}[i] for i in ids)

    finder = StopFinder(Whole().detokenizer(), ["two", "one"])
    assert finder(1) is None and finder(2) == "one"


def test_the_search_agrees_with_a_plain_one():
    rng = random.Random(4)
    for _ in range(400):
        text = "".join(rng.choice("ab") for _ in range(12))
        stop = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        ends = [n for n in range(1, 13) if any(s in text[:n] for s in stop)]
        got = found(text, *stop)
        assert (got[0] if got else None) == (ends[0] if ends else None), (text, stop)


def stream(text: str, options: TextOptions, finish: Finish, cuts=()) -> list[str]:
    """Pieces of a text that comes in tokens of a byte, or in outputs cut at these bytes."""
    out = TextOut(TOKENIZER.detokenizer(), options)
    ids = [*text.encode()] + ([EOS] if finish.matched == EOS else [])
    edges = [0, *(cuts or range(1, len(ids))), len(ids)]
    pieces = []
    for a, b in itertools.pairwise(edges):
        last = b == len(ids)
        pieces.append(out.push(ids[a:b], finish if last else None, last))
    assert out.text == "".join(pieces)
    return pieces


def test_a_stream_holds_back_what_may_become_a_stop_string():
    options = TextOptions(stop=("lo w", "xyz"))
    assert stream("hello w", options, Finish("stop", matched="lo w")) == ["h", "e", "", "l", "", "", ""]
    assert stream("hello!", options, Finish("length")) == ["h", "e", "", "l", "", "lo!"]
    assert stream("hexy", options, Finish("length")) == ["h", "e", "", "xy"]


@pytest.mark.parametrize(
    ("options", "finish", "expected"),
    [
        (TextOptions(stop=("lo",)), Finish("stop", matched="lo"), "hel"),
        (TextOptions(stop=("lo",), no_stop_trim=True), Finish("stop", matched="lo"), "hello"),
        (TextOptions(), Finish("stop", matched=EOS), "hello"),
        (TextOptions(skip_special_tokens=False), Finish("stop", matched=EOS), "hello"),
        (TextOptions(no_stop_trim=True), Finish("stop", matched=EOS), "hello"),
        (
            TextOptions(no_stop_trim=True, skip_special_tokens=False),
            Finish("stop", matched=EOS),
            "hello<eos>",
        ),
        (TextOptions(), Finish("stop", matched=ord("o")), "hell"),
        (TextOptions(no_stop_trim=True), Finish("stop", matched=ord("o")), "hello"),
        (TextOptions(stop=("lo",)), Finish("abort"), "hello"),
        (TextOptions(stop=("lo",)), Finish("stop", matched=None), "hello"),
    ],
    ids=str,
)
def test_what_ended_the_text_is_cut_off_unless_it_is_to_stay(options, finish, expected):
    text = "hello"
    if finish.matched == "lo" and not options.no_stop_trim:
        expected = "hel"
    tokenizer = TOKENIZER.detokenizer(options.skip_special_tokens)
    out = TextOut(tokenizer, options)
    ids = [*text.encode()] + ([EOS] if finish.matched == EOS else [])
    for token in ids[:-1]:
        out.push([token], None, False)
    out.push(ids[-1:], finish, True)
    assert out.text == expected


def test_pieces_join_to_the_cut_text_however_the_outputs_are_cut():
    rng = random.Random(5)
    options = TextOptions(stop=("abé", "ba"))
    for _ in range(300):
        text = "".join(rng.choice("abé ") for _ in range(14))
        got = found(text, *options.stop)
        ids = text.encode()[: got[0]] if got else text.encode()
        said = ids.decode(errors="replace")
        finish = Finish("stop", matched=got[1]) if got else Finish("length")
        cuts = sorted(rng.sample(range(1, len(ids)), min(4, len(ids) - 1))) if len(ids) > 1 else []
        pieces = stream(said, options, finish, cuts)
        assert "".join(pieces) == (said[: said.index(got[1])] if got else said)
