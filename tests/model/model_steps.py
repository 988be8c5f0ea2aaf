"""A launch and its result in one call, for tests that look at one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from pdjax.engine.ports import DecodeRow, PrefillChunk, Runner, Sampled


def run_prefill(runner: Runner, chunk: PrefillChunk) -> Sampled | None:
    launched = runner.prefill(chunk)
    if launched is None:
        return None
    [sampled] = runner.collect(launched)
    return sampled


def run_decode(runner: Runner, rows: Sequence[DecodeRow]) -> Sequence[Sampled]:
    return runner.collect(runner.decode(rows))
