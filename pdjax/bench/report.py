"""A run's figures for people: a table in the terminal, and one HTML file with its curves that needs nothing else.

Must never fetch anything when the file is opened: every curve is inline SVG.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from pdjax.bench.client import Outcome

LATENCIES = (("ttft_ms", "time to first token"), ("itl_ms", "inter-token latency"), ("e2e_ms", "end to end"))
COLUMNS = ("mean", "p50", "p90", "p99", "max")
WIDTH, HEIGHT, MARGIN = 420, 220, 40  # pixels of one plot
MOST_POINTS = 400  # of one curve


def tables(figures: dict[str, Any]) -> Group:
    """The summary of measures.summary as rich tables."""
    latency = Table(title="milliseconds", title_justify="left")
    latency.add_column("")
    for name in COLUMNS:
        latency.add_column(name, justify="right")
    for key, title in LATENCIES:
        spread = figures[key]
        latency.add_row(title, *(f"{spread[name]:.1f}" if spread else "–" for name in COLUMNS))
    totals = Table(show_header=False)
    totals.add_column("")
    totals.add_column("", justify="right")
    for name, value in _totals(figures):
        totals.add_row(name, value)
    return Group(latency, totals)


def _totals(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{figures['succeeded']} of {figures['requests']} in {figures['duration_s']:.1f} s"),
        ("requests a second", f"{figures['requests_per_s']:.2f}"),
        ("input tokens a second", f"{figures['input_tokens_per_s']:.0f}"),
        ("output tokens a second", f"{figures['output_tokens_per_s']:.0f}"),
    ]
    if figures["cached_tokens"]:
        rows.append(
            ("input tokens from a cache", f"{figures['cached_tokens'] / figures['input_tokens']:.0%}")
        )
    if (goodput := figures["goodput"]) is not None:
        bounds = " ".join(f"{name}:{bound:g}" for name, bound in goodput["bounds_ms"].items())
        rows.append((f"goodput at {bounds} ms", f"{goodput['requests_per_s']:.2f}/s, {goodput['share']:.0%}"))
    rows += [(f"error: {kind}", str(n)) for kind, n in figures["errors"].items()]
    return rows


# ---------------------------------------------------------------------- HTML


def page(title: str, figures: dict[str, Any], outcomes: Sequence[Outcome], notes: Sequence[str]) -> str:
    """One self-contained page: the totals, the distributions, and what came when."""
    good = [outcome for outcome in outcomes if not outcome.error]
    plots = [
        _plot("time to first token, share of requests", "ms", _shares([o.ttft_s * 1e3 for o in good])),
        _plot("inter-token latency, share of gaps", "ms", _shares([g * 1e3 for o in good for g in o.gaps_s])),
        _plot("end to end, share of requests", "ms", _shares([o.e2e_s * 1e3 for o in good])),
        _plot(
            "time to first token by time of sending",
            "s",
            [(o.sent_s, o.ttft_s * 1e3) for o in good],
            dots=True,
        ),
    ]
    rows = "".join(
        f"<tr><td>{html.escape(n)}</td><td>{html.escape(v)}</td></tr>" for n, v in _totals(figures)
    )
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    style = "body{font:14px sans-serif;margin:2em}svg{margin:1em 1em 0 0}td{padding:.1em 1em .1em 0}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body><h1>{html.escape(title)}</h1><table>{rows}</table>{said}"
        f"{''.join(plots)}<details><summary>JSON</summary><pre>{html.escape(json.dumps(figures, indent=1))}</pre>"
        "</details></body></html>\n"
    )


def _shares(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of values up to it in percent), thinned to MOST_POINTS."""
    ordered = sorted(values)
    step = max(math.ceil(len(ordered) / MOST_POINTS), 1)
    picked = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[i], (i + 1) / len(ordered) * 100) for i in picked]


def _plot(title: str, unit: str, points: Sequence[tuple[float, float]], dots: bool = False) -> str:
    most_x = max((x for x, _ in points), default=0.0) or 1.0
    most_y = max((y for _, y in points), default=0.0) or 1.0
    per_x, per_y = (WIDTH - 2 * MARGIN) / most_x, (HEIGHT - 2 * MARGIN) / most_y
    spots = [(MARGIN + x * per_x, HEIGHT - MARGIN - y * per_y) for x, y in points]
    if dots:
        curve = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#2563eb"/>' for x, y in spots)
    else:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        curve = f'<polyline points="{path}" fill="none" stroke="#2563eb" stroke-width="2"/>'
    left, bottom, right = MARGIN, HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f'<text x="{left}" y="20" font-size="13">{html.escape(title)}</text>'
        f'<path d="M{left} {MARGIN}V{bottom}H{right}" stroke="#888" fill="none"/>'
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end" font-size="11">{most_x:.4g} {unit}</text>'
        f'<text x="{left}" y="{bottom + 16}" font-size="11">0</text>'
        f'<text x="{left - 4}" y="{MARGIN + 4}" text-anchor="end" font-size="11">{most_y:.4g}</text>{curve}</svg>'
    )
