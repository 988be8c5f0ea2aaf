"""/metrics: names, kinds and labels as declared, values as counted, and both pages that speak of them."""

import json
import pathlib
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdjax.core import transitions as t
from pdjax.core.room import Transition
from pdjax.core.tally import Tally
from pdjax.sched.request import Output
from pdjax.serve.metric_names import BY_NAME, METRICS, PROCESS_METRICS, series
from pdjax.serve.numbers import Numbers
from pdjax.serve.request_stats import RequestStats

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "operations.md"
DASHBOARD = ROOT / "docs" / "grafana" / "pdjax.json"


def scrape(server):
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return list(text_string_to_metric_families(answer.text))


def values(families, **wanted):
    """sample name → value of the samples that have these labels."""
    return {
        s.name: s.value
        for family in families
        for s in family.samples
        if all(s.labels.get(k) == v for k, v in wanted.items())
    }


def tally(*moves):
    out = Tally()
    for source, target, reason in moves:
        out.note(Transition("sender", 1, 1, "e", t.LETTERS[source], t.LETTERS[target], (), "row", 0, reason))
    return out


@pytest.mark.parametrize("role", ["null", "prefill", "decode"])
def test_every_declared_metric_is_exported_by_every_role_and_no_other(shared, role):
    families = scrape(shared(role))
    named = {f.name + ("_total" if f.type == "counter" else ""): f for f in families}
    assert set(named) == {m.name for m in METRICS} | set(PROCESS_METRICS)
    for name, metric in BY_NAME.items():
        assert (named[name].type, named[name].documentation) == (metric.kind, metric.doc), name
        for sample in named[name].samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), name
            assert sample.name in series(), name


def test_the_page_lists_every_metric_with_its_kind_labels_and_meaning():
    text = PAGE.read_text()
    for m in METRICS:
        row = f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.doc} |".replace("|  |", "| |")
        assert row in text, row


def test_the_page_lists_no_other_metric():
    named = set(re.findall(r"\b(?:pd_[a-z_]+|sglang:[a-z_0-9]+|process_[a-z_]+)", PAGE.read_text()))
    assert named <= series() | {m.name for m in METRICS}


