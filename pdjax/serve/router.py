"""How the unmodified sglang router is started in front of our servers, with its measured traps avoided (facts/router §8).

Must never hand a router a URL that ends in a slash, nor leave it its fixed default ports.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Sequence

import httpx
import msgspec

from pdjax.core.errors import ConfigError
from pdjax.engine.bootstrap.asking import NoAnswer, read

KINDS = ("rust", "mini", "none")
WORKER_CHECK_S = 5  # the default of 60 s leaves a dead worker in service for minutes (facts/router §1)


def check_kind(kind: str) -> None:
    """Raises ConfigError when this router cannot be started here."""
    if kind not in KINDS:
        raise ConfigError(f"--router {kind}: choose one of {', '.join(KINDS)}")
    if kind != "none" and importlib.util.find_spec("sglang_router") is None:
        raise ConfigError("the router is not installed: pip install 'pdjax[router]', or --router none")


def free_ports(host: str, count: int) -> list[int]:
    """Ports that were free a moment ago, all different; for a program that cannot bind 0 itself."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def router_command(
    kind: str,
    host: str,
    port: int,
    metrics_port: int,
    prefills: Sequence[tuple[str, int | None]],
    decodes: Sequence[str],
) -> list[str]:
    """The command line of one router. prefills: (url, port of its registry, or None for D's configured one)."""
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--host", host, "--port", str(port)]
    for url, bootstrap_port in prefills:
        command += ["--prefill", url.rstrip("/"), *([] if bootstrap_port is None else [str(bootstrap_port)])]
    for url in decodes:
        command += ["--decode", url.rstrip("/")]
    if kind == "mini":
        return [*command, "--mini-lb"]
    # The metrics port has a fixed default on all interfaces: a second router on the host would panic.
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    # Round robin on both sides would use only half of the pairs (facts/router §4).
    command += ["--prefill-policy", "round_robin", "--decode-policy", "random"]
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", str(WORKER_CHECK_S)]
    return [*command, "--log-level", "warn"]


def router_environ(host: str, environ: dict[str, str]) -> dict[str, str]:
    """The environment without a proxy between these processes.

    The rust router honours HTTP_PROXY even for 127.0.0.1 and then never becomes ready.
    """
    direct = ",".join(dict.fromkeys(filter(None, ("127.0.0.1", "localhost", host, environ.get("NO_PROXY")))))
    return {**environ, "NO_PROXY": direct, "no_proxy": direct}


class _Readiness(msgspec.Struct, frozen=True):
    healthy_workers: int = 0


def router_serves(http: httpx.Client, kind: str, url: str, n_workers: int) -> bool:
    """rust tells how many workers it has, its /health says nothing. mini knows nothing of them: wait for them first."""
    try:
        answer = http.get(f"{url}/health" if kind == "mini" else f"{url}/readiness")
    except httpx.HTTPError:
        return False
    if kind == "mini":
        return answer.status_code == 200
    try:  # somebody else may have taken the port between our look and the router's bind
        return answer.status_code == 200 and read(answer.content, _Readiness).healthy_workers == n_workers
    except NoAnswer:
        return False
