"""The demo's own judgement: it must be able to say no."""

import pytest
from rich.console import Console
from serve_fakes import failed, text_outputs

from pdjax.sched.request import Output
from pdjax.serve.demo import ask, compare


def addresses(pair, plain):
    return {"router": pair.url, "plain-0": plain.url}


def test_equal_answers_are_equal_and_the_table_is_shown(serve):
    console = Console(record=True, width=100)
    assert compare(console, addresses(serve(), serve()), "Why?")
    text = console.export_text()
    assert "hello" in text and "tokens per second" in text and "same answer of 6 tokens" in text


@pytest.mark.parametrize(
    "outputs", [text_outputs("hellO"), text_outputs("hello", "length"), text_outputs("")]
)
def test_another_text_length_or_end_is_different(serve, outputs):
    console = Console(record=True, width=100)
    assert not compare(console, addresses(serve(), serve(script=lambda r: outputs)), "Why?")
    assert "different" in console.export_text()


def test_two_empty_answers_prove_nothing(serve):
    empty = [serve(script=lambda r: [Output((), finish=text_outputs("x")[-1].finish)]) for _ in range(2)]
    assert not compare(Console(record=True), addresses(*empty), "Why?")


def test_a_failed_answer_is_an_error(serve):
    for script in (lambda r: failed(503), lambda r: [Output((65,)), *failed(503)]):
        with pytest.raises(ConnectionError, match="peer_lost"):
            ask(serve(script=script).url, "Why?", lambda piece: None)


def test_a_refused_question_is_an_error(serve):
    with pytest.raises(ConnectionError, match="400"):
        ask(serve().url, "x" * 1000, lambda piece: None)
