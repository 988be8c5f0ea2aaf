"""Numeric addresses: what a socket binds and what a peer is told.

A hostname given to the transfer server silently binds every interface and 0.0.0.0 is no address that a peer can
dial (facts/transfer row 15), so both are refused here, before any socket exists. Must never resolve a name.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pdjax.core.errors import ConfigError


@dataclass(frozen=True)
class HostAddress:
    """bind: the numeric ip to listen on. advertise: the numeric ip that peers dial; never a wildcard."""

    bind: str
    advertise: str


def _numeric(text: str, what: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        raise ConfigError(
            f"{what} {text!r} must be a numeric IPv4 or IPv6 address of this machine, not a name"
        ) from None


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
    return str(ipaddress.ip_address(host.strip("[]"))), int(port)
