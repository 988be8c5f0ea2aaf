"""One request inside the scheduler, and what it tells the HTTP layer.

Must never import JAX, read a clock or know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy. seed: both halves of a request must hold the same one."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()

    def first_token_key(self) -> dict[str, object]:
        """The settings that decide the first token: part of the digest (protocol §1)."""
        return {"temperature": self.temperature, "seed": self.seed if self.temperature > 0 else 0}


FinishType = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Finish:
    """Why a request ended well. matched: the token that stopped it."""

    type: FinishType
    matched: int | None = None
    message: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a request ended badly: an HTTP status, a reason from core.reasons, a sentence for the client."""

    status: int
    reason: str
    message: str


@dataclass(frozen=True)
class Output:
    """What a request's sink is called with. Exactly one Output of a request has finish or failure set: its last."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: Finish | None = None
    failure: Failure | None = None


@dataclass
class PhaseTimes:
    """Seconds on this process's clock (or durations that P sent); None: the phase did not happen here."""

    arrived: float = 0.0
    scheduled: float | None = None  # prefill began (P or no PD), or pages were taken (D)
    prefilled: float | None = None
    ready: float | None = None  # D: P's ready arrived
    landed: float | None = None
    scattered: float | None = None
    first_token: float | None = None
    finished: float | None = None
    peer_queue_s: float | None = None
    peer_prefill_s: float | None = None


@dataclass
class Request:
    """rid names it to the client, room to the peer (None without PD). sink is called on the scheduler thread."""

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    sink: Callable[[Output], None]
    room: int | None = None
    bootstrap_host: str = ""
    bootstrap_port: int | None = None
    output_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    cached_tokens: int = 0
