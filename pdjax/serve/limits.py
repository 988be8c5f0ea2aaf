"""Bounds of one HTTP request; beyond them it is a 400. docs/api.md lists them.

The largest number of likeliest tokens is core.wire.MAX_TOP_LOGPROBS: it bounds a frame between P and D, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """max_batch: outputs of one request, prompts times n. max_…_chars: of one stop string, one name, one host."""

    max_body_bytes: int = 32 << 20
    max_batch: int = 1024
    max_n: int = 128
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    max_schema_bytes: int = 64 << 10
    max_rid_chars: int = 512
    max_host_chars: int = 255  # as long as a name of the DNS
