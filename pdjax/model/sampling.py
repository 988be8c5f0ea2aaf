"""Sampling of the next token, keyed by (seed, position) and by nothing else.

P samples the first token, D the rest, a server without PD all of them: the draw must be the same wherever a step
runs, so no row index, batch size, step counter or global key may enter it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.engine.ports import SampleSpec

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def columns(specs: Sequence[SampleSpec], positions: Sequence[int], n_rows: int) -> Columns:
    """(temperature float32 [n], seed uint32 [n, 2], position uint32 [n]) for ``sample``, padded to n_rows, greedy.

    positions: absolute positions of the tokens to be sampled. A seed counts modulo 2^64.
    """
    temperature = np.zeros(n_rows, np.float32)
    seed = np.zeros((n_rows, 2), np.uint32)
    position = np.zeros(n_rows, np.uint32)
    for i, (spec, at) in enumerate(zip(specs, positions, strict=True)):
        temperature[i] = spec.temperature
        seed[i] = ((spec.seed >> 32) & 0xFFFFFFFF, spec.seed & 0xFFFFFFFF)
        position[i] = at
    return temperature, seed, position


def sample(
    logits: jax.Array, temperature: jax.Array, seed: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Chosen tokens int32 [n] and their log-probabilities float32 [n] (of the raw logits, temperature 1).

    logits: float32 [n, vocab_size]. temperature 0 is greedy, the lowest id among equals; otherwise the Gumbel-max
    draw with the key fold_in(seed, position).
    """

    def draw(_: None) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        warm = jnp.argmax(logits / jnp.maximum(temperature, 1e-6)[:, None] + noise, axis=-1)
        return jnp.where(temperature > 0, warm, greedy)

    greedy = jnp.argmax(logits, axis=-1)
    tokens = jax.lax.cond(jnp.any(temperature > 0), draw, lambda _: greedy, None).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)
