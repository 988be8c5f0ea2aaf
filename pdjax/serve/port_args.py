"""Flags that ``serve`` and ``bootstrap`` share: the HTTP port's certificate and limit, and the files that hold secrets.

A secret is given as the path of a file: a value would stand in the list of processes. Must never import JAX.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from pdjax.core.errors import ConfigError
from pdjax.core.settings import MAX_TIMER_S
from pdjax.engine.bootstrap.access import check_certificate, registry_token
from pdjax.engine.bootstrap.connections import MAX_CONNECTIONS
from pdjax.engine.bootstrap.httpd import Door


def arg(flag: str, doc: str, default: Any = MISSING, choices: tuple[str, ...] = ()) -> Any:
    """A field with its flag and the sentence that --help prints."""
    metadata = {"flag": flag, "doc": doc, "choices": choices}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def check_seconds(flag: str, seconds: float) -> None:
    """Raises ConfigError for a time that no timer can run for."""
    if not 0 < seconds <= MAX_TIMER_S:
        raise ConfigError(
            f"--{flag} {seconds:g}: must be a number of seconds above 0, at most {MAX_TIMER_S:g}"
        )


def secret_of(flag: str, path: str) -> bytes:
    """What the file holds without the white space around it, b"" without a file. Raises ConfigError."""
    if not path:
        return b""
    try:
        content = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--{flag} {path}: {error.strerror}") from None
    if not content:
        raise ConfigError(f"--{flag} {path}: is empty; write a secret into it")
    return content


def key_of(flag: str, path: str) -> str:
    """A key for an Authorization header, from a file. Raises ConfigError."""
    content = secret_of(flag, path)
    if not re.fullmatch(rb"[!-~]*", content):
        raise ConfigError(f"--{flag} {path}: a key has visible ASCII characters only, and no space")
    return content.decode()


@dataclass(frozen=True, kw_only=True)
class PortArgs:
    """What ``serve`` and ``bootstrap`` say of the HTTP port that they open, and the deployment's secret."""

    ssl_certfile: str = arg("ssl-certfile", "PEM file of the HTTP port's certificate (empty: no TLS)", "")
    ssl_keyfile: str = arg("ssl-keyfile", "PEM file of that certificate's key, not encrypted", "")
    max_connections: int = arg(
        "max-connections",
        "HTTP connections held at once; one beyond is answered 503 and closed (with TLS: closed)",
        MAX_CONNECTIONS,
    )
    secret_file: str = arg(
        "disaggregation-secret-file",
        "its content encrypts and signs the side channel and opens the registry; the same everywhere (empty: checksums only)",
        "",
    )

    @property
    def door(self) -> Door:
        return Door(self.ssl_certfile, self.ssl_keyfile, self.max_connections)

    def token(self) -> str:
        """The registry's bearer key, "" without a secret. Raises ConfigError."""
        return registry_token(secret_of("disaggregation-secret-file", self.secret_file))

    def check_port(self) -> None:
        """Raises ConfigError."""
        check_certificate(self.ssl_certfile, self.ssl_keyfile)
        if self.max_connections < 1:
            raise ConfigError(f"--max-connections {self.max_connections}: must be at least 1")
        self.token()
