"""Who may ask an HTTP port of ours, and whom a client of ours believes: bearer keys and certificates (docs/security.md).

Must never print a key, compare one byte by byte, or read a request's body before its key is right.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from collections import Counter
from collections.abc import Collection
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from pdjax.core.errors import ConfigError

UNAUTHORIZED = "unauthorized"  # the counter
MISSING = "send the key of this server as `Authorization: Bearer KEY`"


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """scheme://host:port, with brackets around IPv6."""
    try:
        brackets = ipaddress.ip_address(host).version == 6
    except ValueError:
        brackets = False
    return f"{scheme}://[{host}]:{port}" if brackets else f"{scheme}://{host}:{port}"


def host_of(url: str) -> str | None:
    """None for what is no URL: another instance's text must not cost this one its look-ups (S11)."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def registry_token(secret: bytes) -> str:
    """The registry's bearer token, "" without a secret. secret: the content of the deployment's secret file.

    Made from the secret, and no way back: who reads it on an unencrypted wire cannot sign a side-channel frame.
    """
    return hashlib.blake2b(secret, digest_size=32, person=b"pdjax registry").hexdigest() if secret else ""


class BearerGuard:
    """An ASGI application that asks for a key before it hands a request, as it is, to the one behind it.

    open_paths are answered without a key. refusal: the JSON body of a 401. It wraps no stream: what it hands over it
    never sees again (facts/router §3.2).
    """

    def __init__(
        self, app: ASGIApp, key: str, open_paths: Collection[str], refusal: bytes, counters: Counter[str]
    ) -> None:
        self._app, self._open, self._refusal, self._counters = app, frozenset(open_paths), refusal, counters
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        self._counters[UNAUTHORIZED] += 1
        length = str(len(self._refusal)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": self._refusal})

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def guarded(
    app: Any, key: str, *, open_paths: Collection[str], refusal: bytes, counters: Counter[str]
) -> Any:
    """app behind a BearerGuard, or app itself without a key."""
    return BearerGuard(app, key, open_paths, refusal, counters) if key else app


def check_certificate(certfile: str, keyfile: str) -> None:
    """Raises ConfigError when a server could not use them. Both "": plain HTTP."""
    if bool(certfile) != bool(keyfile):
        given, lacks = ("ssl-certfile", "ssl-keyfile") if certfile else ("ssl-keyfile", "ssl-certfile")
        raise ConfigError(f"--{given} without --{lacks}: TLS needs both; give the other, too")
    if not certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would ask for its password on the terminal, in a server that nobody watches.
        context.load_cert_chain(certfile, keyfile, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile}: {error}; give a certificate and its "
            "unencrypted key in PEM"
        ) from None


@cache
def verifying(ca_file: str) -> ssl.SSLContext:
    """The certificates of ca_file, or public authorities' without one. Raises ConfigError.

    Made once for a process: reading a bundle costs a tenth of a second of CPU, too much for each client of ours.
    """
    if not ca_file:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-ca-file {ca_file}: {error}; give certificates in PEM") from None
