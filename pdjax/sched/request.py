"""One request inside the scheduler, and what it tells the HTTP layer.

Must never import JAX, read a clock or know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from pdjax.engine.ports import Sampled


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are drawn, and which of them end it. docs/api.md says what each means to a client.

    temperature 0 is greedy. seed: both halves of a request must hold the same one. top_k 0: every token.
    grammar: names the form that the text must have, for the digest; Request.grammar enforces it. top_logprobs: how
    many likeliest tokens are listed beside each. prompt_logprobs_from: the prompt's tokens after this position get a
    log-probability, too.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None

    @property
    def penalises(self) -> bool:
        """Tokens that were said before are drawn more or less often."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def follows_output(self) -> bool:
        """The tokens before it decide how the next one is drawn, beside the model itself."""
        return bool(self.penalises or self.min_new_tokens or self.grammar)

    def first_token_key(self) -> dict[str, object]:
        """What decides the first token and what P says of it: part of the digest (protocol §1).

        Penalties do not: nothing has been said yet.
        """
        draws = self.temperature > 0
        ends = bool(self.min_new_tokens)  # then they may not come first
        return {
            "temperature": self.temperature,
            "seed": self.seed if draws else 0,
            "cut": [self.top_p, self.top_k, self.min_p] if draws else [],
            "bias": sorted(self.logit_bias),
            "banned": sorted(self.stop_token_ids) if ends else [],
            "bans": ends,
            "grammar": self.grammar,
            "top_logprobs": self.top_logprobs,
        }


class Grammar(Protocol):
    """Which tokens may come next in one growing text. For one request: it moves with every token."""

    @property
    def complete(self) -> bool:
        """The text is whole and nothing may follow it."""

    def allowed(self) -> np.ndarray:
        """uint32 [ceil(vocab_size / 32)], as engine.ports.SampleSpec has it. Raises PDError 400: it cannot go on."""

    def accept(self, token: int) -> None:
        """Raises ValueError if the token is not allowed, PDError 400 if it was and the text cannot go on."""


TopLogprobs = tuple[tuple[int, float], ...]
FinishType = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Finish:
    """Why a request ended well. matched: the token that stopped it, or the text that its last token completed."""

    type: FinishType
    matched: int | str | None = None
    message: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a request ended badly: an HTTP status, a reason from core.reasons, a sentence for the client."""

    status: int
    reason: str
    message: str


@dataclass(frozen=True)
class Output:
    """What a request's sink is called with. Exactly one Output of a request has finish or failure set: its last.

    tops: the likeliest tokens at each new token's position, with log-probabilities. prompt: the prompt's own tokens
    that were to be scored, beside the first output token.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[TopLogprobs, ...] = ()
    prompt: tuple[Sampled, ...] = ()
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
    """rid names it to the client, room to the peer (None without PD). sink is called on the scheduler thread.

    find_stop: called with each output token in turn, answers the stop text that it completes. Like the grammar it
    belongs to this request alone and to the scheduler thread.
    """

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    sink: Callable[[Output], None]
    room: int | None = None
    bootstrap_host: str = ""
    bootstrap_port: int | None = None
    grammar: Grammar | None = None
    find_stop: Callable[[int], str | None] | None = None
    output_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    cached_tokens: int = 0
