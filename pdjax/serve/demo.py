"""``make demo``: one answer through a prefill/decode pair and the router, and the same from a server without PD.

Prints where the time went and ends with 0 only when both answers are equal. Must never compare a failed answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

import httpx
from rich.console import Console
from rich.table import Table

from pdjax.core.errors import ConfigError, plain
from pdjax.serve.children import ChildError
from pdjax.serve.end_request import EndRequest
from pdjax.serve.local import Fleet, Plan
from pdjax.serve.ready import parse_ready
from pdjax.serve.router import KINDS

QUESTION = "Explain in three sentences why the sky is blue."
MAX_TOKENS = 64
ANSWER_TIMEOUT_S = 300.0
# Few sizes, so that a laptop compiles few programs; the same on every node, so that the numbers are comparable.
SMALL = (
    "--context-length",
    "128",
    "--chunked-prefill-size",
    "64",
    "--max-running-requests",
    "2",
    "--num-pages",
    "32",
)

# Row of the table, key in the answer's times, who spent it.
PHASES = (
    ("queue", "queue_s", "P"),
    ("prefill", "prefill_s", "P"),
    ("until P says ready", "ready_s", "D"),
    ("wait for pages", "page_wait_s", "D"),
    ("pull", "pull_s", "D"),
    ("scatter", "scatter_s", "D"),
    ("first token", "first_token_s", "D"),
    ("decode", "decode_s", "D"),
)


@dataclass
class Answer:
    """One streamed chat answer. times: seconds of each phase as the server that generated it measured them."""

    text: str = ""
    finish: str | None = None
    completion_tokens: int = 0
    times: dict[str, float] = field(default_factory=dict)
    client_first_s: float = 0.0
    client_total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        decode = self.times.get("decode_s")
        return (self.completion_tokens - 1) / decode if decode and self.completion_tokens > 1 else None


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream. Raises ConnectionError when it ends without [DONE] or holds an error."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ConnectionError(event["error"]["message"])
            yield event
    raise ConnectionError("the stream ended without [DONE]")


def ask(url: str, question: str, show: Callable[[str], None]) -> Answer:
    """One greedy chat answer, shown as it comes. Raises ConnectionError, httpx.HTTPError."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, began = Answer(), time.monotonic()
    with (
        httpx.Client(trust_env=False, timeout=ANSWER_TIMEOUT_S) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        if response.status_code != 200:
            raise ConnectionError(f"{url} answered {response.status_code}: {response.read().decode()[:500]}")
        for event in events(response):
            _take(answer, event, began, show)
    answer.client_total_s = time.monotonic() - began
    return answer


def _take(answer: Answer, event: dict[str, Any], began: float, show: Callable[[str], None]) -> None:
    if event.get("usage"):
        answer.completion_tokens = event["usage"]["completion_tokens"]
    if "times" in event:
        answer.times = event["times"][0]
    for choice in event["choices"]:
        piece = choice["delta"].get("content")
        if piece:
            answer.client_first_s = answer.client_first_s or time.monotonic() - began
            answer.text += piece
            show(piece)
        answer.finish = choice["finish_reason"] or answer.finish


def table(pair: Answer, plain: Answer) -> Table:
    """Where the time went, milliseconds, both servers side by side."""
    out = Table(title="Where the time went (ms)")
    for heading in ("phase", "spent on", "prefill + decode", "one server"):
        out.add_column(heading, justify="left" if heading in ("phase", "spent on") else "right")

    def cell(seconds: float | None) -> str:
        return "–" if seconds is None else f"{seconds * 1000:.1f}"

    for name, key, where in PHASES:
        out.add_row(name, where, cell(pair.times.get(key)), cell(plain.times.get(key)))
    out.add_section()
    out.add_row("first token", "client", cell(pair.client_first_s), cell(plain.client_first_s))
    out.add_row("whole answer", "client", cell(pair.client_total_s), cell(plain.client_total_s))
    rates = [f"{rate:.1f}" if (rate := one.tokens_per_s) else "–" for one in (pair, plain)]
    out.add_row("tokens per second", "decode", *rates)
    return out


def compare(console: Console, addresses: dict[str, str], question: str) -> bool:
    """Ask both, print the table; whether text, length and end are equal."""
    console.print(f"[bold]{question}[/bold]")
    pair = ask(
        addresses["router"],
        question,
        lambda piece: console.print(piece, end="", markup=False, highlight=False),
    )
    console.print("\n")
    plain = ask(addresses["plain-0"], question, lambda piece: None)
    console.print(table(pair, plain))
    facts = [(one.text, one.completion_tokens, one.finish) for one in (pair, plain)]
    equal = facts[0] == facts[1] and pair.completion_tokens > 0
    if equal:
        console.print(
            f"[green]equal[/green]: both servers gave the same answer of {pair.completion_tokens} tokens"
        )
    else:
        console.print("[red]different[/red]: the server without PD said")
        console.print(plain.text, markup=False)
    return equal


def _log_to(log: IO[str], console: Console) -> Callable[[str], None]:
    """Every line to the log, ready lines also to the reader, who waits."""

    def forward(line: str) -> None:
        log.write(line + "\n")
        log.flush()
        name, _, text = line.partition("] ")
        ready = parse_ready(text)
        if ready is not None:
            console.print(f"  {name.removeprefix('[')} {ready['url']}", highlight=False)

    return forward


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as every command of ours has it."""
        self.exit(2, plain(f"demo: {message}") + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m pdjax.serve.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2 is fetched when it is not there")
    parser.add_argument("--router", default="rust", choices=[kind for kind in KINDS if kind != "none"])
    parser.add_argument("--question", default=QUESTION)
    options = parser.parse_args(argv)
    console = Console()
    stop = EndRequest()
    stop.listen()
    descriptor, path = tempfile.mkstemp(prefix="pdjax-demo-", suffix=".log")
    with os.fdopen(descriptor, "w") as log:
        try:
            if options.model == "smollm2":
                from pdjax.model.fetch import fetch_smollm2

                fetch_smollm2(progress=console.print)
            plan = Plan(model=options.model, plain=1, router=options.router, extra=SMALL)
            with Fleet(plan, stop, _log_to(log, console)) as fleet:
                console.print(
                    "compiling and starting; the first time takes minutes, later ones use the cache"
                )
                console.print(f"  log {path}", highlight=False, soft_wrap=True)
                fleet.start()
                console.print(f"  router {fleet.addresses['router']}\n", highlight=False)
                return 0 if compare(console, fleet.addresses, options.question) else 1
        except (ChildError, ConnectionError, httpx.HTTPError) as error:
            print(f"demo: {error} (log: {path})", file=sys.stderr)
            return error.code if isinstance(error, ChildError) else 1
        except ConfigError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
