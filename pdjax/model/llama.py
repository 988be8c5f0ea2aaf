"""Forward pass of Llama, Qwen2 and Qwen3 over a paged KV cache, as pure functions that a runner compiles.

Each layer has its own pool array, [num_pages, page_size, 2·kv_heads·head_dim], a token's row laid out K0 V0 K1 V1 …
(a list, not a stack: the gather then yields the packed layers directly, and the scatter is ten times cheaper; flat,
not 4-D: no relayout on TPU; facts/model §4, §8). On a TPU rows may be wider, filled up with zeros (engine.kernels.layout).
Page 0 is reserved: padding tokens write there.
Must never read a token position beyond a request's own: pages are reused uncleared.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.model.config import ModelConfig, Rope
from pdjax.model.sampling import given

Params = dict[str, Any]


def rope_frequencies(head_dim: int, rope: Rope) -> np.ndarray:
    """Inverse frequencies, float32 [head_dim/2]. llama3: the formula of the Llama 3.1 release."""
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        inv = inv / rope.factor
    elif rope.kind == "factors":
        inv = inv / np.array(rope.factors)
    elif rope.kind == "llama3":
        wavelength = 2 * np.pi / inv
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        keep = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        between = (1 - keep) * inv / rope.factor + keep * inv
        inv = np.where(wavelength > low, inv / rope.factor, np.where(wavelength < high, inv, between))
    return inv.astype(np.float32)


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [n, in] @ weight [out, in]ᵀ (+ bias [out])."""
    y = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
    return y if bias is None else y + bias


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x [n, heads, head_dim], halves rotated (Hugging Face's order); cos, sin [n, 1, head_dim/2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _attend(q: jax.Array, kv: jax.Array, visible: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Grouped attention. q [*b, t, heads, head_dim]; kv [*b, s, kv_width]; visible [*b, t, s] → [*b, t, heads·head_dim].

    Rows of kv that no query sees are zeroed: a reused page may hold anything there, and 0 · NaN is NaN (S11).
    """
    *batch, t, heads, dim = q.shape
    s = kv.shape[-2]
    any_sees = jnp.any(visible, axis=-2)[..., None]
    kv = jnp.where(any_sees, kv, 0).reshape(*batch, s, cfg.kv_heads, 2, dim)
    k, v = kv[..., 0, :], kv[..., 1, :]
    q = q.reshape(*batch, t, cfg.kv_heads, heads // cfg.kv_heads, dim)
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, preferred_element_type=jnp.float32) * dim**-0.5
    scores = jnp.where(visible[..., None, None, :, :], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("...kgts,...skd->...tkgd", weights, v).reshape(*batch, t, heads * dim)


def _forward(
    params: Params,
    pools: list[jax.Array],
    tokens: jax.Array,
    positions: jax.Array,
    write: tuple[jax.Array, jax.Array],
    table: jax.Array,
    visible: jax.Array,
    cfg: ModelConfig,
) -> tuple[jax.Array, list[jax.Array]]:
    """Hidden states [n, hidden_size] of n tokens, and the pools with their keys and values written.

    write: (page, slot) of each token. table: page ids, [p] when all tokens are of one request, [n, p] when each is
    of its own. visible: which of the table's p·page_size positions a token sees, [n, s] or [n, 1, s] likewise.
    """
    n = tokens.shape[0]
    page, slot = write
    angle = positions.astype(jnp.float32)[:, None, None] * rope_frequencies(cfg.head_dim, cfg.rope)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    h = params["embed"][tokens]
    written = []
    for w, pool in zip(params["layers"], pools, strict=True):
        x = _rms_norm(h, w["attn_norm"], cfg.rms_eps)
        q = _linear(x, w["q"], w.get("q_bias")).reshape(n, cfg.n_heads, cfg.head_dim)
        k = _linear(x, w["k"], w.get("k_bias")).reshape(n, cfg.kv_heads, cfg.head_dim)
        v = _linear(x, w["v"], w.get("v_bias")).reshape(n, cfg.kv_heads, cfg.head_dim)
        if cfg.qk_norm:
            q, k = _rms_norm(q, w["q_norm"], cfg.rms_eps), _rms_norm(k, w["k_norm"], cfg.rms_eps)
        kv = jnp.stack([_rotate(k, cos, sin), v], axis=2).reshape(n, cfg.kv_width)
        kv = jnp.pad(kv, ((0, 0), (0, pool.shape[2] - cfg.kv_width)))
        pool = pool.at[page, slot].set(kv.astype(pool.dtype), mode="promise_in_bounds")
        written.append(pool)
        seen = pool.at[table].get(mode="clip")[..., : cfg.kv_width].astype(h.dtype)
        seen = seen.reshape(*table.shape[:-1], -1, cfg.kv_width)
        q = _rotate(q, cos, sin)
        mixed = _attend(q if table.ndim == 1 else q[:, None], seen, visible, cfg).reshape(n, -1)
        h = h + _linear(mixed, w["o"], w.get("o_bias"))
        x = _rms_norm(h, w["mlp_norm"], cfg.rms_eps)
        h = h + _linear(jax.nn.silu(_linear(x, w["gate"])) * _linear(x, w["up"]), w["down"])
    return h, written


def _head(params: Params, h: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Logits, float32 [n, vocab_size]."""
    x = _rms_norm(h, params["norm"], cfg.rms_eps)
    return _linear(x, params["head"] if "head" in params else params["embed"]).astype(jnp.float32)


def prefill(
    params: Params,
    pools: list[jax.Array],
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    table: jax.Array,
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """One request's tokens at positions start … start + count: logits of the last one, float32 [1, vocab_size].

    tokens: int32 [bucket], of which the first ``count`` are real. table: the request's pages, int32 [page bucket],
    padded with page 0. Also returned: the hidden states of all tokens, [bucket, hidden_size], for ``score``, and the
    pools with the keys and values of these tokens written.
    """
    page_size = pools[0].shape[1]
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    positions = start + index
    real = index < count
    page = jnp.where(real, table.at[positions // page_size].get(mode="clip"), 0)
    keys = jnp.arange(table.shape[0] * page_size, dtype=jnp.int32)
    # A padding token sees what the last real one sees: no row is without a key, and none reads a foreign slot.
    visible = keys[None, :] <= jnp.minimum(positions, start + count - 1)[:, None]
    h, pools = _forward(params, pools, tokens, positions, (page, positions % page_size), table, visible, cfg)
    # Two equal rows: a lone row takes XLA CPU's slow path (facts/model §0.3).
    last = jnp.stack([h[count - 1], h[count - 1]])
    return _head(params, last, cfg)[:1], h, pools


def decode(
    params: Params,
    pools: list[jax.Array],
    tokens: jax.Array,
    positions: jax.Array,
    tables: jax.Array,
    cfg: ModelConfig,
) -> tuple[jax.Array, list[jax.Array]]:
    """One token of each of n requests: logits float32 [n, vocab_size] and the pools with their rows written.

    tokens, positions: int32 [n]. tables: int32 [n, page bucket], padded with page 0; a padding row is all zeros.
    """
    page_size = pools[0].shape[1]
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    page = tables[rows, positions // page_size]
    keys = jnp.arange(tables.shape[1] * page_size, dtype=jnp.int32)
    visible = (keys[None, :] <= positions[:, None])[:, None, :]
    h, pools = _forward(params, pools, tokens, positions, (page, positions % page_size), tables, visible, cfg)
    return _head(params, h, cfg), pools


def score(params: Params, hidden: jax.Array, tokens: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, ...]:
    """sampling.given of tokens int32 [n], each after the position whose hidden state [n, hidden_size] is given."""
    return given(_head(params, hidden, cfg), tokens)
