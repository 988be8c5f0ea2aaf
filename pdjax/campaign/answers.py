"""What an instance answers to ``/generate``, whole or as a stream, read in one place for every client of the campaigns.

Must never take an answer for whole that has no finish reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = "[DONE]"


@dataclass(frozen=True)
class Answer:
    """status: of HTTP, or of an error event; 0: the answer ended without an end. tokens, finish: one for each sample."""

    status: int
    reason: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)

    @property
    def aborted(self) -> bool:
        return "abort" in self.finish


def read_whole(status: int, content: bytes) -> Answer:
    """An answer that is not a stream, or that refuses one."""
    body = msgspec.json.decode(content)
    if status != 200:
        return Answer(status, body["error"]["reason"])
    return _of_results(body if isinstance(body, list) else [body])


def refusal(status: int, content: bytes) -> str:
    """Why a request was refused, as one of ours says it; "" of a router that says it itself."""
    try:
        return read_whole(status, content).reason
    except (msgspec.MsgspecError, LookupError, TypeError):
        return ""


class Stream:
    """A stream, line by line. sglang's frames are cumulative; an error event is D's answer with its own status."""

    def __init__(self) -> None:
        self._newest: dict[int, Any] = {}
        self._error: Answer | None = None

    def take(self, line: str) -> bool:
        """False: it was an error event, and nothing that follows counts."""
        data = line.removeprefix("data: ")
        if line and data != DONE:
            frame = msgspec.json.decode(data)
            if "error" in frame:
                self._error = Answer(frame["error"]["code"], frame["error"]["reason"])
                return False
            self._newest[frame.get("index", 0)] = frame
        return True

    def answer(self) -> Answer:
        """What the lines so far say, if they were the last."""
        if self._error is not None:
            return self._error
        results = [self._newest[index] for index in sorted(self._newest)]
        if not results or any(result["meta_info"]["finish_reason"] is None for result in results):
            return Answer(0, "connection_reset")
        return _of_results(results)


def read_stream(text: str) -> Answer:
    """A stream that has come as a whole."""
    stream = Stream()
    all(stream.take(line) for line in text.splitlines())
    return stream.answer()


def _of_results(results: list[Any]) -> Answer:
    finish = [result["meta_info"]["finish_reason"]["type"] for result in results]
    reason = "client_abort" if "abort" in finish else ""
    return Answer(200, reason, [result["output_ids"] for result in results], finish)
