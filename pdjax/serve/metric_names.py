"""Every metric that a server exports: name, kind, labels, meaning. docs/operations.md and the dashboard are held to it.

SGLang's names for what SGLang has, so that its dashboards work; pd_ for the rest. Must never hold a label whose
values a client can choose: no room, no rid, no peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """name: as it is in the exposition, a counter with its _total. unit is last in the name."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    doc: str


_OF_SGLANG = ("model_name", "engine_type")


def _sglang(name: str, kind: Kind, doc: str) -> Metric:
    return Metric(f"sglang:{name}", kind, _OF_SGLANG, doc)


def _pd(name: str, kind: Kind, doc: str, *labels: str) -> Metric:
    return Metric(f"pd_{name}", kind, labels, doc)


METRICS: tuple[Metric, ...] = (
    _sglang("num_running_reqs", "gauge", "requests being prefilled or decoded"),
    _sglang("num_queue_reqs", "gauge", "requests that wait for pages, in no queue of the hand-off"),
    _sglang("num_used_tokens", "gauge", "tokens that the pages in use can hold"),
    _sglang("max_total_num_tokens", "gauge", "tokens that all pages can hold"),
    _sglang("token_usage", "gauge", "the one over the other, 0 to 1"),
    _sglang("gen_throughput", "gauge", "generated tokens per second over the last 10 s"),
    _sglang("cache_hit_rate", "gauge", "cached over all prompt tokens of finished requests, 0 to 1"),
    _sglang("num_prefill_bootstrap_queue_reqs", "gauge", "P: requests that wait for the unpulled budget"),
    _sglang("num_prefill_inflight_queue_reqs", "gauge", "P: rooms whose KV waits to be pulled"),
    _sglang("num_decode_prealloc_queue_reqs", "gauge", "D: requests that wait for their P, or for pages and a row"),
    _sglang("num_decode_transfer_queue_reqs", "gauge", "D: requests whose KV is being pulled"),
    _sglang("num_bootstrap_failed_reqs_total", "counter", "rooms that failed before they had a peer"),
    _sglang("num_transfer_failed_reqs_total", "counter", "rooms that failed while KV was offered or pulled"),
    _sglang("prompt_tokens_total", "counter", "prompt tokens of finished requests"),
    _sglang("generation_tokens_total", "counter", "tokens generated"),
    _sglang("cached_tokens_total", "counter", "prompt tokens of finished requests that were cached"),
    _sglang("num_requests_total", "counter", "requests that ended without an error, aborted ones included"),
    _sglang("num_aborted_requests_total", "counter", "requests that were aborted or whose client left"),
    _sglang("time_to_first_token_seconds", "histogram", "from a request's arrival to its first token"),
    _sglang("inter_token_latency_seconds", "histogram", "between two tokens of one request"),
    _sglang("e2e_request_latency_seconds", "histogram", "from a request's arrival to its end"),
    _sglang("queue_time_seconds", "histogram", "from a request's arrival to its prefill (D: as P measured it)"),
    _pd("info", "gauge", "1; what this process is", "role", "instance_id", "epoch", "version"),
    _pd("ready", "gauge", "1 while requests can be served, as /readiness says"),
    _pd("servable_pairs", "gauge", "instances of the other role that fit this one; summed over all P: the pairs"),
    _pd("rooms", "gauge", "live rooms by state of the hand-off", "state"),
    _pd("transitions_total", "counter", "moves of rooms between two states", "role", "from", "to"),
    _pd("failures_total", "counter", "rooms that failed, by reason (protocol.md)", "reason"),
    _pd("request_failures_total", "counter", "requests refused or failed, by the reason that the client was told", "reason"),
    _pd("leases_expired_total", "counter", "P: rooms whose D was silent for a whole lease"),
    _pd("stale_messages_total", "counter", "messages dropped as late, repeated or of an older life", "message"),
    _pd("counter_total", "counter", "every other count of a part of the process, by its name", "part", "name"),
    _pd("phase_seconds", "histogram", "seconds of each phase of finished requests", "phase"),
    _pd("transfer_bytes", "histogram", "KV bytes of each hand-off (P: registered, D: arrived and verified)"),
    _pd("pull_seconds", "histogram", "D: each pull, from its start to the last verified part"),
    _pd("inflight", "gauge", "P: rooms whose KV is offered; D: pulls under way, given-up ones included"),
    _pd("queue_length", "gauge", "requests in each queue of the scheduler", "queue"),
    _pd("queue_oldest_seconds", "gauge", "how long the head of each queue has stood in it", "queue"),
    _pd("unpulled_bytes", "gauge", "P: bytes charged to the unpulled budget, limbo included"),
    _pd("unpulled_budget_bytes", "gauge", "P: the budget"),
    _pd("host_slot_bytes", "gauge", "P, with host staging: pinned memory of hand-offs (held) and ready for the next (free)", "state"),
    _pd("registered_bytes", "gauge", "P: bytes that the transfer servers hold for D"),
    _pd("graveyard_bytes", "gauge", "D: bytes of given-up pulls that have not settled"),
    _pd("limbo", "gauge", "P: ended rooms whose bytes a D may still be reading"),
    _pd("early", "gauge", "P: messages kept for rooms whose leg has not come"),
    _pd("tombstones", "gauge", "ended rooms that are remembered"),
    _pd("pages", "gauge", "pages of the KV pool: used by requests, free (evictable ones included), cached", "state"),
    _pd("driver_longest_turn_seconds", "gauge", "longest turn of the thread that answers the peers"),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}
# Of prometheus_client's own collector; left out where /proc is not.
PROCESS_METRICS = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)


def series() -> frozenset[str]:
    """The names that a query can use: a histogram has three."""
    out = set(PROCESS_METRICS)
    for metric in METRICS:
        if metric.kind == "histogram":
            out |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            out.add(metric.name)
    return frozenset(out)
