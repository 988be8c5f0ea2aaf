"""The two ways to ask: sglang's /generate and OpenAI's /v1/completions, both as streams.

A dialect makes the body of a request and reads one event of its stream. Must never count a token twice: sglang's
frames carry everything so far, OpenAI's only the new piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pdjax.bench.workload import Job, prompt_ids, prompt_text


@dataclass
class Progress:
    """What a stream has told so far. n_cached: prompt tokens that the server did not compute."""

    n_output: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    aborted: bool = False


class Dialect(Protocol):
    path: str

    def body(self, job: Job) -> dict[str, Any]: ...

    def read(self, event: dict[str, Any], progress: Progress) -> int:
        """Note what the event says; how many output tokens it brings. Raises KeyError, TypeError or IndexError for an
        event of another shape."""


@dataclass
class Generate:
    """Exact token ids: the prompt's length is what was asked."""

    vocab_size: int
    seed: int
    path = "/generate"

    def body(self, job: Job) -> dict[str, Any]:
        return {
            "input_ids": prompt_ids(job, self.vocab_size, self.seed),
            "sampling_params": {"max_new_tokens": job.n_output, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }

    def read(self, event: dict[str, Any], progress: Progress) -> int:
        info = event["meta_info"]
        before, progress.n_output = progress.n_output, int(info["completion_tokens"])
        progress.n_prompt = int(info["prompt_tokens"])
        progress.n_cached = int(info.get("cached_tokens") or 0)
        progress.aborted = (info.get("finish_reason") or {}).get("type") == "abort"
        return progress.n_output - before


@dataclass
class Completions:
    """Text: the rust router answers 422 to token ids here (facts/router §8.7)."""

    model: str
    seed: int
    path = "/v1/completions"

    def body(self, job: Job) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt_text(job, self.seed),
            "max_tokens": job.n_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: dict[str, Any], progress: Progress) -> int:
        usage = event.get("usage")
        if usage is not None:
            progress.n_prompt = int(usage["prompt_tokens"])
            progress.n_output = int(usage["completion_tokens"])
            progress.n_cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if not event["choices"]:
            return 0
        progress.aborted = event["choices"][0].get("finish_reason") == "abort"
        progress.n_output += usage is None
        return 1
