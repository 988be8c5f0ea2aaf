"""OpenAI's /v1/completions and /v1/chat/completions.

Must never answer a value that it did not compute: unsupported parameters are refused by name (params.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from pdjax.core.wire import MAX_TOP_LOGPROBS
from pdjax.serve.answer import Plan
from pdjax.serve.calls import Sub
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import ApiError, bad
from pdjax.serve.limits import HttpLimits
from pdjax.serve.logprobs import Wanted, chat_logprobs, completion_logprobs
from pdjax.serve.params import NEUTRAL_OPENAI, boolean, integer, refuse_unsupported
from pdjax.serve.phases import phase_seconds
from pdjax.serve.prompts import build_prompts, texts_or_ids
from pdjax.serve.sampling_fields import OPENAI, Sampling, read_sampling

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat answer may fill the context instead
# A router writes "unknown" when the client names no model (facts/router §2); "default" is sglang's own.
ANY_MODEL = (None, "", "default", "unknown")


def _check_model(body: Mapping[str, Any], engine: Engine) -> None:
    name = body.get("model")
    if name not in ANY_MODEL and name != engine.model_name:
        message = f"model {name!r:.100} is not served here; this server has {engine.model_name!r}"
        raise ApiError(404, message, reason="model_not_found", param="model")


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad("stream_options", "must be an object")
    return boolean(options, "include_usage", "stream_options.")


def _sampling(
    body: Mapping[str, Any], default_max: int | None, engine: Engine, limits: HttpLimits
) -> Sampling:
    refuse_unsupported(body, NEUTRAL_OPENAI)
    return read_sampling(body, OPENAI, limits, default_max=default_max, vocab_size=engine.vocab_size)


def parse_completion(body: dict[str, Any], engine: Engine, limits: HttpLimits) -> Plan:
    """A body of /v1/completions: prompt is a text, texts, token ids, or lists of them."""
    boolean(body, "stream")
    _check_model(body, engine)
    sampling = _sampling(body, DEFAULT_COMPLETION_TOKENS, engine, limits)
    # Routers and old clients write false for "none".
    n_top = None if body.get("logprobs") is False else integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    echo = boolean(body, "echo")
    if echo and n_top is not None and engine.role != "null":
        raise bad(
            "echo",
            "with logprobs it is not served by two halves, since only the prefill side knows those of the prompt: "
            "ask /generate for return_logprob with logprob_start_len 0",
        )
    wanted = Wanted(True, n_top is not None, 0 if echo else None, n_top or 0)
    prompts, _ = texts_or_ids(body.get("prompt"), "prompt", limits)
    count = len(prompts)
    built = build_prompts(body, prompts, [sampling] * count, engine, "prompt", limits, [wanted] * count)
    echoes = [
        one if isinstance(one, str) else engine.tokenizer.decode(one)
        for one in (prompts if echo else ())
        for _ in range(sampling.n)
    ]
    return Plan(built, CompletionDialect(engine, _include_usage(body), sampling.n, n_top, echoes))


def parse_chat(body: dict[str, Any], engine: Engine, limits: HttpLimits) -> Plan:
    """A body of /v1/chat/completions; the model's own chat template makes the prompt."""
    boolean(body, "stream")
    _check_model(body, engine)
    sampling = _sampling(body, None, engine, limits)
    n_top = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    logprobs = boolean(body, "logprobs")
    if n_top and not logprobs:
        raise bad("top_logprobs", "needs logprobs: true")
    try:
        ids = engine.tokenizer.encode_chat(_messages(body.get("messages")))
    except ValueError as error:
        raise bad("messages", str(error)) from error
    wanted = Wanted(True, logprobs, None, n_top or 0)
    built = build_prompts(body, [ids], [sampling], engine, "messages", limits, [wanted])
    return Plan(
        built,
        ChatDialect(engine, _include_usage(body), sampling.n, (n_top or 0) if logprobs else None),
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    """Role and text of each message; content parts of type text are joined, others are refused."""
    if not isinstance(value, list) or not value:
        raise bad("messages", "must be a list with at least one message")
    out = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad("messages", "each message must be an object with a role")
        content = message.get("content")
        if isinstance(content, list):
            texts = [
                part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
            ]
            if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
                raise bad("messages", "only content parts of type text are supported")
            content = "".join(text for text in texts if text is not None)
        if not isinstance(content, str):
            raise bad("messages", "the content of each message must be a text")
        out.append({**message, "content": content})
    return out


class _Dialect:
    """What both kinds share. Usage is D's own count: nothing in it comes from another node.

    n: outputs of each prompt. n_top: likeliest tokens in the log-probabilities, None: none are answered.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, engine: Engine, include_usage: bool, n: int, n_top: int | None) -> None:
        model = engine.model_name
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = engine.tokenizer
        self._include_usage = include_usage
        self._n = n
        self._n_top = n_top
        self._told: dict[int, int] = {}  # output → how many of its tokens a chunk has told the logprobs of

    def _choice(self, sub: Sub) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choices(self, sub: Sub, piece: str) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def _fresh(self, sub: Sub) -> slice:
        """The output tokens that no chunk has told of: text that is held back delays its tokens, too."""
        start = self._told.get(sub.index, 0)
        self._told[sub.index] = len(sub.output_ids)
        return slice(start, len(sub.output_ids))

    def whole(self, subs: list[Sub]) -> Any:
        return {
            **self._head,
            "object": self.kind,
            "choices": [self._choice(sub) for sub in subs],
            "usage": _usage(subs, self._n),
            "times": _times(subs),
        }

    def frames(self, sub: Sub, piece: str) -> Iterable[Mapping[str, Any]]:
        for choice in self._chunk_choices(sub, piece):
            frame = {**self._head, "object": self.chunk_kind, "choices": [choice], "usage": None}
            if choice["finish_reason"] is not None:
                frame["times"] = _times([sub])
            yield frame

    def tail(self, subs: list[Sub]) -> Iterable[Mapping[str, Any]]:
        if self._include_usage:
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": _usage(subs, self._n)}


class CompletionDialect(_Dialect):
    """echoes: the prompt's text before each output, or nothing."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, engine: Engine, include_usage: bool, n: int, n_top: int | None, echoes: list[str]
    ) -> None:
        super().__init__(engine, include_usage, n, n_top)
        self._echoes = dict(enumerate(echoes))
        self._offsets: dict[int, int] = {}  # output → characters of the tokens told of

    def _choice(self, sub: Sub) -> dict[str, Any]:
        return self._text_choice(sub, sub.text)

    def _chunk_choices(self, sub: Sub, piece: str) -> Iterable[dict[str, Any]]:
        if piece or sub.ended is not None or sub.index in self._echoes:
            yield self._text_choice(sub, piece)

    def _text_choice(self, sub: Sub, text: str) -> dict[str, Any]:
        """The prompt goes before the first text of its output, once."""
        echo = self._echoes.pop(sub.index, None)
        logprobs = None if self._n_top is None else self._logprobs(sub, self._n_top, echo is not None)
        return {
            "index": sub.index,
            "text": (echo or "") + text,
            "logprobs": logprobs,
            "finish_reason": _reason(sub),
        }

    def _logprobs(self, sub: Sub, n_top: int, echo: bool) -> dict[str, Any]:
        offset = self._offsets.get(sub.index, 0)
        told = completion_logprobs(sub, self._fresh(sub), n_top, self._tokenizer, echo=echo, offset=offset)
        self._offsets[sub.index] = offset + sum(map(len, told["tokens"]))
        return told


