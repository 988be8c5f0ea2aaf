"""What the HTTP layer needs from an engine and its tokenizer: node.py implements it, tests script it.

Must never import JAX: a server can be tested without a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from pdjax.engine.ports import LookupDone
from pdjax.sched.request import Grammar, Request
from pdjax.serve.numbers import Numbers

Role = Literal["null", "prefill", "decode"]


class Detokenizer(Protocol):
    """Text of one growing token sequence: the pieces join to ``decode`` of the whole."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(Protocol):
    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's turn. Raises ValueError when the template refuses."""

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer: ...

    def json_grammar(self, schema: str) -> Grammar:
        """For one request. Raises ValueError with a message for the client, also when no library is installed."""


class Engine(Protocol):
    """One node: a scheduler, its model, and in PD mode its manager. Every method may be called from any thread.

    role: "null" without PD. context_length: longest prompt + output in tokens. model_info: what /model_info and
    /server_info add as they are (model_path, model_type, architectures, weight_version, page_size, ...).
    draining: it takes nothing new. serving_url: where clients reach it. bootstrap_port: the port of the registry that this node uses, None without PD. disable_radix_cache: no prompt reads
    what was computed for another one.
    """

    role: Role
    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    model_name: str
    model_info: Mapping[str, Any]
    bootstrap_port: int | None
    draining: bool
    serving_url: str
    disable_radix_cache: bool

    def submit(self, req: Request) -> None:
        """Claim the room and queue the request. Raises PDError (400 duplicate or bad, 503 full or draining)."""

    def abort(self, rid: str) -> int:
        """End every request of exactly this ``Request.rid``, and P's hand-offs of it. An unknown rid changes nothing.

        An aborted request still gets its last Output (finish.type "abort", or a failure). How many rooms live with
        this rid, those included whose request has had its answer.
        """

    def abort_all(self) -> int:
        """The same for every request."""

    def abort_request(self, req: Request) -> None:
        """End this very request, whoever shares its rid. Its hand-off goes on once it has had its answer."""

    def info(self) -> Mapping[str, Any]:
        """Numbers for operators, at least num_running, num_waiting, num_tokens (KV tokens in use), free_pages.

        Further numbers (queue lengths, counters, per-peer state) are passed on as they are.
        """

    def numbers(self) -> Numbers:
        """What the node counts, for /metrics."""

    def rooms(self, limit: int, room: int | None) -> Mapping[str, Any]:
        """Live rooms, at most limit of them, with what each waits for; or that one room. For /debug/rooms."""

    def ready(self) -> bool:
        """Requests can be served: loaded, not draining and, in PD mode, a compatible peer is listed."""

    def passed(self) -> int:
        """How many requests have gone through so far: in PD mode hand-offs that succeeded, else answers."""

    def peers(self) -> Future[LookupDone]:
        """Instances of the other role that fit and take requests, as the registry has them now."""

    def ask_to_drain(self) -> None:
        """Take nothing new, finish what is here, then end the process. Returns at once; repeatable."""

    def failed(self) -> str | None:
        """Which thread has died and of what, or None while all live. Makes /health answer 503."""

    def pause(self, paused: bool) -> Future[None]:
        """Compute nothing until pause(False); done when no output comes any more, or when work goes on."""

    def refuse_rooms(self, rooms: Sequence[int]) -> None:
        """The HTTP layer refuses these rooms' requests as wrong: the other halves must not wait for them."""

    def flush_cache(self, timeout_s: float) -> Future[bool]:
        """Empty the prefix cache when no request is here, waiting at most timeout_s for that. False: one still was."""
