"""What an instance says of itself to the registry (RFC-2 §5.3). Must never import HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdjax.core.pools import KVArgs
from pdjax.engine.bootstrap.registry import parse_print, parse_uint


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


def as_json(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A registration as JSON: a Fingerprint object becomes hash and fields, the epoch becomes exact text."""
    out = dict(payload)
    known = parse_print(out.get("fingerprint"))
    out["fingerprint"] = {"hash": known.hash, "fields": dict(known.fields)}
    out["epoch"] = str(parse_uint(out.get("epoch"), "epoch"))
    return out


def beat_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What a heartbeat says of a registration as JSON: which life of which seat, and the fingerprint's hash."""
    named = ("role", "instance_id", "epoch")
    beat = {name: value for name, value in payload.items() if name in named or name.endswith("_rank")}
    return {**beat, "fingerprint": payload["fingerprint"]["hash"]}
