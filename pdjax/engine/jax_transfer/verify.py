"""Whether a part that came over the transport is the part that the manifest states.

The wire carries no shape and no dtype, a truncated or mixed-up transfer can report success (facts/transfer row 6,
row 8), so only the bytes prove anything. Must never wait on an array that is not ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from pdjax.core.pools import Part, misstated
from pdjax.engine.kernels.checksum import Verify, checksum, chosen


def malformed(part: Part) -> str | None:
    """Why this part cannot be pulled at all, or None."""
    try:
        itemsize = int(jnp.dtype(part.dtype).itemsize)
    except TypeError:
        return f"dtype {part.dtype!r} is unknown"
    return misstated(part, itemsize)


def spec(part: Part, device: jax.Device) -> jax.ShapeDtypeStruct:
    """What to pull for a well-formed part: its shape and dtype on one device."""
    return _spec(part.shape, part.dtype, device)


@lru_cache(maxsize=1024)
def _spec(shape: tuple[int, ...], dtype: str, device: jax.Device) -> jax.ShapeDtypeStruct:
    # Most parts of a hand-off have one shape, and making it anew took a millisecond for thirty.
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)  # type: ignore[no-untyped-call]


def wrong(part: Part, array: Any) -> str | None:
    """How the array differs from the part in shape, dtype or size; None when it does not."""
    stated = (tuple(part.shape), jnp.dtype(part.dtype), part.nbytes)
    found = (tuple(array.shape), jnp.dtype(array.dtype), int(array.nbytes))
    return None if stated == found else f"part is {found}, stated {stated}"


def to_check(parts: Sequence[Part], verify: Verify, turn: int) -> set[int]:
    """Indices of the parts whose bytes D compares: those that P stated a checksum for.

    sampled: when P has stated all of them a sample of its own, which ``turn`` moves on; when P has sampled, exactly
    its sample. Two independent samples of one in eight would seldom meet, or never.
    """
    stated = {i for i, part in enumerate(parts) if part.checksum}
    if verify == "sampled" and len(stated) == len(parts):
        return chosen(len(parts), verify, turn)
    return set() if verify == "off" else stated


def differs(part: Part, array: Any) -> str | None:
    """How the bytes of a ready array differ from the stated checksum; None when they do not."""
    found = checksum(array)
    return None if found == part.checksum else f"checksum is {found:016x}, stated {part.checksum:016x}"


def mismatch(parts: Sequence[Part], arrays: Sequence[Any]) -> str | None:
    """P, before it registers: how the arrays differ from the parts that will be stated for them."""
    if not arrays:
        return "no arrays"
    if len(parts) != len(arrays):
        return f"{len(parts)} parts for {len(arrays)} arrays"
    for i, (part, array) in enumerate(zip(parts, arrays, strict=True)):
        if not isinstance(array, jax.Array):
            return f"part {i}: {type(array).__name__} is not a jax.Array"
        if array.is_deleted():  # registering a deleted array kills the process (facts/transfer row P)
            return f"part {i}: the array is deleted"
        why = malformed(part) or wrong(part, array)
        if why is not None:
            return f"part {i}: {why}"
    return None
