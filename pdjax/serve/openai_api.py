"""OpenAI's /v1/completions and /v1/chat/completions.

Must never answer a value that it did not compute: unsupported parameters are refused by name (params.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from pdjax.serve.answer import HttpLimits, Plan
from pdjax.serve.calls import Sub
from pdjax.serve.engine_api import Engine
from pdjax.serve.errors import ApiError, bad
from pdjax.serve.params import (
    NEUTRAL_OPENAI,
    UINT64,
    Sampling,
    boolean,
    integer,
    refuse_unsupported,
    seed_of,
    stop_ids,
    temperature,
)
from pdjax.serve.phases import phase_seconds
from pdjax.serve.prompts import build_prompts, texts_or_ids

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


def _sampling(body: Mapping[str, Any], default_max: int | None) -> Sampling:
    refuse_unsupported(body, NEUTRAL_OPENAI)
    asked = integer(body, "max_completion_tokens", 1, UINT64)
    if asked is None:
        asked = integer(body, "max_tokens", 1, UINT64)
    return Sampling(
        max_new_tokens=default_max if asked is None else asked,
        temperature=temperature(body),
        seed=seed_of(body, ("seed", "sampling_seed")),
        ignore_eos=boolean(body, "ignore_eos"),
        stop_token_ids=stop_ids(body),
    )


def parse_completion(body: dict[str, Any], engine: Engine, limits: HttpLimits) -> Plan:
    """A body of /v1/completions: prompt is a text, texts, token ids, or lists of them."""
    boolean(body, "stream")
    _check_model(body, engine)
    sampling = _sampling(body, DEFAULT_COMPLETION_TOKENS)
    prompts, _ = texts_or_ids(body.get("prompt"), "prompt", limits)
    built = build_prompts(body, prompts, [sampling] * len(prompts), engine, "prompt")
    return Plan(built, CompletionDialect(engine.model_name, _include_usage(body)))


def parse_chat(body: dict[str, Any], engine: Engine, limits: HttpLimits) -> Plan:
    """A body of /v1/chat/completions; the model's own chat template makes the prompt."""
    boolean(body, "stream")
    _check_model(body, engine)
    sampling = _sampling(body, None)
    try:
        ids = engine.tokenizer.encode_chat(_messages(body.get("messages")))
    except ValueError as error:
        raise bad("messages", str(error)) from error
    built = build_prompts(body, [ids], [sampling], engine, "messages")
    return Plan(built, ChatDialect(engine.model_name, _include_usage(body)))


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
    """What both kinds share. Usage is D's own count: nothing in it comes from another node."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, include_usage: bool) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def _choice(self, sub: Sub) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choices(self, sub: Sub, piece: str) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def whole(self, subs: list[Sub]) -> Any:
        return {
            **self._head,
            "object": self.kind,
            "choices": [self._choice(sub) for sub in subs],
            "usage": _usage(subs),
            "metadata": _metadata(subs),
        }

    def frames(self, sub: Sub, piece: str) -> Iterable[Mapping[str, Any]]:
        for choice in self._chunk_choices(sub, piece):
            frame = {**self._head, "object": self.chunk_kind, "choices": [choice], "usage": None}
            if choice["finish_reason"] is not None:
                frame["metadata"] = _metadata([sub])
            yield frame

    def tail(self, subs: list[Sub]) -> Iterable[Mapping[str, Any]]:
        if self._include_usage:
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": _usage(subs)}


class CompletionDialect(_Dialect):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, sub: Sub) -> dict[str, Any]:
        return _text_choice(sub, sub.text)

    def _chunk_choices(self, sub: Sub, piece: str) -> Iterable[dict[str, Any]]:
        if piece or sub.ended is not None:
            yield _text_choice(sub, piece)


class ChatDialect(_Dialect):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, include_usage: bool) -> None:
        super().__init__(model, include_usage)
        self._spoke = False

    def _choice(self, sub: Sub) -> dict[str, Any]:
        message = {"role": "assistant", "content": sub.text}
        return {"index": sub.index, "message": message, "logprobs": None, "finish_reason": _reason(sub)}

    def _chunk_choices(self, sub: Sub, piece: str) -> Iterable[dict[str, Any]]:
        """The role goes out with the first token, not before: it would pass for one in a time-to-first-token."""
        base = {"index": sub.index, "logprobs": None}
        if not self._spoke:
            self._spoke = True
            yield {**base, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        if piece:
            yield {**base, "delta": {"content": piece}, "finish_reason": None}
        if sub.ended is not None:
            yield {**base, "delta": {}, "finish_reason": _reason(sub)}


def _text_choice(sub: Sub, text: str) -> dict[str, Any]:
    return {"index": sub.index, "text": text, "logprobs": None, "finish_reason": _reason(sub)}


def _reason(sub: Sub) -> str | None:
    return sub.finish.type if sub.finish is not None else None


def _usage(subs: list[Sub]) -> dict[str, Any]:
    prompt = sum(len(sub.request.prompt_ids) for sub in subs)
    completion = sum(len(sub.output_ids) for sub in subs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(sub.request.cached_tokens for sub in subs)},
    }


def _metadata(subs: list[Sub]) -> dict[str, Any]:
    """Where the time went, one entry for each choice (not part of OpenAI's API; clients ignore it)."""
    return {"times": [phase_seconds(sub.request.times) for sub in subs]}
