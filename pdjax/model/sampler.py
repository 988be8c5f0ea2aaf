"""From logits on the device to sampled tokens on the host: which sampling program runs, on what.

A batch whose rows are all plain takes one program and one read, as if nothing else existed; what a row asks for
beyond that costs its own program. Sizes come from buckets, so that no request causes a compile. Must never keep
anything of a request, and never decide by a row's place in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pdjax.engine.ports import Edits, Sampled, SampleSpec
from pdjax.model.buckets import bucket
from pdjax.model.programs import Programs
from pdjax.model.sampling import columns, edit_columns

EDIT_STEPS = (
    64,
    1024,
    16384,
)  # logits changed in a row, up to the vocabulary: bias entries and tokens said so far
SCORE_ROWS = (
    32  # prompt positions in one scoring call; more hold more logits at once, fewer read the head more often
)


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
        self._edit_steps = tuple(sorted({min(step, vocab_size) for step in (*EDIT_STEPS, vocab_size)}))

    def launch(self, logits: jax.Array, specs: Sequence[SampleSpec], positions: Sequence[int]) -> Draw:
        """Draw a token for each spec from the first rows of logits, float32 [rows ≥ len(specs), vocab_size].

        positions: absolute positions of the tokens to be drawn. Does not wait for the device.
        """
        c = columns(specs, positions, logits.shape[0])
        if all(spec.plain for spec in specs):
            tokens, logprobs = self._programs.sample(logits, c.temperature, c.seed, c.position)
        else:
            edited = self._edited(logits, specs)
            tokens, logprobs = self._programs.steer(logits, edited, self._allowed(specs, logits.shape[0]), c)
        n_top = tuple(spec.n_top for spec in specs)
        return Draw(tokens, logprobs, n_top, self._programs.top(logits) if any(n_top) else None)

    def _edited(self, logits: jax.Array, specs: Sequence[SampleSpec]) -> jax.Array:
        most = max((len(spec.edits.ids) for spec in specs if spec.edits is not None), default=0)
        if not most:
            return logits
        width = bucket(self._edit_steps, most, "logits changed in a row")
        rows = edit_columns([spec.edits for spec in specs], logits.shape[0], width, self._vocab_size)
        edited: jax.Array = self._programs.edit(logits, *rows)
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

    def warmup(self, params: Any, hidden_size: int, dtype: Any, rows: Sequence[int], *, score: bool) -> None:
        """Compile every program that rows of these many logits may need."""
        for n in rows:
            logits = jax.numpy.zeros((n, self._vocab_size), np.float32)
            for spec in self._examples():
                self.launch(logits, [spec], [1]).wait()
        if score:
            self.score(params, np.zeros((1, hidden_size), dtype), [0], 1)

    def _examples(self) -> Iterator[SampleSpec]:
        yield SampleSpec(n_top=1)
        for step in self._edit_steps:
            ids = np.arange(step, dtype=np.int32)
            yield SampleSpec(edits=Edits(ids, np.ones(step, np.float32), np.zeros(step, np.float32)))


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
