"""Numeric addresses: what a socket binds and what a peer is told.

A hostname given to the transfer server silently binds every interface and 0.0.0.0 is no address that a peer can
dial (facts/transfer row 15), so both are refused here, before any socket exists. Must never resolve a name.
An IPv4 address in IPv6 clothing (::ffff:0.0.0.0) is judged, bound and dialled as what it is.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from pdjax.core.errors import ConfigError


@dataclass(frozen=True)
class HostAddress:
    """bind: the numeric ip to listen on. advertise: the numeric ip that peers dial; never a wildcard."""

    bind: str
    advertise: str


def numeric_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Of a numeric host, with or without brackets; None for a name."""
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def is_wildcard(host: str) -> bool:
    """Whether a socket bound to it listens everywhere: also as "", 0 and 0x0, which the C library takes."""
    ip = numeric_ip(host)
    if ip is not None:
        return ip.is_unspecified
    try:
        return not host or not any(socket.inet_aton(host))
    except OSError:
        return False


def _numeric(text: str, what: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = numeric_ip(text)
    if ip is None:
        raise ConfigError(
            f"{what} {text!r} must be a numeric IPv4 or IPv6 address of this machine, not a name"
        )
    return ip


def host_address(host: str, advertise: str | None = None) -> HostAddress:
    """Check a host to bind and, for a wildcard, the ip to advertise. Raises ConfigError."""
    bind = _numeric(host, "host")
    if advertise is None:
        if bind.is_unspecified:
            raise ConfigError(
                f"host {host} is a wildcard: also name the ip that peers should dial (advertise)"
            )
        return HostAddress(str(bind), str(bind))
    dial = _numeric(advertise, "advertised ip")
    if dial.is_unspecified:
        raise ConfigError(f"advertised ip {advertise} is a wildcard: name the ip that peers should dial")
    return HostAddress(str(bind), str(dial))


def join(ip: str, port: int) -> str:
    """ "ip:port", with brackets around IPv6."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def split(address: str) -> tuple[str, int]:
    """("ip", port) of "ip:port". Raises ValueError when the ip is not numeric or the port not in 1 … 65535."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"address {address!r} must be ip:port")
    ip = numeric_ip(host)
    if ip is None:
        raise ValueError(f"address {address!r} has no numeric ip")
    return str(ip), int(port)
