"""Tokens and text: round trips, chat templates, end tokens, and streamed text without half characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.errors import ConfigError
from pdjax.model.tiny import make_tiny_model
from pdjax.model.tokenizer import LONG_WINDOW, ChatError, Tokenizer

TEXTS = [
    "Hello, world",
    " leading",
    "a\n\tb",
    "Grüße, 你好, 👩‍👩‍👧 ☃",
    "1234567890",
    "",
    "�",
    "e\u0301",
    "<|im_x|>",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_dir)


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes a key out."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size == 512 for i in ids)


def test_chat_is_rendered_by_the_models_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
    assert tokenizer.render_chat(messages) == text + "<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == text
    ids = tokenizer.encode_chat(messages)
    assert ids.count(1) == 3 and ids.count(2) == 2, "special tokens are one token each"
    assert tokenizer.decode(ids) == "user\nHi\nassistant\nYes\nassistant\n"


def test_blocks_on_lines_of_their_own_leave_no_blank_lines(tmp_path: Path) -> None:
    """trim_blocks and lstrip_blocks, as every Hugging Face template expects."""
    make_tiny_model(tmp_path)
    template = "{% for m in messages %}\n  {% if m.role %}\n{{ eos_token }}{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert Tokenizer(tmp_path).render_chat([{"role": "user", "content": "a"}]) == "<|im_end|>a\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ 1 // (messages | length - 1) }}", "refuses the messages"),
        ("{{ messages[0].content.index('z') }}", "refuses the messages"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refuses the messages"),
        (None, "no chat template"),
    ],
)
def test_messages_that_do_not_fit_are_the_clients_mistake(
    template: str | None, message: str, tmp_path: Path
) -> None:
    edit(make_tiny_model(tmp_path) / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ChatError, match=message):
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "a"}])


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    edit(make_tiny_model(tmp_path) / "tokenizer_config.json", chat_template=templates)
    assert Tokenizer(tmp_path).render_chat([]) == "yes"


def test_end_tokens_come_from_the_nearest_file(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, eos_token_id=5)
    edit(tmp_path / "generation_config.json", eos_token_id=[7, 9])
    assert Tokenizer(tmp_path).eos_ids == {7, 9}
    edit(tmp_path / "generation_config.json", eos_token_id=None)
    assert Tokenizer(tmp_path).eos_ids == {5}
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path / "config.json", eos_token_id=None)
    assert Tokenizer(tmp_path).eos_ids == {2}, "tokenizer_config.json says <|im_end|>"
    edit(tmp_path / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert Tokenizer(tmp_path).eos_ids == {0}
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    assert Tokenizer(tmp_path).eos_ids == frozenset()


def test_bad_files_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    edit(tmp_path / "config.json", vocab_size=500)
    with pytest.raises(ConfigError, match="has a tokenizer with 512 tokens but the model knows 500"):
        Tokenizer(tmp_path)
    edit(tmp_path / "config.json", vocab_size=600)
    assert Tokenizer(tmp_path).vocab_size == 600, "a padded embedding is common"
    edit(tmp_path / "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(ConfigError, match="chat template is not valid"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    pieces = []
    while ids:
        n = sizes[len(pieces) % len(sizes)] if sizes else 1
        pieces.append(detokenizer.push(ids[:n]))
        ids = ids[n:]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_never_shows_half_a_character(text: str, tokenizer: Tokenizer) -> None:
    """Every prefix of the stream is a prefix of the text, though characters span up to four tokens."""
    pieces = stream(tokenizer, tokenizer.encode(text), [1])
    assert "".join(pieces) == text
    for i in range(len(pieces)):
        assert text.startswith("".join(pieces[:i]))


def test_a_stream_is_not_held_back_longer_than_needed(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([i]) for i in tokenizer.encode("é!")] == ["", "é", "!"]
    assert detokenizer.finish() == ""
    broken = tokenizer.encode("é")[:1]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(broken) for _ in range(3)] == ["", "�", "�"]
    assert detokenizer.push(tokenizer.encode("a")) == "�a"


@pytest.mark.parametrize("text", ["é", "語", "🦖", "\ufffd", "a🦖é"])
@pytest.mark.parametrize("n_bytes", [None, 1])
def test_a_token_costs_the_same_however_long_the_text_is(
    text: str, n_bytes: int | None, tokenizer: Tokenizer
) -> None:
    """Also where each character has several tokens, and where the bytes never make one: each push decodes the window."""
    ids = tokenizer.encode(text)[:n_bytes] * 60
    detokenizer = tokenizer.detokenizer()
    pieces, longest = [], 0
    for token in ids:
        pieces.append(detokenizer.push([token]))
        longest = max(longest, len(detokenizer._window))
    assert "".join([*pieces, detokenizer.finish()]) == tokenizer.decode(ids)
    assert longest <= LONG_WINDOW


@settings(deadline=None)  # a shared machine may stall
@given(
    ids=st.lists(st.integers(0, 511), max_size=80), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5)
)
def test_any_stream_joins_to_the_text_of_all_tokens(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    """Random tokens are mostly broken UTF-8: what is emitted must still be what decode says of the whole."""
    assert "".join(stream(tokenizer, ids, sizes)) == tokenizer.decode(ids)
