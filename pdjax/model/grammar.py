"""Texts that must follow a JSON schema, through llguidance (the extra "grammar").

A matcher says which tokens may come next and moves with every token. Must never be shared between two requests, and
never be needed by a server whose clients send no schema: the library is imported at the first one.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from pdjax.core.errors import PDError

MAX_COMPILED = 64  # schemas kept compiled, the least recently used one goes
# Between two parts of the text: nothing, a space, or a new line with an indent. Small models write spaces without end
# where that is allowed.
WHITESPACE = r"( |\n[ \t]{0,8})?"


class GrammarError(ValueError):
    """The schema cannot be followed, or nothing is installed that could: the message is for the client (400)."""


class JsonGrammar:
    """sched.request.Grammar over one llguidance matcher, of a vocabulary that fits in n_words.

    The library gives up on a text whose schema is too ambiguous: that is the schema's fault, so a PDError with
    status 400, which no router tries again.
    """

    def __init__(self, matcher: Any, n_words: int) -> None:
        self._matcher = matcher
        self._n_words = n_words
        self._mask: np.ndarray | None = None  # what was last said to be allowed here

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self) -> np.ndarray:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._n_words]  # it adds one
        if self._matcher.is_error() or not words.any():
            raise self._gave_up()
        self._mask = words
        return words

    def accept(self, token: int) -> None:
        mask, self._mask = self._mask, None
        if self._matcher.consume_token(token):
            return
        if mask is not None and mask[token // 32] >> (token % 32) & 1:
            raise self._gave_up()
        raise ValueError(f"the grammar does not allow this token: {_first_line(self._matcher)}")

    def _gave_up(self) -> PDError:
        why = _first_line(self._matcher) or "nothing may follow"
        return PDError(
            f"the JSON schema allows too many readings of the text, or none: simplify it ({why})",
            reason="bad_request",
            status=400,
        )


class JsonGrammars:
    """Compiles schemas for one tokenizer. From any thread.

    tokenizer_json: the content of tokenizer.json, read when the first schema comes. vocab_size: of the model's logits.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, schema: str) -> JsonGrammar:
        """A fresh grammar for one request. schema: a JSON schema as text. Raises GrammarError."""
        with self._lock:
            matcher = self._compiled.get(schema)
            if matcher is None:
                matcher = self._compiled[schema] = self._build(schema)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(schema)
            return JsonGrammar(matcher.deep_copy(), -(-self._vocab_size // 32))

    def _build(self, schema: str) -> Any:
        try:
            import llguidance
        except ImportError:
            raise GrammarError(
                "this server cannot follow a schema: install it with the extra, pdjax[grammar]"
            ) from None
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(
                self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids)
            )
        try:
            is_object = isinstance(json.loads(schema), dict)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"is no JSON: {error}") from None
        if not is_object:
            raise GrammarError("must be an object: a JSON schema")
        options: Any = {"whitespace_pattern": WHITESPACE}
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:  # nested too deeply
            raise GrammarError(f"cannot be followed: {error}") from None
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"cannot be followed: {_first_line(matcher)}")
        try:  # some schemas compile and still have no first token, as one that is only a reference to itself
            JsonGrammar(matcher.deep_copy(), -(-self._vocab_size // 32)).allowed()
        except PDError as error:
            raise GrammarError(error.message) from None
        return matcher


def _first_line(matcher: Any) -> str:
    """What went wrong. The lines after it hold the text so far: never for a log."""
    return str(matcher.get_error()).split("\n")[0]
