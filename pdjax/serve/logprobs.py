"""Log-probabilities as clients ask for them and as each API writes them.

What is not known here is not made up: D knows nothing of a prompt's own tokens and answers an empty list, to which
the router adds P's (facts/router §3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdjax.core.wire import MAX_TOP_LOGPROBS
from pdjax.sched.request import TopLogprobs
from pdjax.serve.calls import Sub
from pdjax.serve.engine_api import Tokenizer
from pdjax.serve.errors import bad
from pdjax.serve.params import UINT64, boolean, integer

BROKEN = "�"  # in the text of a token that is only a part of a character


@dataclass(frozen=True)
class Wanted:
    """What one prompt's answer lists. start: the prompt's tokens from there on; None: only output tokens.

    listed: the body speaks of logprobs at all, and mini wants a list of input logprobs then (facts/router §3.1).
    """

    listed: bool = False
    logprobs: bool = False
    start: int | None = None
    n_top: int = 0
    texts: bool = False

    @property
    def scores_from(self) -> int | None:
        """The position after which the prompt's own tokens are scored."""
        return self.start if self.logprobs else None


def read_wanted(body: Mapping[str, Any], count: int) -> list[Wanted]:
    """One for each prompt of a /generate body: each field is one value, or a list with one for each prompt."""
    texts = boolean(body, "return_text_in_logprobs")
    names = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    columns = [_for_each_prompt(body, name, count) for name in names]
    return [
        _wanted(dict(zip(names, row, strict=True)), "return_logprob" in body, texts)
        for row in zip(*columns, strict=True)
    ]


def _for_each_prompt(body: Mapping[str, Any], name: str, count: int) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list) or not value:
        return [None if value == [] else value] * count
    if len(value) != count:
        raise bad(name, f"has {len(value)} entries for {count} prompt{'s' * (count != 1)}")
    return value


def _wanted(row: Mapping[str, Any], listed: bool, texts: bool) -> Wanted:
    start = integer(row, "logprob_start_len", -1, UINT64)
    n_top = integer(row, "top_logprobs_num", 0, MAX_TOP_LOGPROBS) or 0
    if not boolean(row, "return_logprob"):
        return Wanted(listed=listed)
    return Wanted(
        listed=listed,
        logprobs=True,
        start=None if start is None or start == -1 else start,
        n_top=n_top,
        texts=texts,
    )


# ---------------------------------------------------------------- sglang


class ListedLogprobs:
    """The lists in one output's ``meta_info`` while it grows. Each entry is made and written as JSON once.

    A stream repeats all of them in every frame: made anew each time, the lists of a few hundred tokens would keep the
    event loop, and with it every other request and /health, for seconds.
    Entries are [log-probability, token id, text or null]; lists of the likeliest hold such entries, best first.
    """

    def __init__(self, wanted: Wanted, prompt_ids: Sequence[int], tokenizer: Tokenizer, role: str) -> None:
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._n_scored = 0  # of the prompt's tokens: listed already
        self._scores = wanted.logprobs and wanted.start is not None and role != "decode"
        self._lists: dict[str, list[msgspec.Raw | None]] = (
            {"input_token_logprobs": []} if wanted.listed else {}
        )
        if wanted.logprobs:
            self._lists["output_token_logprobs"] = []
            if wanted.n_top:
                self._lists |= {"input_top_logprobs": [], "output_top_logprobs": []}
        if self._scores:
            # The first token has no logprob, as in sglang: nothing before it is looked at.
            for token in prompt_ids[wanted.start or 0 :][:1]:
                self._lists["input_token_logprobs"].append(_json(self._entry(None, token)))
                if wanted.n_top:
                    self._lists["input_top_logprobs"].append(None)

    def meta_info(self, sub: Sub) -> Mapping[str, Sequence[msgspec.Raw | None]]:
        """Every list that was asked for, up to now; empty when the body does not speak of logprobs."""
        if not self._wanted.logprobs:
            return self._lists
        if self._scores:
            for one in sub.prompt[self._n_scored :]:
                self._add("input", one.logprob, one.token, one.top)
            self._n_scored = len(sub.prompt)
        n = len(self._lists["output_token_logprobs"])
        for token, logprob, top in _rows(sub, slice(n, None)):
            self._add("output", logprob, token, top)
        return self._lists

    def _add(self, side: str, logprob: float, token: int, top: TopLogprobs) -> None:
        self._lists[f"{side}_token_logprobs"].append(_json(self._entry(logprob, token)))
        if self._wanted.n_top:
            listed = [self._entry(p, likely) for likely, p in top]
            self._lists[f"{side}_top_logprobs"].append(_json(listed))

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, self._tokenizer.decode([token], False) if self._wanted.texts else None]


def _json(content: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(content))


# ---------------------------------------------------------------- OpenAI


def _label(token: int, tokenizer: Tokenizer) -> str:
    """Its text; its id where it has none of its own."""
    text = tokenizer.decode([token], False)
    return f"token_id:{token}" if BROKEN in text else text


def chat_logprobs(sub: Sub, tokens: slice, n_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat, for these output tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _label(token, tokenizer)
        known = not text.startswith("token_id:")
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if known else None}

    content = [
        {**entry(token, logprob), "top_logprobs": [entry(t, p) for t, p in top[:n_top]]}
        for token, logprob, top in _rows(sub, tokens)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    sub: Sub, tokens: slice, n_top: int, tokenizer: Tokenizer, *, echo: bool, offset: int = 0
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion, for these output tokens; with echo the whole prompt before them.

    offset: characters before the first of them. The drawn token is listed among the likeliest even if it is not.
    """
    rows: list[tuple[int, float | None, TopLogprobs]] = [*_rows(sub, tokens)]
    if echo:
        prompt = [(s.token, s.logprob, s.top) for s in sub.prompt]
        rows = [(sub.request.prompt_ids[0], None, ()), *prompt, *rows]
    labels = [_label(token, tokenizer) for token, _, _ in rows]
    offsets = []
    for label in labels:
        offsets.append(offset)
        offset += len(label)
    top: list[Any] = [
        None if logprob is None else {_label(t, tokenizer): p for t, p in (*top[:n_top], (token, logprob))}
        for token, logprob, top in rows
    ]
    return {
        "tokens": labels,
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "top_logprobs": top if n_top else None,
        "text_offset": offsets,
    }


def _rows(sub: Sub, tokens: slice) -> Sequence[tuple[int, float, TopLogprobs]]:
    return list(zip(sub.output_ids[tokens], sub.logprobs[tokens], sub.tops[tokens], strict=True))
