"""What one node is started with, checked before anything is loaded. The command line is made from these fields.

Only serve reads flags and the environment (design §2): see options. Must never import JAX: a wrong flag is told in a moment.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.engine.bootstrap.access import base_url, verifying
from pdjax.engine.bootstrap.registry import DEFAULT_PORT
from pdjax.engine.jax_transfer.addresses import host_address, is_wildcard, numeric_ip
from pdjax.engine.kernels.checksum import VERIFY_MODES
from pdjax.model.settings import DTYPES, RunnerSettings
from pdjax.sched.config import SchedulerConfig
from pdjax.serve.log import FORMATS, LEVELS
from pdjax.serve.path_checks import check_appendable, check_socket_path
from pdjax.serve.port_args import PortArgs, arg, check_seconds, key_of, secret_of

MAX_SIZE = (1 << 31) - 1  # of what an int32 on the device counts
MAX_ID_CHARS = 100  # of an instance, in every frame (core.wire.Short) and in the routing id of its socket


@dataclass(frozen=True)
class ServeArgs(PortArgs):
    """``check()`` before use. Sizes are tokens or pages; settings holds every timer and limit of the hand-off."""

    model: str = arg(
        "model", 'a Hugging Face directory or a .gguf file, or "smollm2" (pdjax fetch smollm2), or "tiny"'
    )
    host: str = arg(
        "host", "address to listen on; in PD mode the one that peers and the router reach", "127.0.0.1"
    )
    port: int = arg("port", "HTTP port; 0 lets the kernel choose, the ready line on stdout tells it", 30000)
    served_model_name: str = arg("served-model-name", "name in the OpenAI API (empty: the model's)", "")
    context_length: int = arg(
        "context-length", "longest prompt + output (0: what the model and the pools allow)", 0
    )
    num_pages: int = arg("num-pages", "pages of the KV pool, the reserved one included", 1024)
    page_size: int = arg("page-size", "tokens in a page", 16)
    max_running_requests: int = arg("max-running-requests", "rows of the largest decode step", 16)
    max_queue: int = arg(
        "max-queue", "requests taken in and not started; one beyond gets 503", SchedulerConfig.max_queue
    )
    chunked_prefill_size: int = arg(
        "chunked-prefill-size", "prompt tokens computed in one step", SchedulerConfig.chunked_prefill_size
    )
    disable_radix_cache: bool = arg(
        "disable-radix-cache",
        "compute every prompt whole, also where it begins like an earlier one (D: always)",
        False,
    )
    disable_overlap_schedule: bool = arg(
        "disable-overlap-schedule", "read what a step sampled before the next one is launched", False
    )
    dtype: Literal["auto", "float32", "bfloat16"] = arg(
        "dtype", "of weights and KV", RunnerSettings.dtype, DTYPES
    )
    log_format: Literal["json", "text"] = arg(
        "log-format", "of the server's log on standard error", "json", FORMATS
    )
    log_level: Literal["debug", "info", "warning", "error"] = arg(
        "log-level", "the least that is logged", "info", LEVELS
    )
    otlp_endpoint: str = arg(
        "otlp-endpoint",
        "OpenTelemetry collector that gets spans over HTTP, as http://host:4318 (empty: no spans)",
        "",
    )
    instance_id: str = arg(
        "instance-id", "name of this seat, the same in each of its lives (empty: from role and address)", ""
    )
    router_url: str = arg(
        "router-url",
        "sglang routers that this server enters itself into when it is ready, separated by commas",
        "",
    )
    api_key_file: str = arg(
        "api-key-file",
        "its content is the key that clients must send as bearer token (empty: everybody may ask)",
        "",
    )
    ssl_ca_file: str = arg(
        "ssl-ca-file",
        "PEM file that certificates of the registry and of peers are verified with; the registry is asked over https",
        "",
    )
    router_key_file: str = arg(
        "router-key-file", "its content is the API key of these routers (empty: none)", ""
    )
    router_check_interval_s: float = arg(
        "router-check-interval", "how often it looks whether they still list it, in seconds", 5.0
    )
    health_timeout_s: float = arg("health-timeout", "longest pass of /health_generate, in seconds", 20.0)
    watchdog_timeout_s: float = arg(
        "watchdog-timeout", "what has not moved for so many seconds is named in the log", 30.0
    )
    drain_timeout_s: float = arg(
        "drain-timeout",
        "asked to end, what is here has this long to end by itself, in seconds (0: as long as a request may take)",
        0.0,
    )
    drain_linger_s: float = arg(
        "drain-linger",
        "asked to end, it refuses requests until so many seconds have passed without one (0: only while it has others)",
        1.0,
    )
    disaggregation_mode: Literal["null", "prefill", "decode"] = arg(
        "disaggregation-mode", "null: an ordinary server", "null", ("null", "prefill", "decode")
    )
    disaggregation_transfer_backend: str = arg(
        "disaggregation-transfer-backend", "how KV moves", "jax", ("jax",)
    )
    bootstrap_host: str = arg(
        "disaggregation-bootstrap-host", "host of the registry (D, empty: the injected one)", ""
    )
    bootstrap_port: int = arg("disaggregation-bootstrap-port", "port of the registry", DEFAULT_PORT)
    public_transfer: bool = arg(
        "disaggregation-public-transfer",
        "let the transfer ports, which have no authentication, listen on a public address",
        False,
    )
    with_bootstrap: bool = arg("with-bootstrap", "P: run the registry inside this process", False)
    port_base: int = arg(
        "disaggregation-port-base",
        "P: side channel on this port, one pair of ports after it for each decode instance (0: the kernel chooses)",
        0,
    )
    trace: str = arg(
        "disaggregation-trace",
        "file that every event of the hand-off is appended to, or a directory for one file a process",
        "",
    )
    fault_socket: str = arg(
        "disaggregation-fault-socket",
        "tests only: a Unix socket through which faults are injected into this process (empty: there is none)",
        "",
    )
    verify: Literal["off", "sampled", "all"] = arg(
        "disaggregation-verify",
        "which transferred parts are checksummed",
        RunnerSettings.verify,
        VERIFY_MODES,
    )
    settings: PDSettings = field(default_factory=PDSettings)

    def at_registry(self, host: str, port: int) -> ServeArgs:
        """The same with the registry's real address, once it is bound."""
        return replace(self, bootstrap_host=host, bootstrap_port=port)

    def seat(self, serving_url: str) -> str:
        """The name of this instance. A life on the same address supersedes the one before (protocol §1)."""
        if self.instance_id:
            return self.instance_id
        where = re.sub(r"[^0-9A-Za-z.]+", "-", re.sub("^https?://", "", serving_url)).strip("-")
        return f"{self.disaggregation_mode}-{where}"

    def secret(self) -> bytes:
        """The key of the side channel, b"" without one. Raises ConfigError."""
        content = secret_of("disaggregation-secret-file", self.secret_file)
        return hashlib.blake2b(content).digest() if content else b""

    def router_key(self) -> str:
        """The API key of the routers, "" without one. Raises ConfigError."""
        return key_of("router-key-file", self.router_key_file)

    def api_key(self) -> str:
        """The key of this server's API and of its peers', "" without one. Raises ConfigError."""
        return key_of("api-key-file", self.api_key_file)

    def believed(self) -> ssl.SSLContext:
        """Whose certificates are believed. Raises ConfigError."""
        return verifying(self.ssl_ca_file)

    @property
    def registry_url(self) -> str:
        """Of the configured registry, "" without one."""
        scheme = "https" if self.ssl_ca_file else "http"
        return base_url(self.bootstrap_host, self.bootstrap_port, scheme) if self.bootstrap_host else ""

    @property
    def transfer_ports(self) -> tuple[int, int] | None:
        """P: the first and the last of its fixed ports, the side channel's included; None: the kernel chooses."""
        return (self.port_base, self.port_base + 2 * self.settings.max_peers) if self.port_base else None

    @property
    def drain_limit_s(self) -> float:
        """T_drain of protocol §7."""
        return self.drain_timeout_s or self.settings.request_timeout_s

    @property
    def routers(self) -> list[str]:
        return [one.strip() for one in self.router_url.split(",") if one.strip()]

    def check(self) -> None:
        """Raises ConfigError with one line that says what to change."""
        for spec, owner in [(spec, one) for one in (self, self.settings) for spec in fields(one)]:
            choices = spec.metadata.get("choices")
            value = getattr(owner, spec.name)
            if choices and value not in choices:
                raise ConfigError(f"--{spec.metadata['flag']} {value}: choose one of {', '.join(choices)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not least <= value <= MAX_SIZE:
                flag = type(self).__dataclass_fields__[name].metadata["flag"]
                raise ConfigError(f"--{flag} {value}: must be at least {least}, at most {MAX_SIZE}")
        for flag, port in (("port", self.port), ("disaggregation-bootstrap-port", self.bootstrap_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"--{flag} {port}: must be in [0, 65535]")
        for flag, host in (("host", self.host), ("disaggregation-bootstrap-host", self.bootstrap_host)):
            if "/" in host:
                raise ConfigError(f"--{flag} {host}: give a host name or address, not a URL")
        self.check_port()
        self._check_others()
        self._check_mode()

    def _check_others(self) -> None:
        for url in self.routers:
            if not re.fullmatch(r"https?://[^/\s]+/?", url):
                raise ConfigError(f"--router-url {url}: give http://host:port of a router")
        if self.routers and is_wildcard(self.host):
            raise ConfigError(
                f"--router-url with --host {self.host or repr('')}: a router cannot reach it; give this machine's own address"
            )
        for flag, limit_s in (
            ("router-check-interval", self.router_check_interval_s),
            ("health-timeout", self.health_timeout_s),
            ("watchdog-timeout", self.watchdog_timeout_s),
        ):
            check_seconds(flag, limit_s)
        if self.drain_timeout_s:
            check_seconds("drain-timeout", self.drain_timeout_s)
        if self.drain_linger_s:
            check_seconds("drain-linger", self.drain_linger_s)
        self.router_key()
        self.api_key()
        self.believed()
        if self.otlp_endpoint and not re.fullmatch(r"https?://\S+", self.otlp_endpoint):
            raise ConfigError(f"--otlp-endpoint {self.otlp_endpoint}: give http://host:port of a collector")

    def _check_mode(self) -> None:
        mode = self.disaggregation_mode
        if len(self.instance_id) > MAX_ID_CHARS:
            raise ConfigError(
                f"--instance-id: has {len(self.instance_id)} characters, at most {MAX_ID_CHARS} fit"
            )
        if self.with_bootstrap and mode != "prefill":
            raise ConfigError(
                f"--with-bootstrap with --disaggregation-mode {mode}: only prefill runs the registry; "
                "drop it, or start `pdjax bootstrap`"
            )
        if mode == "null":
            if self.bootstrap_host:
                raise ConfigError(
                    "--disaggregation-bootstrap-host without a mode: set --disaggregation-mode prefill or decode"
                )
            if self.fault_socket:
                raise ConfigError(
                    "--disaggregation-fault-socket without a mode: only a prefill or decode instance has faults; drop it"
                )
            return
        if is_wildcard(self.host):
            raise ConfigError(
                f"--host {self.host or repr('')}: peers cannot reach it; give this machine's own address"
            )
        self._check_network()
        if self.port_base and mode != "prefill":
            raise ConfigError(
                "--disaggregation-port-base with --disaggregation-mode decode: only prefill instances listen; drop it"
            )
        if self.port_base and not 1024 <= self.port_base < 65536 - 2 * self.settings.max_peers:
            raise ConfigError(
                f"--disaggregation-port-base {self.port_base}: needs 1 + 2 × disaggregation-max-peers ports "
                "from 1024 up and below 65536; lower one of them"
            )
        if self.with_bootstrap and self.bootstrap_host:
            raise ConfigError("--with-bootstrap and --disaggregation-bootstrap-host: choose one")
        if mode == "prefill" and not self.with_bootstrap and not self.bootstrap_host:
            raise ConfigError(
                "--disaggregation-mode prefill needs a registry: give --disaggregation-bootstrap-host or --with-bootstrap"
            )
        if self.bootstrap_port == 0 and not self.with_bootstrap:
            raise ConfigError(
                "--disaggregation-bootstrap-port 0: only --with-bootstrap may choose a free port"
            )
        broken = self.settings.check()
        if broken:
            raise ConfigError("settings that cannot work: " + "; ".join(broken))
        check_appendable("disaggregation-trace", self.trace)
        check_socket_path("disaggregation-fault-socket", self.fault_socket)

    def _check_network(self) -> None:
        """Of an instance whose transfer ports anybody who reaches them may end (facts/transfer row 15)."""
        host_address(self.host)
        ip = numeric_ip(self.host)
        if ip is not None and ip.is_global and not self.public_transfer:
            raise ConfigError(
                f"--host {self.host}: is a public address, and the transfer ports have no authentication; give an "
                "address of a private network, or --disaggregation-public-transfer when a firewall guards them"
            )
        if self.api_key_file and not self.secret_file:
            raise ConfigError(
                "--api-key-file without --disaggregation-secret-file: anybody could list a server of their own, which "
                "this one would send the key to; give both"
            )
        if self.with_bootstrap and self.ssl_certfile and not self.ssl_ca_file:
            raise ConfigError(
                "--with-bootstrap with --ssl-certfile: this server asks its own registry over https, too; give "
                "--ssl-ca-file"
            )


_LEAST = {
    "context_length": 0,
    "num_pages": 2,
    "page_size": 1,
    "max_running_requests": 1,
    "max_queue": 1,
    "chunked_prefill_size": 1,
}


@dataclass(frozen=True)
class BootstrapArgs(PortArgs):
    """``pdjax bootstrap``. ``check()`` before use."""

    host: str = arg("host", "address to listen on", "127.0.0.1")
    port: int = arg("port", "port; 0 lets the kernel choose", DEFAULT_PORT)
    heartbeat_ttl_s: float = arg(
        "disaggregation-bootstrap-heartbeat-ttl",
        "seconds of silence after which a seat is empty",
        PDSettings().heartbeat_ttl_s,
    )

    def check(self) -> None:
        """Raises ConfigError."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: must be in [0, 65535]")
        check_seconds("disaggregation-bootstrap-heartbeat-ttl", self.heartbeat_ttl_s)
        self.check_port()


@dataclass(frozen=True)
class UpArgs:
    """``pdjax up``; further options go to every ``pdjax serve``."""

    model: str = arg("model", "as for serve")
    prefill: int = arg("prefill", "number of prefill instances", 1)
    decode: int = arg("decode", "number of decode instances", 1)
    plain: int = arg("plain", "number of servers without PD", 0)
    router: str = arg("router", "rust, mini or none", "rust")
    host: str = arg("host", "address that everything listens on", "127.0.0.1")
    prefill_chips: str = arg("prefill-chips", "TPU_VISIBLE_CHIPS, one entry an instance: 0,1;2,3", "")
    decode_chips: str = arg("decode-chips", "the same for decode instances", "")
    as_json: bool = arg("json", "print the addresses as one JSON object", False)


@dataclass(frozen=True)
class ShowArgs:
    """``pdjax config show``, beside the flags of serve."""

    as_json: bool = arg("json", "one JSON object: flag → value and origin", False)


@dataclass(frozen=True)
class DoctorArgs:
    """``pdjax doctor``, beside the flags of serve."""

    as_json: bool = arg("json", "one JSON object: whether all is well, and every check", False)
