"""Why a hand-off ended: the closed set of reasons that messages, logs, metrics and errors use, with what to do."""

from __future__ import annotations

from typing import Final

REASONS: Final[dict[str, str]] = {
    "client_abort": "the client left or aborted the request",
    "bad_request": "the request itself is wrong: correct it before trying again",
    "duplicate_room": "a request with this bootstrap_room is alive or has just ended: draw a fresh room",
    "queue_full": "this server holds as many requests as it may: try again later or elsewhere",
    "draining": "this server is leaving: try another",
    "bootstrap_timeout": "no prefill instance had the room in time: check that the router posts both legs and that the registry lists the instance",
    "no_compatible_peer": "the registry lists only instances with another model, weights, page size or version: start both sides alike",
    "peer_lost": "the other instance died, restarted or is silent: try again",
    "lease_expired": "the decode instance was not heard of for a whole lease: check that it runs and reaches the side channel",
    "transfer_timeout": "the pull did not end in time: check the network between the instances",
    "request_timeout": "the request took longer than its limit",
    "part_failed": "a part of the KV did not arrive or was not what the manifest states: try again",
    "manifest_mismatch": "the prefill instance stated another hand-off than this request needs: check that both sides got the same request",
    "digest_mismatch": "the two halves of this room belong to different requests: draw unique rooms",
    "fingerprint_mismatch": "the two instances run different models, weights or settings: start both sides alike",
    "superseded": "a newer attempt at the same room has taken over",
    "lost": "the prefill instance does not know this room any more (it restarted): try again",
    "engine_error": "this server failed while working on the request: see its log",
    "peer_failed": "the other instance ended the request: see its reason",
}


def explain(reason: str) -> str:
    return REASONS.get(reason, reason)
