"""Text to tokens and back: tokenizer.json, the model's chat template, and an incremental detokenizer.

Templates are untrusted text that comes with a model: they run in a sandbox. A piece of streamed text must never hold
half a character. Must never import JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HFTokenizer

from pdjax.core.errors import ConfigError
from pdjax.model.config import read_config, read_json
from pdjax.model.gguf_header import read_header
from pdjax.model.gguf_model import gguf_config
from pdjax.model.gguf_tokenizer import eos_ids, make_tokenizer, tokenizer_settings
from pdjax.model.grammar import JsonGrammar, JsonGrammars

# What a template's own expressions can come to with messages that it was not made for: divisions, look-ups, recursion.
TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    RecursionError,
)
REPLACEMENT = "�"  # what a decoder writes for bytes that are no character (yet)
# Tokens of context that a detokenizer keeps: a character has at most four bytes, and as many tokens.
MIN_CONTEXT, MAX_CONTEXT = 2, 8
LONG_WINDOW = 16  # tokens that end in half a character: more are no text, but broken bytes


@dataclass(frozen=True)
class Parts:
    """What a tokenizer is made of, wherever it was read from. settings: as in tokenizer_config.json."""

    tokenizer: HFTokenizer
    vocab_size: int
    eos_ids: frozenset[int]
    settings: dict[str, Any]
    template: str | None


class ChatError(ValueError):
    """The messages do not fit the chat template: the client's mistake (400)."""


class Tokenizer:
    """Tokens of one model directory or GGUF file. Thread-safe: nothing changes after the constructor.

    eos_ids: tokens that end a generation. vocab_size: the model's; ids at or above it do not exist.
    """

    def __init__(self, path: Path) -> None:
        parts = _parts_of_file(path) if path.is_file() else _parts_of_directory(path)
        self._hf, self.vocab_size, self.eos_ids, settings = (
            parts.tokenizer,
            parts.vocab_size,
            parts.eos_ids,
            parts.settings,
        )
        if self._hf.get_vocab_size() > self.vocab_size:
            raise ConfigError(
                f"{path} has a tokenizer with {self._hf.get_vocab_size()} tokens but the model knows "
                f"{self.vocab_size}: tokenizer and weights do not belong together"
            )
        self._grammars = JsonGrammars(self._hf.to_str, self.vocab_size, self.eos_ids)
        self._special = {
            name: _token_text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)
        }
        self._template = _compile(parts.template, path)

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw prompt, with whatever the tokenizer itself puts around a text (often nothing)."""
        return list(self._hf.encode(text).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens, special ones left out unless they are asked for."""
        return str(self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a conversation, ready for the assistant's turn. Raises ChatError.

        messages: mappings with role and content. variables: further names that the template may use, as tools.
        """
        if self._template is None:
            raise ChatError("the model has no chat template: use the completion endpoint")
        values = {"messages": messages, "add_generation_prompt": True, **self._special, **variables}
        try:
            return str(self._template.render(**values))
        except TEMPLATE_ERRORS as error:
            raise ChatError(f"the chat template refuses the messages: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Tokens of ``render_chat``. The template writes every special token itself, so none is added."""
        return list(self._hf.encode(self.render_chat(messages, **variables), add_special_tokens=False).ids)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self, skip_special_tokens)

    def json_grammar(self, schema: str) -> JsonGrammar:
        """What a text that follows the JSON schema may look like, token by token. Raises grammar.GrammarError."""
        return self._grammars.compile(schema)


class Detokenizer:
    """Text of one growing token sequence, in pieces that join to exactly ``decode`` of the whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window: list[int] = []  # tokens whose text may still change, after context for the decoder
        self._emitted = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """The characters that these tokens complete. A last character that may be half is held back."""
        self._window += ids
        text = self._decode(self._window)
        # Only the last one can be an unfinished character: a decoder writes one mark for each broken sequence.
        held = int(text.endswith(REPLACEMENT))
        piece = self._emit(text, len(text) - held)
        if not held or len(self._window) > LONG_WINDOW:
            self._shorten(text, held)
        return piece

    def _shorten(self, text: str, held: int) -> None:
        """Keep the last tokens as context, since some decoders drop a leading space at the start of a text.

        They must not begin within a character, and in some languages each one has several tokens: a window that only
        grows would make every token cost as much as the whole text.
        """
        for n in range(MIN_CONTEXT, min(MAX_CONTEXT, len(self._window)) + 1):
            context = self._window[-n:]
            kept = self._decode(context)
            # Broken bytes of their own, if both parts say as much as the whole does.
            if not kept.startswith(REPLACEMENT) or self._decode(self._window[:-n]) + kept == text:
                self._window, self._emitted = context, len(kept) - held
                return

    def finish(self) -> str:
        """What was held back, at the end of the sequence."""
        text = self._decode(self._window)
        return self._emit(text, len(text))

    def _emit(self, text: str, stop: int) -> str:
        piece = text[self._emitted : stop]
        self._emitted = max(self._emitted, stop)
        return piece


def _parts_of_directory(directory: Path) -> Parts:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{path} is missing: give a directory with a tokenizer")
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} cannot be read: {error}") from None
    settings = _optional(directory / "tokenizer_config.json")
    return Parts(
        tokenizer,
        read_config(directory).vocab_size,
        _eos(tokenizer, directory, settings),
        settings,
        _template_text(directory, settings),
    )


def _parts_of_file(path: Path) -> Parts:
    """From a GGUF file: its header holds all of it."""
    header = read_header(path)
    cfg, _ = gguf_config(header, path)
    settings = tokenizer_settings(header.fields)
    ends = frozenset(eos_ids(header.fields))
    return Parts(
        make_tokenizer(header.fields, path), cfg.vocab_size, ends, settings, settings["chat_template"]
    )


def _eos(tokenizer: HFTokenizer, directory: Path, settings: dict[str, Any]) -> frozenset[int]:
    """From generation_config.json, else config.json, else the eos token of tokenizer_config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = _optional(directory / name).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    eos = tokenizer.token_to_id(_token_text(settings["eos_token"])) if settings.get("eos_token") else None
    return frozenset() if eos is None else frozenset([eos])


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(token: Any) -> str:
    """A special token is written as text or as an object with content."""
    return str(token["content"] if isinstance(token, dict) else token)


def _template_text(directory: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja (transformers 5), else tokenizer_config.json, where a list has names."""
    separate = directory / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return next((str(t["template"]) for t in template if t.get("name") == "default"), None)
    return template


def _compile(text: str | None, directory: Path) -> Any:
    if text is None:
        return None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # Nothing is computed while it is compiled: a constant such as 'a' * 10**10 would take all memory at the start.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_as_it_is
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except (TemplateError, SyntaxError, RecursionError, ValueError) as error:
        raise ConfigError(f"{directory}: the chat template is not valid: {error}") from None


@pass_context
def _as_it_is(context: Any, value: Any) -> Any:
    """Of what a template writes; since it takes a context, Jinja cannot call it for constants at compile time."""
    return value
