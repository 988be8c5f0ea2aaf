"""How many descriptors this process may open, and how they are shared, so that no port's strangers take the last ones.

Must never lower a limit, and never raise one beyond what the operator allows (the hard limit).
"""

from __future__ import annotations

import resource

# Of the process, for what is no HTTP connection of a listener: files, transfers, the registry's answers. The kernel gives
# the lowest free number, so a connection's own number says how many are taken.
SPARE_DESCRIPTORS = 32
# Of the rest, at most: what it leaves is for HTTP and for what the process opens itself.
SIDE_CHANNEL_SHARE = 0.5
WANTED_DESCRIPTORS = 1 << 16  # more than the default limits of all ports together need


def descriptor_limit(*, raised: bool = False) -> float:
    """The soft limit; inf without one. raised: as ``raise_descriptor_limit`` would leave it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = float("inf") if soft == resource.RLIM_INFINITY else soft
    if not raised:
        return found
    allowed = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    return max(found, allowed)


def usable_descriptors() -> float:
    """A number from here on is not given to an HTTP connection."""
    return descriptor_limit() - SPARE_DESCRIPTORS


def side_channel_connections(wanted: int) -> int:
    """So many may be held at once: ``wanted``, or this process's share when that is less; at least one."""
    return int(min(wanted, max(1.0, SIDE_CHANNEL_SHARE * usable_descriptors())))


def raise_descriptor_limit() -> None:
    """At the start of a server: the soft limit is there for programs that cannot count beyond it (``select``)."""
    soft, wanted = descriptor_limit(), descriptor_limit(raised=True)
    if soft < wanted:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), hard))
