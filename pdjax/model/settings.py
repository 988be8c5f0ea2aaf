"""What a runner is made with. A default that stands here is also the default of the flag (serve.args).

Must never import JAX: flags are checked before it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdjax.engine.kernels.checksum import Verify

Dtype = Literal["auto", "float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class RunnerSettings:
    """Sizes of the pools and of the compiled programs. num_pages includes the reserved page 0."""

    num_pages: int
    page_size: int  # tokens
    max_batch: int  # rows of the largest decode step
    chunk_tokens: int  # tokens of the largest prefill call
    context_tokens: int = 0  # longest request; 0: what the model and the pools allow
    dtype: Dtype = "auto"  # of weights and KV: see sizes.resolve_dtype
    verify: Verify = "all"
    compilation_cache: str = ""  # directory for compiled programs, kept between runs; empty: none
