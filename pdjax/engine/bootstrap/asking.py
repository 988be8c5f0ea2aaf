"""Asking somebody else over HTTP: an answer is a stranger's bytes, so it has a length, a time and a schema.

Every client of ours whose answers decide anything calls here. Must never let an answer raise anything but NoAnswer,
and never keep of it what was not asked for: no cookie, nothing unpacked.
"""

from __future__ import annotations

import asyncio
import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Self, TypeVar

import httpx
import msgspec

from pdjax.engine.bootstrap.access import verifying
from pdjax.engine.bootstrap.registry import MAX_ENTRIES

BYTES_PER_INSTANCE = 2048  # of a listing; what we register is about half of it
MAX_ANSWER_BYTES = MAX_ENTRIES * BYTES_PER_INSTANCE
SHOWN_CHARS = 200  # of another's text in a reason

T = TypeVar("T")


class NoAnswer(Exception):
    """Nobody answered, or not what was asked; the text says why. silent: not even a refusal came in time."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


def http_client(key: str = "", verify: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """A client for ``ask``. key: a bearer key, "" for none; verify: whose certificates are believed."""
    headers = {"accept-encoding": "identity"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    # trust_env: a proxy must not stand between the processes of one deployment (facts/router §8, trap 2).
    return httpx.AsyncClient(
        trust_env=False,
        timeout=None,  # ``ask`` bounds the whole call; httpx would bound each read
        headers=headers,
        verify=verify or verifying(""),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
    )


async def ask(
    http: httpx.AsyncClient, method: str, url: str, *, limit_s: float, **request: Any
) -> tuple[int, bytes]:
    """Status and body of the answer, read whole within limit_s seconds and MAX_ANSWER_BYTES. Raises NoAnswer."""
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s), http.stream(method, url, **request) as answer:
            async for piece in answer.aiter_raw():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise NoAnswer(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    except TimeoutError:
        raise NoAnswer(f"nothing whole within {limit_s:g} s", silent=True) from None
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
    ) as error:  # ValueError: a host that cannot be a name
        raise NoAnswer(f"{type(error).__name__} {error}") from error
    return answer.status_code, bytes(body)


def read(body: bytes, schema: type[T]) -> T:
    """The JSON of an answer as its schema has it, strictly: no NaN, no rounding. Raises NoAnswer."""
    try:
        return msgspec.json.decode(body, type=schema)
    except (msgspec.MsgspecError, ValueError) as error:
        raise NoAnswer(f"{type(error).__name__} {error}"[:SHOWN_CHARS]) from None
    except RecursionError:
        raise NoAnswer("the answer is nested too deeply") from None


class Blocking:
    """``ask`` for one thread that has no event loop. Owns the client; ``with`` closes it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http, self._runner = http, asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()

    def ask(self, method: str, url: str, *, limit_s: float, **request: Any) -> tuple[int, bytes]:
        """Raises NoAnswer."""
        return self._runner.run(ask(self._http, method, url, limit_s=limit_s, **request))
