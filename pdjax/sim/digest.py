"""The digest of an event log: a hash, and a running check of each line, so that a replay can name where it parts.

Form: "HASH:LINES:CHECKS", CHECKS with one base64 character for each line (of the first MAX_LINES). Must never
depend on anything but the bytes of the log.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence

MAX_LINES = 4096
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def is_digest(text: str) -> bool:
    """Whether ``digest_of`` can have made it, or its hash alone."""
    found = re.fullmatch("[0-9a-f]{32}(:([0-9]{1,9}):([A-Za-z0-9_-]*))?", text)
    return found is not None and (not found[1] or len(found[3]) == min(int(found[2]), MAX_LINES))


def digest_of(lines: Sequence[bytes]) -> str:
    whole = hashlib.blake2b(b"".join(lines), digest_size=16).hexdigest()
    return f"{whole}:{len(lines)}:{checks_of(lines)}"


def checks_of(lines: Sequence[bytes]) -> str:
    """Each character depends on its line and on all lines before it."""
    running, out = 0, []
    for line in lines[:MAX_LINES]:
        running = zlib.crc32(line, running)
        out.append(_ALPHABET[running & 63])
    return "".join(out)


def first_difference(wanted: str, lines: Sequence[bytes]) -> int | None:
    """The number of the first line that is not as the digest has it; None: the log is the same.

    Exact but for one case in 64, where the line is a little before the named one; len(lines) when lines are missing.
    """
    whole = digest_of(lines)
    if wanted in (whole, whole.partition(":")[0]):
        return None
    checks = wanted.rpartition(":")[2] if ":" in wanted else ""
    mine = checks_of(lines)
    for i, (a, b) in enumerate(zip(checks, mine, strict=False)):
        if a != b:
            return i
    return min(len(checks), len(lines))
