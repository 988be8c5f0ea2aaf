"""What one request's options and its own outputs make of the model's distribution, as the SampleSpec of its next token.

P asks for the first token, D for the rest, a server without PD for all: each feeds every output token in, D the first
one too although it did not draw it, so that counts and grammar are where they would be on one server. Must never
import JAX or look at a logit.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

import numpy as np

from pdjax.engine.ports import Edits, SampleSpec
from pdjax.sched.request import Grammar, SamplingParams

FIRST_ROOM = 16  # entries of the table of edits at the start; it doubles


def base_spec(sampling: SamplingParams) -> SampleSpec:
    """The part of a request's SampleSpec that no output changes."""
    return SampleSpec(
        temperature=sampling.temperature,
        seed=sampling.seed,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        n_top=sampling.top_logprobs,
    )


class Steering:
    """Biases, bans until min_new_tokens, penalties and the grammar of one request.

    Penalties look at output tokens alone, as sglang's do: a prompt costs nothing. Raises ValueError from ``push``
    when a token is not what the grammar allows.
    """

    def __init__(self, sampling: SamplingParams, grammar: Grammar | None, eos_ids: Set[int]) -> None:
        self._sampling = sampling
        self._grammar = grammar
        self._base = base_spec(sampling)
        self._ends = frozenset(eos_ids) | sampling.stop_token_ids if sampling.min_new_tokens else frozenset()
        self._said = 0
        self._penalises = sampling.penalises
        self._place: dict[int, int] = {}  # token → its row in the table
        self._ids = np.zeros(FIRST_ROOM, np.int32)
        self._bias = np.zeros(FIRST_ROOM, np.float32)
        self._counts = np.zeros(FIRST_ROOM, np.float32)
        for token, bias in sampling.logit_bias:
            row = self._row(token)  # first: the tables may grow
            self._bias[row] = bias

    @staticmethod
    def of(sampling: SamplingParams, grammar: Grammar | None, eos_ids: Set[int]) -> Steering | None:
        """None for a request whose every token is drawn alike: it needs no memory of its own."""
        steers = grammar is not None or sampling.follows_output or sampling.logit_bias
        return Steering(sampling, grammar, eos_ids) if steers else None

    @property
    def complete(self) -> bool:
        """The grammar allows no further token."""
        return self._grammar is not None and self._grammar.complete

    def push(self, token: int) -> None:
        """An output token that did not end the request."""
        self._said += 1
        if self._penalises:
            row = self._row(token)
            self._counts[row] += 1
        if self._grammar is not None:
            self._grammar.accept(token)

    def spec(self) -> SampleSpec:
        """How the next token is to be drawn."""
        allowed = None if self._grammar is None else self._grammar.allowed()
        banned = self._ends if self._said < self._sampling.min_new_tokens else frozenset()
        if banned and allowed is not None and not _without(allowed, banned).any():
            banned = frozenset()  # the text is complete: a ban would leave nothing to draw
        return replace(self._base, edits=self._edits(banned), allowed=allowed)

    def _edits(self, banned: Iterable[int]) -> Edits | None:
        rows = [self._row(token) for token in banned]
        n = len(self._place)
        if not n or not (rows or self._penalises or self._sampling.logit_bias):
            return None
        how, counts = self._sampling, self._counts[:n]
        said = counts > 0
        add = self._bias[:n] - how.frequency_penalty * counts - how.presence_penalty * said
        add[rows] = -np.inf
        scale = np.where(said, np.float32(how.repetition_penalty), np.float32(1))
        return Edits(self._ids[:n].copy(), scale, add.astype(np.float32))

    def _row(self, token: int) -> int:
        row = self._place.setdefault(token, len(self._place))
        if row == len(self._ids):
            self._ids, self._bias, self._counts = (
                np.concatenate([table, np.zeros_like(table)])
                for table in (self._ids, self._bias, self._counts)
            )
        self._ids[row] = token
        return row


def _without(allowed: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    left = allowed.copy()
    for token in tokens:
        left[token // 32] &= ~np.uint32(1 << (token % 32))
    return left
