"""The compiled programs of one model shape, shared by every runner of it in the process.

Two runners of equal sizes (P and D in one process, or a test after a test) compile nothing twice. Must hold no
weights and no pools, only what JAX keeps of programs.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from pdjax.model import llama, sampling
from pdjax.model.config import ModelConfig


class Programs:
    """prefill, decode: llama's functions with the pools donated; score: llama's; keep: below; the rest: sampling's.

    slots: int32 [max_batch + 1], the newest token of each request on the device. decode takes from it the tokens that
    are given as negative, keep puts into it what was drawn; padding rows use its last element.

    compiles: how often each was compiled, by (name, tokens or rows, pages, pool shape, pool dtype); draws: by
    (name, shape of each argument but the weights).
    """

    def __init__(self, cfg: ModelConfig) -> None:
        self._cfg = cfg
        self.compiles: Counter[tuple[str, int, int, tuple[int, ...], str]] = Counter()
        self.prefill: Any = jax.jit(partial(self._trace, "prefill", llama.prefill), donate_argnums=1)
        self.decode: Any = jax.jit(partial(self._trace, "decode", _decode), donate_argnums=1)
        self.draws: Counter[tuple[Any, ...]] = Counter()
        self.greedy: Any = self._counted("greedy", sampling.greedy)
        self.steer: Any = self._counted("steer", sampling.steer)
        self.edit: Any = self._counted("edit", sampling.edit)
        self.edit_all: Any = self._counted("edit_all", sampling.edit_all)
        self.top: Any = self._counted("top", sampling.top)
        self.keep: Any = self._counted("keep", _keep)
        self.score: Any = jax.jit(self._trace_score)

    def _counted(self, name: str, function: Any) -> Any:
        def traced(*args: Any) -> Any:
            self.draws[name, *(arg.shape for arg in jax.tree.leaves(args))] += 1
            return function(*args)

        return jax.jit(traced)

    def _trace_score(self, params: Any, hidden: Any, tokens: Any) -> Any:
        self.draws["score", hidden.shape, tokens.shape] += 1
        return llama.score(params, hidden, tokens, self._cfg)

    def _trace(self, name: str, forward: Any, params: Any, pools: Any, tokens: Any, *rest: Any) -> Any:
        """Runs once a compile: it is traced, not called."""
        pool = pools[0]
        self.compiles[name, tokens.shape[0], rest[-1].shape[-1], pool.shape, str(pool.dtype)] += 1
        return forward(params, pools, tokens, *rest, cfg=self._cfg)


def _decode(
    params: Any,
    pools: Any,
    tokens: jax.Array,
    slots: jax.Array,
    slot: jax.Array,
    *rest: Any,
    cfg: ModelConfig,
) -> Any:
    """llama.decode of the given tokens, or of what the slots hold where a token is negative."""
    return llama.decode(params, pools, jnp.where(tokens < 0, slots[slot], tokens), *rest, cfg=cfg)


def _keep(slots: jax.Array, slot: jax.Array, tokens: jax.Array) -> jax.Array:
    return slots.at[slot].set(tokens)


@lru_cache(maxsize=16)
def programs_for(cfg: ModelConfig) -> Programs:
    return Programs(cfg)
