"""Paths that a server will open late, checked with the flags: before any port listens. Must never make or change a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pdjax.core.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, without its last zero


def check_appendable(flag: str, path: str) -> None:
    """Of a file that will be appended to, or a directory that gets files. Raises ConfigError. "" is none."""
    if not path:
        return
    target = Path(path)
    _check_may_make(flag, path, target if os.path.isdir(target) else target.parent)
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise ConfigError(f"--{flag} {path}: may not be written")


def check_socket_path(flag: str, path: str) -> None:
    """Of a Unix socket that will be made there. Raises ConfigError. "" is none."""
    if not path:
        return
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"--{flag} {path}: is longer than {MAX_SOCKET_PATH_BYTES} bytes, no socket can have it"
        )
    _check_may_make(flag, path, Path(path).parent)
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"--{flag} {path}: is there and is no socket; choose another path")


def _check_may_make(flag: str, path: str, directory: Path) -> None:
    if not os.path.isdir(directory):  # no error of one whose name is too long
        raise ConfigError(f"--{flag} {path}: {directory} is no directory; make it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--{flag} {path}: no file can be made in {directory}")
