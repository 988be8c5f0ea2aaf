"""Texts that a grammar allows are JSON of the schema, and what it cannot do is said to the client."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pdjax.core.errors import PDError
from pdjax.model.grammar import MAX_COMPILED, GrammarError, JsonGrammar, JsonGrammars
from pdjax.model.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "n": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_dir)


def tokens_of(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def write(grammar: JsonGrammar, seed: int) -> list[int]:
    """A text drawn at random from what is allowed."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    while not grammar.complete and len(out) < 200:
        out.append(int(rng.choice(tokens_of(grammar.allowed()))))
        grammar.accept(out[-1])
    return out


def test_every_text_that_is_allowed_follows_the_schema(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.decode(write(tokenizer.json_grammar(json.dumps(SCHEMA)), seed)) for seed in range(20)]
    for text in texts:
        value = json.loads(text)
        assert value["name"] in ("ann", "bob") and 0 <= value["n"] <= 9 and len(value) == 2
    assert len(set(texts)) > 5


def test_the_mask_covers_exactly_the_vocabulary(tokenizer: Tokenizer) -> None:
    words = tokenizer.json_grammar('{"type": "integer"}').allowed()
    assert words.dtype == np.uint32 and words.shape == (512 // 32,)
    first = {tokenizer.decode([t]) for t in tokens_of(words)}
    assert {"-", "0", "7"} <= first and not {"{", "a"} & first

    odd = JsonGrammars(tokenizer._hf.to_str, 513, tokenizer.eos_ids).compile('{"type": "integer"}')
    assert odd.allowed().shape == (17,)


def test_the_end_of_a_text_is_the_eos_token_where_more_could_follow(tokenizer: Tokenizer) -> None:
    grammar = tokenizer.json_grammar('{"type": "integer"}')
    [eos] = tokenizer.eos_ids
    assert eos not in tokens_of(grammar.allowed())
    for token in tokenizer.encode("12"):
        grammar.accept(token)
    assert eos in tokens_of(grammar.allowed()) and not grammar.complete
    grammar.accept(eos)
    assert grammar.complete


def test_requests_do_not_share_a_state(tokenizer: Tokenizer) -> None:
    one, other = (tokenizer.json_grammar('{"const": 1}') for _ in range(2))
    one.accept(tokenizer.encode("1")[0])
    assert one.complete and not other.complete


def test_a_token_that_is_not_allowed_is_refused_without_the_text(tokenizer: Tokenizer) -> None:
    grammar = tokenizer.json_grammar('{"const": "secret"}')
    with pytest.raises(ValueError, match="does not allow this token") as caught:
        grammar.accept(tokenizer.encode("{")[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("no json", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "must be an object"),
        ('{"items":' * 300 + "{}" + "}" * 300, "recursion limit"),
        ('{"type": "nope"}', "nope"),
        ('{"$ref": "http://nowhere/x"}', "http://nowhere/x"),
        ('{"$ref": "#"}', "simplify"),  # compiles, and has no first token
    ],
)
def test_a_schema_that_cannot_be_followed_says_why(schema: str, why: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match=why):
        tokenizer.json_grammar(schema)


def test_a_text_that_the_library_gives_up_on_is_the_schemas_fault(tokenizer: Tokenizer) -> None:
    """Too many readings at once: it says so at a token that it has just allowed."""
    lists = [{"type": "array", "minItems": i, "items": {"type": "integer"}} for i in range(1000)]
    grammar = tokenizer.json_grammar(json.dumps({"anyOf": lists}))
    with pytest.raises(PDError, match="simplify it") as caught:
        for token in tokenizer.encode("[1, 2, 3, 4]"):
            grammar.allowed()
            grammar.accept(token)
    assert (caught.value.status, caught.value.reason) == (400, "bad_request")
    assert "\n" not in caught.value.message


def test_compiled_schemas_are_kept_but_not_all_of_them(tokenizer: Tokenizer) -> None:
    for i in range(MAX_COMPILED + 1):
        tokenizer.json_grammar(json.dumps({"const": i}))
    kept = tokenizer._grammars._compiled
    assert len(kept) == MAX_COMPILED and '{"const": 0}' not in kept


def test_without_the_library_the_message_names_the_extra(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pdjax\[grammar\]"):
        tokenizer.json_grammar("{}")


def test_special_tokens_are_text_only_when_asked_for(tokenizer: Tokenizer) -> None:
    [eos] = tokenizer.eos_ids
    ids = [*tokenizer.encode("ab"), eos]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<|im_end|>"
    shown = tokenizer.detokenizer(skip_special_tokens=False)
    assert shown.push(ids) + shown.finish() == "ab<|im_end|>"
