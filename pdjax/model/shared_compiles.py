"""Servers of one machine that start together compile each program once between them, not once each.

They share a directory of compiled programs. Whoever compiles a program holds its lock; the others do those that nobody
is at meanwhile, and take this one from the directory afterwards. Must never hold two locks (two servers would wait for
each other), and never keep a server from starting: where nothing can be locked, each compiles for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

LOCKS = "locks"  # the file in the directory; each program has a byte of it, which need not exist
Job = tuple[
    str, Callable[[], object]
]  # the program's name, equal in every process that needs it; how it is compiled


def run_jobs(jobs: Iterable[Job], directory: Path | None) -> None:
    """Each job once, in order but for those that another process is at. directory None: nothing is shared."""
    with _lock_file(directory) as file:
        left = deque(jobs)
        passed = 0  # jobs in a row that others are at
        while left:
            name, compile_it = left.popleft()
            # When others are at everything that is left, the wait for one of them is all that there is to do.
            if _take(file, name, wait=passed == len(left)):
                compile_it()
                _give_back(file, name)
                passed = 0
            else:
                left.append((name, compile_it))
                passed += 1


@contextmanager
def _lock_file(directory: Path | None) -> Iterator[IO[bytes] | None]:
    """Closing it gives back every lock, also when a compile raises."""
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        file = None if directory is None else (directory / LOCKS).open("ab")
    except OSError as error:
        log.warning("compiled programs are not shared: %s", error)
        file = None
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _take(file: IO[bytes] | None, name: str, *, wait: bool) -> bool:
    """False: another process holds it."""
    if file is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _place(name))
    except (BlockingIOError, PermissionError):  # POSIX allows either for a lock that is held
        return False
    except OSError as error:  # a file system without locks
        log.warning("programs are compiled without a lock: %s", error)
    return True


def _give_back(file: IO[bytes] | None, name: str) -> None:
    if file is not None:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _place(name))


def _place(name: str) -> int:
    """The byte of a program's lock. Two that share one only wait for each other."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