def expressions(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for one in node:
            yield from expressions(one)


def names_in(expression):
    """Metric names of a PromQL expression: words that are followed by no bracket and are no label or keyword."""
    bare = re.sub(r"label_values\(([^,]*),[^)]*\)", r"\1", expression)
    bare = re.sub(r'"[^"]*"', '""', bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"\{[^}]*\}", " ", bare)
    bare = re.sub(r"\[[^\]]*\]", " ", bare)
    words = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\()\b(?!\s*\()", bare)
    return {w for w in words if w not in ("and", "or", "unless", "le", "bool", "offset")}


def test_the_dashboard_uses_only_names_and_labels_that_are_exported():
    dashboard = json.loads(DASHBOARD.read_text())
    found = list(expressions(dashboard))
    assert len(found) > 20
    used = set().union(*(names_in(e) for e in found))
    assert used <= series(), used - series()
    assert {n for n in used if n.startswith("pd_")} and {n for n in used if n.startswith("sglang:")}
    for expression in found:
        for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression):
            known = next((m.labels for m in METRICS if name.startswith(m.name)), ())
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert labels <= {*known, "job", "instance", "le"}, expression
        grouped = ",".join(re.findall(r"\bby\s*\(([^)]*)\)", expression))
        known = {
            label
            for name in names_in(expression)
            for m in METRICS
            if name.startswith(m.name)
            for label in m.labels
        }
        assert {g.strip() for g in grouped.split(",") if g.strip()} <= known | {"le"}, expression


def test_a_name_that_is_not_exported_would_be_found():
    assert names_in('sum by (le) (rate(pd_nothing{role="x"}[5m])) / 2') == {"pd_nothing"}
    assert names_in("histogram_quantile(0.9, sum(rate(sglang:x_bucket[1m])) by (le))") == {"sglang:x_bucket"}


def test_requests_and_tokens_are_counted(serve):
    server = serve()
    for _ in range(3):
        assert server.post("/generate", {"text": "four"}).status_code == 200
    found = values(scrape(server))
    assert found["sglang:num_requests_total"] == 3
    assert found["sglang:prompt_tokens_total"] == 12
    assert found["sglang:generation_tokens_total"] == 18, "hello and its end"
    assert found["sglang:time_to_first_token_seconds_count"] == 3
    assert found["sglang:inter_token_latency_seconds_count"] == 15
    assert found["sglang:e2e_request_latency_seconds_count"] == 3
    assert values(scrape(server), part="http", name="accepted")["pd_counter_total"] == 3


def test_failures_are_counted_by_the_reason_that_the_client_is_told(serve):
    from serve_fakes import duplicate, failed

    server = serve("decode", script=lambda request: failed(503, "peer_lost"))
    body = {"text": "x", "bootstrap_host": "h", "bootstrap_room": 1}
    server.post("/generate", body)
    server.engine.refuse = duplicate
    server.post("/generate", body)
    for reason in ("peer_lost", "duplicate_room"):
        assert values(scrape(server), reason=reason)["pd_request_failures_total"] == 1


def test_rooms_are_counted_from_the_tables_own_moves(serve):
    server = serve("prefill")
    moves = [("N", "B", ""), ("N", "B", ""), ("B", "W", ""), ("W", "T", ""), ("T", "F", "lease_expired")]
    server.engine.counted = Numbers(
        instance_id="p0",
        epoch=7,
        tally=tally(*moves, ("B", "F", "bootstrap_timeout")),
        budget_bytes=(10, 40),
        host_slot_bytes={"held": 10, "free": 20},
    )
    families = scrape(server)
    assert values(families, **{"role": "sender", "from": "Transferring", "to": "Failed"}) == {
        "pd_transitions_total": 1
    }
    assert values(families, reason="bootstrap_timeout")["pd_failures_total"] == 1
    found = values(families)
    assert found["pd_leases_expired_total"] == 1
    assert (
        found["sglang:num_bootstrap_failed_reqs_total"] == found["sglang:num_transfer_failed_reqs_total"] == 1
    )
    assert (found["pd_unpulled_bytes"], found["pd_unpulled_budget_bytes"]) == (10, 40)
    assert [values(families, state=s)["pd_host_slot_bytes"] for s in ("held", "free")] == [10, 20]
    assert values(families, state="Bootstrapping")["pd_rooms"] == 0
    assert values(families, role="prefill", instance_id="p0", epoch="7")["pd_info"] == 1


def test_queues_and_pages_are_gauges_under_both_names(serve):
    server = serve("decode")
    server.engine.counted = Numbers(
        queued=5,
        queues={"bootstrapping": 3, "page_queue": 1, "in_flight": 2, "running": 4},
        oldest_s={"bootstrapping": 1.5, "page_queue": 0.25, "in_flight": 0.0, "running": 9.0},
        used_pages=6,
        free_pages=2,
        page_tokens=16,
        pulls=2,
        compatible_peers=3,
        counters={"driver": {"stale_hello": 2, "too_old": 1, "late_done": 4}, "transport": {"pulls_live": 2}},
    )
    families = scrape(server)
    found = values(families)
    assert found["sglang:num_decode_prealloc_queue_reqs"] == 4
    assert found["sglang:num_decode_transfer_queue_reqs"] == found["pd_inflight"] == 2
    assert found["sglang:num_running_reqs"] == 4 and found["sglang:num_queue_reqs"] == 1
    assert found["sglang:num_used_tokens"] == 96 and found["sglang:token_usage"] == 0.75
    assert found["pd_servable_pairs"] == 3
    assert values(families, queue="bootstrapping") == {"pd_queue_length": 3, "pd_queue_oldest_seconds": 1.5}
    assert values(families, message="hello")["pd_stale_messages_total"] == 2
    assert values(families, message="too_old")["pd_stale_messages_total"] == 1
    assert values(families, part="driver", name="late_done")["pd_counter_total"] == 4
    assert values(families, name="pulls_live") == {}, "a gauge is no counter"


def test_readiness_is_a_gauge(serve):
    server = serve("decode")
    assert values(scrape(server))["pd_ready"] == 1
    server.engine.is_ready = False
    assert values(scrape(server))["pd_ready"] == 0


def test_an_aborted_request_and_a_client_that_left_are_aborted(serve):
    server = serve(script=lambda request: [Output((104,)), ..., Output((105,))])
    with server.http.stream("POST", "/generate", json={"text": "x", "stream": True}) as answer:
        assert answer.status_code == 200
        server.engine.wait(lambda: server.engine.gated() == 1)
    server.engine.wait(lambda: server.engine.aborted)
    assert values(scrape(server))["sglang:num_aborted_requests_total"] == 1


def test_the_throughput_is_of_the_last_ten_whole_seconds():
    now = [100.5]
    stats = RequestStats(lambda: now[0])
    stats.output(30, 100.0, None)
    assert stats.tokens_per_s() == 0.0, "this second is not over"
    for second in range(101, 111):
        now[0] = second + 0.25
        stats.output(10, 100.0, now[0] - 0.5)
        assert stats.tokens_per_s() == (30 + 10 * (second - 101)) / 10
    now[0] = 111.0
    assert stats.tokens_per_s() == 10.0, "the first second is too old"
    now[0] = 500.0
    assert stats.tokens_per_s() == 0.0
    assert stats.between_tokens_s.count == 100 and stats.between_tokens_s.total == pytest.approx(5.0)


def test_debug_rooms_passes_its_bounds_on_and_refuses_nonsense(shared):
    http = shared("decode").http
    assert http.get("/debug/rooms").json()["asked"] == [1000, None]
    assert http.get("/debug/rooms?limit=5&room=9223372036854775807").json()["asked"] == [5, (1 << 63) - 1]
    for query in ("limit=-1", "room=x", "limit=1.5"):
        answer = http.get(f"/debug/rooms?{query}")
        assert answer.status_code == 400 and "must be an integer" in answer.text
