"""What a server without PD answers: the right tokens of every request of a campaign.

Must never be asked for anything but greedy tokens, which repeat exactly (README, what is promised).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import httpx

from pdjax.campaign.express import CONTEXT_TOKENS
from pdjax.campaign.fleet import POLL_S, PROGRAM, START_S
from pdjax.serve.children import Child, ChildError, end_all
from pdjax.serve.router import router_environ
from pdjax.sim.trace_types import Trace
from pdjax.sim.verdict import prompt_tokens

VOCABULARY = 512  # of the tiny model
SPECIAL = 3  # its first ids stand for no text


class Reference:
    """``async with``. One plain server for any number of files; answers are kept."""

    def __init__(self, model: str = "tiny") -> None:
        self._model = model
        self._known: dict[tuple[Any, ...], list[int]] = {}
        self._output: list[str] = []
        self._child: Child | None = None
        self._http = httpx.AsyncClient(trust_env=False, timeout=60.0)

    async def __aenter__(self) -> Reference:
        command = [*PROGRAM, "serve", "--model", self._model, "--port", "0", "--drain-linger", "0"]
        command += [
            "--context-length",
            str(CONTEXT_TOKENS),
            "--num-pages",
            "512",
            "--max-running-requests",
            "4",
        ]
        environ = router_environ("127.0.0.1", dict(os.environ))
        self._child = Child("reference", command, environ, self._output.append)
        return self

    async def _url(self) -> str:
        assert self._child is not None
        deadline = time.monotonic() + START_S
        while self._child.ready is None:
            self._child.check()
            if time.monotonic() > deadline:
                raise ChildError(f"the reference server did not start within {START_S:g} s")
            await asyncio.sleep(POLL_S)
        return str(self._child.ready["url"])

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        if self._child is not None:
            await asyncio.to_thread(end_all, [self._child])

    async def of(self, value: Mapping[str, Any], trace: Trace) -> tuple[list[int], dict[str, Any], list[int]]:
        """(prompt, sampling_params, right tokens) of a request of that file."""
        prompt = prompt_of(value, trace)
        most = min(_context(value, trace), CONTEXT_TOKENS) - len(prompt)
        sampling: dict[str, Any] = {
            "temperature": 0, "max_new_tokens": value["output"], "ignore_eos": True
        }  # fmt: skip
        if most < 1:
            return prompt, sampling, []  # no server takes it
        if "eos" in value:
            whole = await self.tokens(prompt, sampling)
            sampling["stop_token_ids"] = [whole[value["eos"] - 1]]
        cut = {**sampling, "max_new_tokens": min(value["output"], most)}
        return prompt, sampling, await self.tokens(prompt, cut)

    async def tokens(self, prompt: list[int], sampling: Mapping[str, Any]) -> list[int]:
        key = (*prompt, -1, *sorted((name, str(v)) for name, v in sampling.items()))
        if key not in self._known:
            body = {"input_ids": prompt, "sampling_params": dict(sampling)}
            answer = await self._http.post(f"{await self._url()}/generate", json=body)
            answer.raise_for_status()
            self._known[key] = answer.json()["output_ids"]
        return self._known[key]


def _context(value: Mapping[str, Any], trace: Trace) -> int:
    """Tokens that D's context holds: it ends the output."""
    return next(spec for spec in trace.nodes if spec.name == value["decode"]).config.context_length


def prompt_of(value: Mapping[str, Any], trace: Trace) -> list[int]:
    """Token ids of the tiny model that only this rid has, after those that it shares with another."""
    own = [
        SPECIAL + t % (VOCABULARY - SPECIAL) for t in prompt_tokens(value["rid"], trace.seed, value["prompt"])
    ]
    if "prefix" in value:
        other = next(
            s.value for s in trace.steps if s.action == "request" and s.value["rid"] == value["prefix"]["rid"]
        )
        shared = prompt_of(other, trace)[: value["prefix"]["tokens"]]
        own[: len(shared)] = shared
    return own
