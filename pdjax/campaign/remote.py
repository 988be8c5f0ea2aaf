"""The harness's end of a process's fault socket: commands with answers, and what the process says by itself.

Must never be used from two event loops, nor wait for a process without a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

ANSWER_S = 30.0
MAX_LINE_BYTES = 8 << 20


class RemoteError(Exception):
    """A process refused a command, or has gone. The text says which."""


class Remote:
    """One process. heard(what): its hits and the rules that have acted."""

    def __init__(self, name: str, heard: Callable[[Remote, dict[str, Any]], None]) -> None:
        self.name = name
        self._heard = heard
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, path: str) -> None:
        reader, self._writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
        self._reader = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                said = msgspec.json.decode(line)
                waiting = self._waiting.pop(said.get("id"), None)
                if waiting is None:
                    self._heard(self, said)
                elif "error" in said:
                    waiting.set_exception(RemoteError(f"{self.name}: {said['error']}"))
                else:
                    waiting.set_result(said.get("result"))
        except ConnectionError:
            pass  # the process was killed: whoever waits is told below
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(RemoteError(f"{self.name} has gone"))
            self._waiting.clear()

    async def do(self, what: str, **more: Any) -> Any:
        """Send a command and wait for its result. Raises RemoteError."""
        number = next(self._ids)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.tell(what, id=number, **more)
        try:
            return await asyncio.wait_for(waiting, ANSWER_S)
        except TimeoutError:
            raise RemoteError(f"{self.name} did not answer {what} for {ANSWER_S:g} s") from None
        finally:
            self._waiting.pop(number, None)

    def tell(self, what: str, **more: Any) -> None:
        """A command whose answer nobody waits for."""
        assert self._writer is not None
        self._writer.write(msgspec.json.encode({"do": what, **more}) + b"\n")

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):  # the process was killed
                await self._writer.wait_closed()
