"""Checksums of packed arrays: xxh3_64 over the bytes, computed by P and compared by D (protocol §6).

Must never copy an array on the CPU backend: there ``numpy.asarray`` is a view, and the hash runs at memory speed
(5 % of a hand-off, facts/peer-servers §8).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import xxhash

Verify = Literal["off", "sampled", "all"]
VERIFY_MODES: tuple[str, ...] = get_args(Verify)
SAMPLE_STRIDE = (
    8  # sampled: one part in eight, another eighth each time, so that every place is checked in turn
)


def checksum(array: Any) -> int:
    """xxh3_64 of the array's bytes in row-major order. Waits until the array is computed.

    Part.checksum 0 means "none": the one array in 2^64 that hashes to 0 is not verified.
    """
    view = np.ascontiguousarray(np.asarray(array))
    return xxhash.xxh3_64_intdigest(view.reshape(-1).view(np.uint8).data)


def chosen(n_parts: int, mode: Verify, turn: int) -> set[int]:
    """Indices of the parts that get a checksum; ``turn`` counts hand-offs. sampled always chooses at least one."""
    if mode == "off":
        return set()
    if mode == "all":
        return set(range(n_parts))
    stride = min(SAMPLE_STRIDE, n_parts)
    return set(range(turn % stride, n_parts, stride))
