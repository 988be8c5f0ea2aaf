"""/metrics: one collector that reads what the node and its calls count; nothing is kept here and nothing is global.

Every family of metric_names is exported by every server, with no samples where its role has none. Must never cost
the hot path more than it counts already.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pdjax.core.tally import Histogram
from pdjax.serve.engine_api import Engine, Role
from pdjax.serve.metric_names import METRICS, Metric
from pdjax.serve.numbers import Numbers
from pdjax.serve.request_stats import RequestStats

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Values = Mapping[tuple[str, ...], float | Histogram]  # label values → value

ENGINE_TYPES = {"null": "unified", "prefill": "prefill", "decode": "decode"}
TABLE_ROLES = {"prefill": "sender", "decode": "receiver"}
# Gauges among the counts of the transport and the channel: they have names of their own, or mean nothing over time.
NOT_COUNTS = frozenset(
    (
        *("registered_bytes", "serving_peers", "pulls_live", "graveyard", "graveyard_bytes"),
        *("pulling_peers", "peers"),
    )
)
# What the link drops before it looks at a message (core.link), beside the stale_… of the table.
STALE_FRAMES = ("stale_epoch", "no_echo", "too_old")


class NodeCollector(Collector):
    """http: the counts of the HTTP layer. Asked on the event loop, where stats and http change."""

    def __init__(self, engine: Engine, stats: RequestStats, http: Callable[[], Mapping[str, int]]) -> None:
        self._engine, self._stats, self._http = engine, stats, http
        self._version = importlib.metadata.version("pdjax")

    def collect(self) -> Iterator[Family]:
        numbers = self._engine.numbers()
        found: dict[str, Values] = {
            **self._of_sglang(numbers),
            **self._of_rooms(numbers),
            **self._of_requests(numbers),
            **_of_holdings(numbers, self._engine.role),
        }
        for metric in METRICS:
            yield _family(metric, found.pop(metric.name))
        if found:
            raise ValueError(f"metrics {sorted(found)} are not declared in serve/metric_names.py")

    def _of_sglang(self, n: Numbers) -> dict[str, Values]:
        queues, stats = n.queues, self._stats
        pd_queues = ("budget_queue", "bootstrapping", "page_queue")
        waits_for_peer = [queues.get(name, 0) for name in pd_queues]
        rooms = n.tally.live() if n.tally else {}
        failed_in = _failed_in(n)
        pages = n.used_pages + n.free_pages
        values: dict[str, float | Histogram] = {
            "num_running_reqs": queues.get("running", 0) + queues.get("prefilling", 0),
            "num_queue_reqs": max(n.queued - sum(waits_for_peer), 0),
            "num_used_tokens": n.used_pages * n.page_tokens,
            "max_total_num_tokens": pages * n.page_tokens,
            "token_usage": n.used_pages / pages if pages else 0.0,
            "gen_throughput": stats.tokens_per_s(),
            "cache_hit_rate": stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            "num_prefill_bootstrap_queue_reqs": queues.get("budget_queue", 0),
            "num_prefill_inflight_queue_reqs": rooms.get("Transferring", 0)
            if self._engine.role == "prefill"
            else 0,
            "num_decode_prealloc_queue_reqs": queues.get("bootstrapping", 0) + queues.get("page_queue", 0),
            "num_decode_transfer_queue_reqs": queues.get("in_flight", 0),
            "num_bootstrap_failed_reqs_total": failed_in.get("Bootstrapping", 0),
            "num_transfer_failed_reqs_total": failed_in.get("Transferring", 0),
            "prompt_tokens_total": stats.prompt_tokens,
            "generation_tokens_total": stats.generated_tokens,
            "cached_tokens_total": stats.cached_tokens,
            "num_requests_total": stats.finished,
            "num_aborted_requests_total": stats.aborted,
            "time_to_first_token_seconds": stats.first_token_s,
            "inter_token_latency_seconds": stats.between_tokens_s,
            "e2e_request_latency_seconds": stats.whole_s,
            "queue_time_seconds": stats.phase_s["queue"],
        }
        labels = (self._engine.model_name, ENGINE_TYPES[self._engine.role])
        return {f"sglang:{name}": {labels: value} for name, value in values.items()}

    def _of_rooms(self, n: Numbers) -> dict[str, Values]:
        engine, tally = self._engine, n.tally
        failures = tally.failures() if tally else {}
        role = TABLE_ROLES.get(engine.role, "")
        moves = tally.moves() if tally else ()
        return {
            "pd_info": {(engine.role, n.instance_id, str(n.epoch), self._version): 1},
            "pd_ready": {(): int(engine.failed() is None and engine.ready())},
            "pd_servable_pairs": {(): n.compatible_peers},
            "pd_rooms": {(state,): count for state, count in (tally.live() if tally else {}).items()},
            "pd_transitions_total": {(role, source, target): count for source, target, count in moves},
            "pd_failures_total": {(reason,): count for reason, count in failures.items()},
            "pd_leases_expired_total": {(): failures.get("lease_expired", 0)},
            "pd_stale_messages_total": _stale(n.counters.get("driver", {})),
            "pd_transfer_bytes": {(): tally.moved_bytes} if tally else {},
            "pd_pull_seconds": {(): tally.pull_s} if tally else {},
        }

    def _of_requests(self, n: Numbers) -> dict[str, Values]:
        stats = self._stats
        parts = {**n.counters, "http": self._http()}
        return {
            "pd_request_failures_total": {(reason,): count for reason, count in stats.failures.items()},
            "pd_phase_seconds": {(name,): histogram for name, histogram in stats.phase_s.items()},
            "pd_counter_total": {
                (part, name): count
                for part, counts in parts.items()
                for name, count in counts.items()
                if name not in NOT_COUNTS
            },
        }


def _of_holdings(n: Numbers, role: Role) -> dict[str, Values]:
    offered = n.tally.live()["Transferring"] if n.tally else 0
    return {
        "pd_inflight": {(): n.pulls if role == "decode" else offered},
        "pd_queue_length": {(name,): length for name, length in n.queues.items()},
        "pd_queue_oldest_seconds": {(name,): age_s for name, age_s in n.oldest_s.items()},
        "pd_unpulled_bytes": {(): n.budget_bytes[0]},
        "pd_unpulled_budget_bytes": {(): n.budget_bytes[1]},
        "pd_host_slot_bytes": {(state,): n_bytes for state, n_bytes in n.host_slot_bytes.items()},
        "pd_registered_bytes": {(): n.registered_bytes},
        "pd_graveyard_bytes": {(): n.graveyard_bytes},
        "pd_limbo": {(): n.limbo_entries},
        "pd_early": {(): n.early_entries},
        "pd_tombstones": {(): n.tombstones},
        "pd_pages": {("used",): n.used_pages, ("free",): n.free_pages, ("cached",): n.cached_pages},
        "pd_driver_longest_turn_seconds": {(): n.driver_longest_turn_s},
    }


def _failed_in(n: Numbers) -> dict[str, int]:
    """Rooms that failed, by the state that they were in."""
    return {
        source: count for source, target, count in (n.tally.moves() if n.tally else ()) if target == "Failed"
    }


def _stale(counts: Mapping[str, int]) -> Values:
    prefix = "stale_"
    return {
        (name.removeprefix(prefix),): count
        for name, count in counts.items()
        if name in STALE_FRAMES or name.startswith(prefix)
    }


def _family(metric: Metric, values: Values) -> Family:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.doc, labels=metric.labels)
        for labels, value in values.items():
            assert isinstance(value, Histogram)
            histogram.add_metric(labels, buckets=value.cumulative(), sum_value=value.total)
        return histogram
    plain: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        plain = CounterMetricFamily(metric.name.removesuffix("_total"), metric.doc, labels=metric.labels)
    else:
        plain = GaugeMetricFamily(metric.name, metric.doc, labels=metric.labels)
    for labels, value in values.items():
        assert not isinstance(value, Histogram)
        plain.add_metric(labels, value)
    return plain


class Exposition:
    """The text of /metrics of one server."""

    def __init__(self, engine: Engine, stats: RequestStats, http: Callable[[], Mapping[str, int]]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(NodeCollector(engine, stats, http))
        self._registry.register(ProcessCollector(registry=None))

    def text(self) -> bytes:
        return generate_latest(self._registry)
