"""Text of one output while its tokens come, and the stop strings in it.

The scheduler asks ``StopFinder`` after every token (a request must end with the token that completes a stop string,
on D also when that is P's first one); the HTTP layer writes the text with ``TextOut``. Both decode the same tokens
the same way. Must never give out a character that may turn out to belong to a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdjax.sched.request import Finish
from pdjax.serve.engine_api import Detokenizer


@dataclass(frozen=True)
class TextOptions:
    """What a client may say about its text. no_stop_trim: what ended it stays in it."""

    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True


DEFAULTS = TextOptions()


class StopFinder:
    """Called with each output token in turn: the stop string that it completes, the leftmost if there are several."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._kept_chars = max(map(len, self._stop)) - 1
        self._tail = ""

    def __call__(self, token: int) -> str | None:
        text = self._tail + self._detokenizer.push([token])
        found = [(text.find(stop), i) for i, stop in enumerate(self._stop) if stop in text]
        self._tail = text[len(text) - self._kept_chars :] if self._kept_chars < len(text) else text
        return self._stop[min(found)[1]] if found else None


class TextOut:
    """The text of one output so far. ``push`` returns what a stream may send now."""

    def __init__(self, detokenizer: Detokenizer, options: TextOptions) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._options = options
        self._held = ""  # may begin a stop string

    def push(self, ids: Sequence[int], finish: Finish | None, ended: bool) -> str:
        """New tokens; finish is set when they end the text well, ended when nothing follows them."""
        ids = list(ids)
        matched = None if finish is None or self._options.no_stop_trim else finish.matched
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids.pop()
        text = self._held + (self._detokenizer.push(ids) if ids else "")
        if ended:
            text += self._detokenizer.finish()
            self._held = ""
            if isinstance(matched, str) and matched in text:
                text = text[: text.index(matched)]
        else:
            n = 0 if self._options.no_stop_trim else _begun(text, self._options.stop)
            text, self._held = text[: len(text) - n], text[len(text) - n :]
        self.text += text
        return text


def _begun(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of text are the beginning of a stop string, and not the whole of it."""
    most = max((len(one) for one in stop), default=1) - 1
    return next(
        (n for n in range(min(most, len(text)), 0, -1) if any(one.startswith(text[-n:]) for one in stop)), 0
    )