class ChatDialect(_Dialect):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, engine: Engine, include_usage: bool, n: int, n_top: int | None) -> None:
        super().__init__(engine, include_usage, n, n_top)
        self._spoke: set[int] = set()

    def _choice(self, sub: Sub) -> dict[str, Any]:
        message = {"role": "assistant", "content": sub.text}
        return {
            "index": sub.index,
            "message": message,
            "logprobs": self._logprobs(sub),
            "finish_reason": _reason(sub),
        }

    def _chunk_choices(self, sub: Sub, piece: str) -> Iterable[dict[str, Any]]:
        """The role goes out with the first token, not before: it would pass for one in a time-to-first-token."""
        base = {"index": sub.index, "logprobs": None}
        if sub.index not in self._spoke:
            self._spoke.add(sub.index)
            yield {**base, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        if piece:
            logprobs = self._logprobs(sub)
            yield {**base, "delta": {"content": piece}, "logprobs": logprobs, "finish_reason": None}
        if sub.ended is not None:
            untold = self._told.get(sub.index, 0) < len(sub.output_ids)
            yield {
                **base,
                "delta": {},
                "logprobs": self._logprobs(sub) if untold else None,
                "finish_reason": _reason(sub),
            }

    def _logprobs(self, sub: Sub) -> dict[str, Any] | None:
        if self._n_top is None:
            return None
        return chat_logprobs(sub, self._fresh(sub), self._n_top, self._tokenizer)


def _reason(sub: Sub) -> str | None:
    return sub.finish.type if sub.finish is not None else None


def _usage(subs: list[Sub], n: int) -> dict[str, Any]:
    """A prompt counts once, however many outputs it has."""
    prompts = subs[::n]
    prompt = sum(len(sub.request.prompt_ids) for sub in prompts)
    completion = sum(len(sub.output_ids) for sub in subs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(sub.request.cached_tokens for sub in prompts)},
    }


def _times(subs: list[Sub]) -> list[dict[str, float]]:
    """Where the time went, one entry for each choice. No field of OpenAI's: clients pass it over, or keep it as an extra.

    (``metadata`` is one, of texts: their client warns of anything else in it.)
    """
    return [phase_seconds(sub.request.times) for sub in subs]
