"""Whether a decode instance reaches the side channel of any prefill instance: a listed one behind a filter serves nobody.

Looked at beside each heartbeat, by one TCP connection that says nothing: the peer's library drops it. Never of a transfer
port: stray bytes there can end a process (facts/transfer row 15). Must never delay a heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

CONNECT_WAIT_S = 2.0
MAX_TRIED = 16  # prefill instances tried together


class Reach:
    """addresses: the side channels of the instances that fit, asked for only when the known one does not answer."""

    def __init__(self, addresses: Callable[[], Awaitable[Iterable[str]]]) -> None:
        self._addresses = addresses
        self._good = ""

    def forget(self) -> None:
        """Other instances are listed now: the good one may be gone."""
        self._good = ""

    async def look(self) -> bool:
        """Whether one of them accepts a connection now."""
        if self._good and await _accepts(self._good):
            return True
        tried = list(await self._addresses())[:MAX_TRIED]
        answers = await asyncio.gather(*(_accepts(address) for address in tried))
        self._good = next((address for address, yes in zip(tried, answers, strict=True) if yes), "")
        return bool(self._good)


async def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        connected = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(connected, CONNECT_WAIT_S)
    except (OSError, ValueError, OverflowError, TimeoutError):  # a stranger's registration may name anything
        return False
    writer.close()
    return True
