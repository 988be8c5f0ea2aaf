"""What a runner's settings come to with one model, before any memory is taken for it.

Must never make an array: the doctor asks beside a server that holds the device's memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.core.errors import ConfigError
from pdjax.core.pools import PoolTransferSpec
from pdjax.engine.kernels.checksum import VERIFY_MODES
from pdjax.engine.kernels.layout import pool_shape
from pdjax.model.buckets import Buckets, make_buckets
from pdjax.model.config import ModelConfig
from pdjax.model.settings import DTYPES, RunnerSettings

LAYOUT = "list[layer](page, token, k0 v0 k1 v1 ..)"  # fingerprint: how the bytes of a pool are to be read


@dataclass(frozen=True)
class Sizes:
    """dtype: of weights and KV. context_tokens: of the longest request. pool: what a manager must know of the pool."""

    dtype: np.dtype[Any]
    context_tokens: int
    buckets: Buckets
    pool: PoolTransferSpec

    @classmethod
    def of(cls, cfg: ModelConfig, settings: RunnerSettings) -> Sizes:
        """Raises ConfigError for what cannot be served."""
        check(settings)
        dtype, context_tokens = resolve_dtype(settings.dtype), _context(settings, cfg.max_position)
        buckets = make_buckets(
            chunk_tokens=min(settings.chunk_tokens, context_tokens),
            max_batch=settings.max_batch,
            max_pages=-(-context_tokens // settings.page_size),
        )
        plain = (settings.num_pages, settings.page_size, cfg.kv_width)
        shape = pool_shape(plain, dtype, jax.default_backend())
        pool = PoolTransferSpec(
            name="kv",
            pool_type="kv",
            dtype=str(dtype),
            shape=shape,
            n_layers=cfg.n_layers,
            page_bytes=settings.page_size * shape[2] * dtype.itemsize,
            metadata={"layout": LAYOUT if shape[2] == cfg.kv_width else f"{LAYOUT} {shape[2]} wide"},
        )
        _check_fits(cfg, settings, pool)
        return cls(dtype, context_tokens, buckets, pool)


def resolve_dtype(name: str) -> np.dtype[Any]:
    """float32 on CPU (bfloat16 is 4 to 8 times slower there, facts/model §0.2), bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def check(settings: RunnerSettings) -> None:
    """Raises ConfigError for what no model could be served with."""
    if settings.num_pages < 2:
        raise ConfigError(f"num_pages={settings.num_pages} must be at least 2: page 0 is reserved")
    if settings.page_size < 1:
        raise ConfigError(f"page_size={settings.page_size} must be at least 1 token")
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype={settings.dtype!r} must be one of {list(DTYPES)}")
    if settings.verify not in VERIFY_MODES:
        raise ConfigError(f"verify={settings.verify!r} must be one of {list(VERIFY_MODES)}")


def device_bytes() -> int:
    """Memory of the device as it tells it, this machine's on CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0)) or host_bytes()


def host_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_fits(cfg: ModelConfig, settings: RunnerSettings, pool: PoolTransferSpec) -> None:
    """Refuse what cannot fit even alone. Weights and programs come on top: the allocation itself may still fail."""
    have = device_bytes()
    a_page = pool.page_bytes * pool.n_layers
    if settings.num_pages * a_page > have:
        raise ConfigError(
            f"num_pages={settings.num_pages} of page_size={settings.page_size} need {settings.num_pages * a_page} bytes "
            f"and the device has {have}: at most {have // a_page} fit, less what the weights need"
        )
    a_row = 4 * cfg.vocab_size  # its logits, in float32
    if settings.max_batch * a_row > have:
        raise ConfigError(
            f"max_running_requests={settings.max_batch} need {settings.max_batch * a_row} bytes for the logits of a "
            f"step and the device has {have}: give at most {have // a_row}"
        )


def _context(settings: RunnerSettings, max_position: int) -> int:
    """Longest request in tokens: what was asked, at most what the model knows and the pools hold."""
    asked = settings.context_tokens
    if asked > max_position:
        raise ConfigError(
            f"context_tokens={asked} is more than the model's max_position_embeddings={max_position}"
        )
    held = (settings.num_pages - 1) * settings.page_size
    if asked > held:
        raise ConfigError(
            f"context_tokens={asked} does not fit: {settings.num_pages - 1} pages hold {held} tokens"
        )
    return asked or min(max_position, held)
