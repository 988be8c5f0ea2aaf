"""Typed errors of the hand-off: each carries room, peer and reason, and says what to do."""

from __future__ import annotations

MAX_LINE_CHARS = 2000  # of an error, before what cannot be printed is written out
CLIENT_LEFT = 499  # the status of a leg whose request was aborted at the other half


class PDError(Exception):
    """status: what the HTTP leg answers (400 bad or duplicate, CLIENT_LEFT, 503 anything that a retry may cure)."""

    def __init__(
        self, message: str, *, reason: str, status: int = 503, room: int | None = None, peer: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.status = status
        self.room = room
        self.peer = peer

    def __str__(self) -> str:
        where = [f"room={self.room}"] * (self.room is not None) + [f"peer={self.peer}"] * bool(self.peer)
        return " ".join([f"{self.reason}:", self.message, *where])


class ConfigError(Exception):
    """A wrong setting: one line that names it and says what to change; the command exits with code 2."""

    def __init__(self, text: str) -> None:
        super().__init__(plain(text))


def plain(text: str) -> str:
    """On one line of a terminal, no endless one, and nothing that it obeys: what it quotes may be a stranger's."""
    if len(text) > MAX_LINE_CHARS:
        text = f"{text[:MAX_LINE_CHARS]} …"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
