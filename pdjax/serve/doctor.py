"""``pdjax doctor``: would a server with these flags start, be found, and fit its peers? Asked before it is started.

Every check is a row: what was looked at, what was found, what to do. Must never disturb what runs: it sends a byte to
no transfer port, since a few stray ones can end that process (facts/transfer row 15).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from pdjax.engine.bootstrap.asking import Blocking, NoAnswer, http_client, read
from pdjax.serve.args import ServeArgs

T = TypeVar("T")
Status = Literal["ok", "warn", "fail"]
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
PIPED_COLUMNS = 160
TIMEOUT_S = 3.0  # of each connection that a check tries


@dataclass(frozen=True)
class Finding:
    """advice: what to do, "" when nothing has to be done."""

    check: str
    status: Status
    found: str
    advice: str = ""


Checks = Iterator[Finding]


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, "warn", found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, "fail", found, advice)


def client_of(args: ServeArgs, key: str) -> Blocking:
    """For requests to processes of this deployment. key: their bearer key, "" for none."""
    return Blocking(http_client(key, args.believed()))


def ask_for(http: Blocking, url: str, schema: type[T], **query: str) -> T:
    """The JSON at url. Raises NoAnswer."""
    try:
        status, body = http.ask("GET", url, limit_s=TIMEOUT_S, params=query)
        if status != 200:
            raise NoAnswer(f"answers {status}")
        return read(body, schema)
    except NoAnswer as error:
        raise NoAnswer(f"{url}: {error}") from None


def ask(http: Blocking, url: str) -> dict[str, Any]:
    """The JSON object at url. Raises NoAnswer."""
    return ask_for(http, url, dict[str, Any])


def state_of(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """internal_states[0] of a /server_info."""
    states = info.get("internal_states")
    return states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}


def examine(args: ServeArgs, *, model_known: bool) -> list[Finding]:
    """All checks of checked flags. model_known: --model was given, so that its fingerprint can be computed (it reads the weights)."""
    from pdjax.serve import doctor_local, doctor_peers

    steps: Sequence[Callable[[], Checks]] = (
        doctor_local.versions,
        lambda: doctor_local.ports(args),
        lambda: doctor_local.addresses(args),
        lambda: doctor_local.limits(args),
        lambda: doctor_peers.registry(args, model_known),
        lambda: doctor_peers.routers(args),
    )
    return [finding for step in steps for finding in step()]


def report(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print them; the exit code: 1 when anything would not work."""
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
        return int(failed)
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "check", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for one in findings:
        table.add_row(
            f"[{COLOURS[one.status]}]{one.status}[/]", *map(_plain, (one.check, one.found, one.advice))
        )
    Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS).print(table)
    return int(failed)


def _plain(text: str) -> str:
    """Brackets of an address are no markup."""
    return text.replace("[", r"\[")
