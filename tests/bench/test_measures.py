"""Percentiles, throughput, goodput and errors from outcomes, and the page and table made of them."""

import io
import re

import pytest
from rich.console import Console

from pdjax.bench.client import Outcome
from pdjax.bench.measures import parse_bounds, percentile, spread_ms, summary
from pdjax.bench.report import page, tables
from pdjax.core.errors import ConfigError


def outcome(number, ttft_s=0.1, gaps_s=(0.01, 0.03), error="", **more):
    e2e_s = ttft_s + sum(gaps_s)
    return Outcome(
        number, number * 0.1, ttft_s=ttft_s, e2e_s=e2e_s, gaps_s=list(gaps_s), n_prompt=10, n_output=3, error=error, **more
    )  # fmt: skip


def test_percentile_is_a_value_that_occurred():
    values = [1.0, 2.0, 3.0, 4.0]
    assert [percentile(values, p) for p in (0, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]


def test_summary_counts_errors_by_kind_and_measures_only_what_succeeded():
    outcomes = [outcome(0), outcome(1, ttft_s=0.3), outcome(2, error="timeout"), outcome(3, error="timeout")]
    figures = summary(outcomes, 2.0, {})
    assert (figures["requests"], figures["succeeded"], figures["errors"]) == (4, 2, {"timeout": 2})
    assert figures["requests_per_s"] == 1.0
    assert (figures["input_tokens_per_s"], figures["output_tokens_per_s"]) == (10.0, 3.0)
    assert figures["ttft_ms"] == pytest.approx({"mean": 200, "p50": 100, "p90": 300, "p99": 300, "max": 300})
    assert figures["itl_ms"]["mean"] == pytest.approx(20) and figures["itl_ms"]["max"] == pytest.approx(30)
    assert figures["goodput"] is None


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"ttft": 200}, 1),
        ({"ttft": 300}, 2),
        ({"itl": 20}, 2),
        ({"itl": 19}, 0),
        ({"ttft": 300, "e2e": 141}, 1),
    ],
)
def test_goodput_counts_the_requests_that_keep_every_bound(bounds, kept):
    outcomes = [outcome(0), outcome(1, ttft_s=0.3), outcome(2, ttft_s=0.001, gaps_s=(), error="timeout")]
    goodput = summary(outcomes, 2.0, bounds)["goodput"]
    assert goodput["requests_per_s"] == pytest.approx(kept / 2)
    assert goodput["share"] == pytest.approx(kept / 3), "a failed request keeps no bound"


def test_bounds_are_read_or_refused():
    assert parse_bounds(["ttft:200", "itl:50.5"]) == {"ttft": 200.0, "itl": 50.5}
    for wrong in ("ttft", "ttft:", "tps:4", "itl:-1", "itl:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_bounds([wrong])


def test_a_run_without_a_success_still_gives_a_table_and_a_page():
    figures = summary([outcome(0, error="ConnectError")], 1.0, {"ttft": 5})
    assert spread_ms([]) == {} == figures["ttft_ms"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables(figures))
    assert re.search(r"error: ConnectError\s+│\s+1", console.export_text())
    assert "<svg" in page("t", figures, [outcome(0, error="x")], [])


def test_the_page_needs_nothing_from_the_network_and_escapes_what_servers_said():
    outcomes = [outcome(i, ttft_s=0.1 + i / 1000) for i in range(1000)] + [outcome(0, error="<script>")]
    text = page("<bench>", summary(outcomes, 3.0, {}), outcomes, ["a & b"])
    assert "<script" not in text and "&lt;bench&gt;" in text and "a &amp; b" in text
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    assert text.count("<svg") == 4 and text.count("<circle") == 1000
    assert all(len(line.split()) <= 403 for line in re.findall(r'points="([^"]*)"', text)), (
        "curves are thinned"
    )
