"""The whole 1P1D on split chips: the tokens of one ordinary server, every byte and slot free afterwards, event logs that conform.

The ordinary server runs first and alone where the chips are few; the pair runs once for each way of staging.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tpu_suite import SERVING, CheckFailed, Suite

from pdjax.core import conform
from pdjax.serve.children import ChildError
from pdjax.serve.local import Fleet, Plan

TOKENS = 12
WAIT_S = 120.0
POLL_S = 0.1


def serve(suite: Suite) -> None:
    """Raises CheckFailed."""
    prompts = [_prompt(n) for n in suite.sizes.prompts]
    try:
        with _fleet(suite, prefill=0, decode=0, plain=1, router="none") as fleet:
            expected = [_generate(fleet.addresses["plain-0"], ids)["output_ids"] for ids in prompts]
        for staged in suite.sizes.staging:
            _pair(suite, prompts, expected, staged)
    except (ChildError, httpx.HTTPError, KeyError) as error:
        said = f"; the last that a server said: {suite.said[-1]}" if suite.said else ""
        raise CheckFailed(f"{type(error).__name__}: {error}{said}") from error


def _prompt(n: int) -> list[int]:
    rng = random.Random(n)
    return [rng.randrange(3, 500) for _ in range(n)]


def _pair(suite: Suite, prompts: list[list[int]], expected: list[list[int]], staged: bool) -> None:
    name = "staged" if staged else "not staged"
    logs = suite.folder / name.replace(" ", "-")
    logs.mkdir(parents=True, exist_ok=True)
    options = ["--disaggregation-trace", str(logs)]
    options += ["--disaggregation-host-staging"] if staged else []
    with _fleet(suite, *options, prefill=1, decode=1, plain=0, router="mini") as fleet:
        began = time.monotonic()
        got = [_generate(fleet.addresses["router"], ids)["output_ids"] for ids in prompts]
        took_s = time.monotonic() - began
        _await_free(fleet)
    suite.figure(
        SERVING.name, f"{name}: seconds of a request, one after the other", took_s / len(prompts), "s"
    )
    for ids, one, other in zip(prompts, got, expected, strict=True):
        if one != other:
            raise CheckFailed(f"{name}: a prompt of {len(ids)} tokens gives {one}, one server gives {other}")
    _check_logs(logs, len(prompts), staged)


@contextmanager
def _fleet(suite: Suite, *options: str, **plan: Any) -> Iterator[Fleet]:
    """Children on the CPU, or P with the first chip and D with the second; a server without PD runs alone, with the first."""
    chips: dict[str, Any] = {}
    if suite.hardware.is_tpu:
        chips = {"prefill_chips": ("0",) * plan["prefill"], "decode_chips": ("1",) * plan["decode"]}
    extra = (*suite.sizes.serve_options, *options)
    wanted = Plan(suite.sizes.model, extra=extra, **plan, **chips)
    with _environment(suite.environ("0")), Fleet(wanted, forward=suite.said.append) as fleet:
        fleet.start()
        yield fleet


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """What the children of a fleet inherit."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _generate(url: str, ids: list[int]) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=WAIT_S, trust_env=False)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def _await_free(fleet: Fleet) -> None:
    """Every page, byte, room and slot is back. Raises CheckFailed."""
    deadline = time.monotonic() + WAIT_S
    while held := {name: h for name in ("prefill-0", "decode-0") if (h := _held(fleet.addresses[name]))}:
        if time.monotonic() > deadline:
            raise CheckFailed(f"still held after {WAIT_S:g} s: {held}")
        time.sleep(POLL_S)


def _held(url: str) -> dict[str, int]:
    state = httpx.get(f"{url}/server_info", timeout=WAIT_S, trust_env=False).json()["internal_states"][0]
    found = {**state["held"], "pages": state["used_pages"]}
    return {name: n for name, n in found.items() if n}


def _check_logs(logs: Path, n_requests: int, staged: bool) -> None:
    lines = [line for path in sorted(logs.glob("*.ndjson")) for line in path.read_bytes().splitlines()]
    wrong = conform.check(lines, complete=True)
    if wrong:
        raise CheckFailed(f"{len(wrong)} findings in the event logs, the first is {wrong[0]}")
    events = [json.loads(line)["event"] for line in lines]
    taken, registered = events.count("slot_taken"), events.count("registered")
    if registered != n_requests or taken != (n_requests if staged else 0):
        raise CheckFailed(f"{n_requests} requests made {registered} registrations and took {taken} slots")
