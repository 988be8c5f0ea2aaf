"""From logits on the device to sampled tokens on the host: which sampling program runs, on what.

A batch of greedy rows that ask for nothing more takes one small program and one read; what a row asks for beyond that
costs a program of its own. Sizes are few, so that no request causes a compile. Must never keep anything of a request,
and never decide by a row's place in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pdjax.engine.ports import Edits, Sampled, SampleSpec
from pdjax.model.programs import Programs
from pdjax.model.sampling import columns, edit_columns, edit_tables

# Logits changed in a row: bias entries, tokens said so far. Beyond it every logit gets an entry.
MAX_EDITS = 256
# Prompt positions in one scoring call: more hold more logits at once, fewer read the head more often.
SCORE_ROWS = 32


@dataclass(frozen=True)
class Draw:
    """A draw under way: device arrays, and how many of the listed likeliest tokens each row wants."""

    tokens: Any  # int32 [rows]
    logprobs: Any  # float32 [rows]
    n_top: tuple[int, ...]  # one entry for each row that is real
    top: tuple[Any, Any] | None

    def wait(self) -> list[Sampled]:
        tokens, logprobs, top = jax.device_get((self.tokens, self.logprobs, self.top))
        return _sampled(tokens, logprobs, self.n_top, top)


class Sampler:
    """Draws for one model's vocabulary with the programs of its shape."""

    def __init__(self, programs: Programs, vocab_size: int) -> None:
        self._programs = programs
        self._vocab_size = vocab_size
        self._max_edits = min(MAX_EDITS, vocab_size)

    def launch(self, logits: jax.Array, specs: Sequence[SampleSpec], positions: Sequence[int]) -> Draw:
        """Draw a token for each spec from the first rows of logits, float32 [rows ≥ len(specs), vocab_size].

        positions: absolute positions of the tokens to be drawn. Does not wait for the device.
        """
        if all(spec.plain and not spec.temperature for spec in specs):
            tokens, logprobs = self._programs.greedy(logits)
        else:
            c = columns(specs, positions, logits.shape[0])
            edited = self._edited(logits, specs)
            tokens, logprobs = self._programs.steer(logits, edited, self._allowed(specs, logits.shape[0]), c)
        n_top = tuple(spec.n_top for spec in specs)
        draw = Draw(tokens, logprobs, n_top, self._programs.top(logits) if any(n_top) else None)
        for array in jax.tree.leaves((draw.tokens, draw.logprobs, draw.top)):
            array.copy_to_host_async()
        return draw

    def _edited(self, logits: jax.Array, specs: Sequence[SampleSpec]) -> jax.Array:
        edits, n_rows = [spec.edits for spec in specs], logits.shape[0]
        most = max((len(row.ids) for row in edits if row is not None), default=0)
        if not most:
            return logits
        edited: jax.Array
        if most <= self._max_edits:
            edited = self._programs.edit(
                logits, *edit_columns(edits, n_rows, self._max_edits, self._vocab_size)
            )
        else:
            edited = self._programs.edit_all(logits, *edit_tables(edits, n_rows, self._vocab_size))
        return edited

    def _allowed(self, specs: Sequence[SampleSpec], n_rows: int) -> np.ndarray:
        allowed = np.full((n_rows, -(-self._vocab_size // 32)), 0xFFFF_FFFF, np.uint32)
        for i, spec in enumerate(specs):
            if spec.allowed is not None:
                allowed[i] = spec.allowed
        return allowed

    def score(self, params: Any, hidden: jax.Array, tokens: Sequence[int], n_top: int) -> list[Sampled]:
        """Each given token as if drawn from the hidden state in its row, [len(tokens), hidden_size]. Waits."""
        rows = np.asarray(hidden)
        out: list[Sampled] = []
        for start in range(0, len(tokens), SCORE_ROWS):
            n = min(SCORE_ROWS, len(tokens) - start)
            block = np.zeros((SCORE_ROWS, rows.shape[1]), rows.dtype)
            targets = np.zeros(SCORE_ROWS, np.int32)
            block[:n], targets[:n] = rows[start : start + n], tokens[start : start + n]
            logprobs, *top = jax.device_get(self._programs.score(params, block, targets))
            out += _sampled(targets, logprobs, (n_top,) * n, (top[0], top[1]))
        return out

    def warm_up(self, n_rows: int) -> None:
        """Compile every program that so many rows of logits may need."""
        logits = jax.numpy.zeros((n_rows, self._vocab_size), np.float32)
        for spec in self._examples():
            self.launch(logits, [spec], [1]).wait()

    def _examples(self) -> Iterator[SampleSpec]:
        yield SampleSpec(n_top=1)
        for n in {self._max_edits, self._vocab_size}:
            ids = np.arange(n, dtype=np.int32)
            yield SampleSpec(edits=Edits(ids, np.ones(n, np.float32), np.zeros(n, np.float32)))


def _sampled(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    n_top: Sequence[int],
    top: tuple[np.ndarray, np.ndarray] | None,
) -> list[Sampled]:
    out = []
    for i, n in enumerate(n_top):
        listed = ()
        if n and top is not None:
            listed = tuple(zip(top[0][i, :n].tolist(), top[1][i, :n].tolist(), strict=True))
        out.append(Sampled(int(tokens[i]), float(logprobs[i]), listed))
    return out
