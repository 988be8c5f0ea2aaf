"""What the doctor can see without asking anybody: versions, ports, addresses, limits of this machine.

Must never import JAX, keep a port that it tried, or resolve more than the names that the flags hold.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pdjax.core.errors import ConfigError
from pdjax.engine.bootstrap.access import base_url
from pdjax.engine.bootstrap.asking import NoAnswer
from pdjax.engine.descriptors import descriptor_limit
from pdjax.engine.jax_transfer.addresses import host_address, numeric_ip
from pdjax.serve.args import ServeArgs
from pdjax.serve.doctor import Checks, Finding, ask, client_of, fail, ok, state_of, warn

FDS_OF_A_PEER = (
    12  # six an end at the first pull (facts/peer-servers §1), and as many again after a reconnect
)
FDS_OF_THE_REST = 256  # files, libraries, the registry client
PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def versions() -> Checks:
    v = sys.version_info
    text = ".".join(map(str, v[:3]))
    yield ok("python", text) if v >= (3, 11) else fail("python", text, "use Python 3.11 or newer")
    for name, wanted in sorted(pinned().items()):
        found = version(name)
        if found == wanted:
            yield ok(name, found)
        else:
            advice = f"pip install '{name}=={wanted}': the transport is experimental, other versions differ on the wire"
            yield fail(name, found or "not installed", advice)
    yield ok("pdjax", version("pdjax") or "not installed")
    router = version("sglang-router")
    if router is None:
        yield warn("sglang-router", "not installed", "pip install 'pdjax[router]' where a router is to run")
    else:
        yield ok("sglang-router", router)


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned() -> dict[str, str]:
    """Packages that this one requires in exactly one version, from its own metadata."""
    out = {}
    for line in importlib.metadata.requires("pdjax") or ():
        match = re.fullmatch(r"\s*([\w.-]+)\s*==\s*([\w.]+)\s*", line)
        if match:
            out[match[1]] = match[2]
    return out


def ports(args: ServeArgs) -> Checks:
    running = _running(args)
    if running:
        yield ok(
            "HTTP port", f"{args.host}:{args.port}: this server runs already, ready: {running.get('ready')}"
        )
        return  # its other ports are its own
    yield _port("HTTP port", "port", args.host, args.port)
    if args.with_bootstrap:
        yield _port("registry port", "disaggregation-bootstrap-port", args.host, args.bootstrap_port)
    if args.transfer_ports is None:
        if args.disaggregation_mode == "prefill":
            advice = "fine inside one network; behind a firewall set --disaggregation-port-base"
            yield warn(
                "transfer ports", "chosen by the kernel: D must reach every port of this machine", advice
            )
        return
    first, last = args.transfer_ports
    taken = [port for port in range(first, last + 1) if _bind(args.host, port) is not None]
    found = f"{first} to {last}"
    if not taken:
        yield ok("transfer ports", f"{found} are free; D must reach them")
    elif first in taken:
        advice = "end what listens there, or choose another --disaggregation-port-base"
        yield fail("transfer ports", f"{first}, the side channel's, is taken", advice)
    else:
        shown = ", ".join(map(str, taken[:8])) + (" …" if len(taken) > 8 else "")
        advice = "pairs with a taken port are skipped: that many fewer decode instances fit"
        yield warn("transfer ports", f"{found}, of which {shown} are taken", advice)


def _running(args: ServeArgs) -> Mapping[str, Any]:
    """/server_info of a server of the same role that has this address already; {} when there is none."""
    if not args.port:
        return {}
    with client_of(args, args.api_key()) as http:
        try:
            info = ask(http, f"{base_url(args.host, args.port, args.door.scheme)}/server_info")
        except NoAnswer:
            return {}
    return info if info.get("disaggregation_mode") == args.disaggregation_mode and state_of(info) else {}


def _port(check: str, flag: str, host: str, port: int) -> Finding:
    if port == 0:
        return ok(check, "chosen by the kernel")
    why = _bind(host, port)
    if why is None:
        return ok(check, f"{host}:{port} is free")
    return fail(
        check, f"{host}:{port}: {why}", f"end what listens there, or choose another --{flag} or --host"
    )


def _bind(host: str, port: int) -> str | None:
    """Why nothing can listen there, or None."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None


def addresses(args: ServeArgs, environ: Mapping[str, str] = os.environ) -> Checks:
    if args.disaggregation_mode != "null":
        yield _advertised(args)
    yield from _proxies(args, environ)
    for flag, path in (
        ("disaggregation-secret-file", args.secret_file),
        ("api-key-file", args.api_key_file),
        ("ssl-keyfile", args.ssl_keyfile),
        ("router-key-file", args.router_key_file),
    ):
        if path and Path(path).stat().st_mode & 0o077:
            yield warn(flag, f"{path} can be read by others", f"chmod 600 {path}")


def _advertised(args: ServeArgs) -> Finding:
    try:
        advertised = host_address(args.host).advertise
    except ConfigError as error:
        return fail(
            "advertised address", str(error), "--host ADDRESS with this machine's own numeric address"
        )
    if not is_loopback(advertised):
        return ok("advertised address", f"{advertised}: side channel, transfer and HTTP")
    found = f"{advertised}: only processes of this machine reach it"
    if args.bootstrap_host and not is_loopback(args.bootstrap_host):
        other = _own_address_towards(args.bootstrap_host, args.bootstrap_port)
        return fail(
            "advertised address", f"{found}, and the registry is on {args.bootstrap_host}", f"--host {other}"
        )
    return warn("advertised address", found, "with peers on another machine: --host ADDRESS")


def is_loopback(host: str) -> bool:
    ip = numeric_ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def _own_address_towards(host: str, port: int) -> str:
    """The address that this machine would use towards host; nothing is sent."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "ADDRESS"


def _proxies(args: ServeArgs, environ: Mapping[str, str]) -> Iterable[Finding]:
    proxy = next((name for name in PROXIES if environ.get(name)), None)
    if proxy is None:
        return
    direct = environ.get("NO_PROXY", environ.get("no_proxy", "")).split(",")
    if args.host not in direct and "*" not in direct:
        advice = f"start the rust router with NO_PROXY={args.host},…: it uses the proxy even for 127.0.0.1"
        yield warn("proxy", f"{proxy} is set and NO_PROXY does not hold {args.host}", advice)


def limits(args: ServeArgs) -> Checks:
    most = descriptor_limit(raised=True)
    peers = args.settings.max_peers if args.disaggregation_mode != "null" else 0
    strangers = args.settings.max_channel_connections if args.disaggregation_mode == "prefill" else 0
    need = args.max_queue + args.max_running_requests + FDS_OF_A_PEER * peers + strangers + FDS_OF_THE_REST
    found = f"{most:.0f} that a server may open"
    if most >= need:
        yield ok("file descriptors", found)
    else:
        advice = (
            f"ulimit -Hn {need}: one for each waiting client, {FDS_OF_A_PEER} for each of {peers} peers"
            f" and {strangers} for who else may connect to the side channel"
        )
        yield warn("file descriptors", found, advice)
