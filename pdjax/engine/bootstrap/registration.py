"""What an instance says of itself to the registry (RFC-2 §5.3). Must never import HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from pdjax.core.pools import KVArgs


def registration(
    args: KVArgs,
    role: str,
    epoch: int,
    *,
    zmq_addr: str = "",
    transfer_addr: str = "",
    scheduler_addr: str = "",
) -> dict[str, Any]:
    """The payload of PUT /route for a single-rank instance (RFC-2 §5.3 plus epoch, fingerprint, serving_url)."""
    fingerprint = args.fingerprint
    ranks = {
        f"{axis}_{part}": value
        for axis in ("tp", "cp", "dp", "pp")
        for part, value in (("rank", 0), ("size", 1))
    }
    return {
        "role": role,
        "instance_id": args.instance_id,
        "epoch": str(epoch),
        **ranks,
        "transfer_addr": transfer_addr,
        "zmq_addr": zmq_addr,
        "scheduler_addr": scheduler_addr,
        "serving_url": args.serving_url,
        "page_size": args.page_size,
        "kv_dtype": fingerprint.kv_dtype,
        "mesh_meta": fingerprint.mesh,
        "fingerprint": {"hash": fingerprint.hash, "fields": msgspec.to_builtins(fingerprint)},
    }
