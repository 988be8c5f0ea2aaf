"""A whole deployment on one machine: registry, prefill and decode instances, servers without PD, and the router.

Children bind port 0 themselves and tell their address in a ready line; only the router needs a port picked for it.
Must never leave a child behind, and never print an address that cannot serve yet.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from pdjax.core.errors import ConfigError
from pdjax.serve.args import UpArgs
from pdjax.serve.children import Child, ChildError, end_all
from pdjax.serve.config_file import Setting
from pdjax.serve.end_request import EndRequest
from pdjax.serve.options import options_of, variable, variable_set
from pdjax.serve.router import check_kind, free_ports, router_command, router_environ, router_serves

START_TIMEOUT_S = 900.0  # reading a model and compiling on a small machine
ROUTER_TIMEOUT_S = 60.0
ROUTER_TRIES = 3
POLL_S = 0.1
PROGRAM = (sys.executable, "-m", "pdjax.serve.cli")


# One machine, and a router that would have to be told whom to believe.
TLS = ("ssl-certfile", "ssl-keyfile", "ssl-ca-file")
API_KEY = "api-key-file"
DRAIN_LINGER = "drain-linger"
OF_THE_REGISTRY_TOO = ("disaggregation-secret-file", "max-connections")


def _value_of(flag: str, options: Sequence[str]) -> str:
    """What the options of a command line give a flag, the last time; "" when they do not."""
    found = ""
    for one, after in zip(options, (*options[1:], ""), strict=False):
        name, is_joined, value = one.partition("=")
        if name == f"--{flag}":
            found = value if is_joined else after
    return found


@dataclass(frozen=True)
class Plan:
    """What to start. extra: further options for every ``pdjax serve``; chips: TPU_VISIBLE_CHIPS of each instance."""

    model: str
    prefill: int = UpArgs.prefill
    decode: int = UpArgs.decode
    plain: int = UpArgs.plain
    router: str = UpArgs.router
    host: str = UpArgs.host
    prefill_chips: tuple[str, ...] = ()
    decode_chips: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigError."""
        check_kind(self.router)
        for flag, count in (("prefill", self.prefill), ("decode", self.decode), ("plain", self.plain)):
            if count < 0:
                raise ConfigError(f"--{flag} {count}: must be at least 0")
        if self.prefill + self.decode + self.plain == 0:
            raise ConfigError("nothing to start: give --prefill and --decode")
        if self.router != "none" and not (self.prefill and self.decode):
            raise ConfigError("a router needs at least one prefill and one decode instance, or --router none")
        for flag in TLS:
            if _value_of(flag, self.extra):
                raise ConfigError(
                    f"--{flag}: pdjax up serves this machine without TLS; start servers with it by hand"
                )
        if self.router == "mini" and (_value_of(API_KEY, self.extra) or os.environ.get(variable(API_KEY))):
            raise ConfigError(
                f"--{API_KEY} with --router mini: it passes no key on (docs/routers.md); take rust"
            )
        for flag, chips, count in (
            ("prefill-chips", self.prefill_chips, self.prefill),
            ("decode-chips", self.decode_chips, self.decode),
        ):
            if chips and len(chips) != count:
                raise ConfigError(f"--{flag} names chips for {len(chips)} instances, there are {count}")


# What up decides for each of its children; nothing that the parent was given may speak for them.
OURS = (
    *("host", "port", "instance-id", "with-bootstrap", "config", *TLS),
    *("disaggregation-mode", "disaggregation-bootstrap-host", "disaggregation-bootstrap-port"),
)


def from_file(settings: Mapping[str, Setting], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Options for every ``pdjax serve`` from up's own file, less those that the environment sets. Raises ConfigError."""
    out: list[str] = []
    for flag, one in settings.items():
        if flag in options_of(((UpArgs, ""),)) or variable_set(flag, environ):
            continue
        if flag in OURS:
            raise ConfigError(
                f"{flag} in line {one.line} of the file of --config: pdjax up chooses it itself; drop it"
            )
        if isinstance(one.value, bool):
            out.append(f"--{flag}" if one.value else f"--no-{flag}")
        else:
            out += [f"--{flag}", str(one.value)]
    return tuple(out)


def _has_told(child: Child) -> bool:
    return child.ready is not None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Fleet:
    """The children of one plan. ``start`` returns when a request through the router can be served.

    stop: ends every wait when it is asked; without one only a child does.
    """

    def __init__(
        self, plan: Plan, stop: EndRequest | None = None, forward: Callable[[str], None] = _say
    ) -> None:
        plan.check()
        self.plan = plan
        self.children: list[Child] = []
        self.addresses: dict[str, str] = {}
        self._stop, self._owns_stop = stop or EndRequest(), stop is None
        self._forward = forward
        self._http = httpx.Client(trust_env=False, timeout=5.0)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Raises ChildError when a child ends or is late, KeyboardInterrupt when ``stop`` is asked."""
        bootstrap: str | None = None
        if self.plan.prefill or self.plan.decode:
            command = [*PROGRAM, "bootstrap", "--host", self.plan.host, "--port", "0"]
            for flag in OF_THE_REGISTRY_TOO:
                if value := _value_of(flag, self.plan.extra):
                    command += [f"--{flag}", value]
            registry = self._spawn("bootstrap", command)
            self._await_lines([registry])
            bootstrap = self.addresses["bootstrap"]
        nodes = self._spawn_nodes(bootstrap)
        self._await_lines(nodes)
        paired = self.plan.prefill and self.plan.decode
        for node in nodes if paired else ():  # half of a pair never finds a peer
            self._await(f"{node.name} to find a peer", partial(self._is_ready, self.addresses[node.name]))
        if self.plan.router != "none" and bootstrap is not None:
            self._start_router(int(bootstrap.rsplit(":", 1)[1]))

    def _spawn_nodes(self, bootstrap: str | None) -> list[Child]:
        plan = self.plan
        base = [*PROGRAM, "serve", "--model", plan.model, "--host", plan.host, "--port", "0"]
        if not (_value_of(DRAIN_LINGER, plan.extra) or variable_set(DRAIN_LINGER)):
            base += [f"--{DRAIN_LINGER}", "0"]  # its router ends first: nobody is left to be refused
        nodes = []
        for role, count, chips in (
            ("prefill", plan.prefill, plan.prefill_chips),
            ("decode", plan.decode, plan.decode_chips),
            ("plain", plan.plain, ()),
        ):
            for i in range(count):
                name, options = f"{role}-{i}", []
                if role != "plain" and bootstrap is not None:
                    host, port = bootstrap.removeprefix("http://").rsplit(":", 1)
                    options = ["--disaggregation-mode", role, "--instance-id", name]
                    options += ["--disaggregation-bootstrap-host", host.strip("[]")]
                    options += ["--disaggregation-bootstrap-port", port]
                environ = {"TPU_VISIBLE_CHIPS": chips[i]} if chips else {}
                nodes.append(self._spawn(name, [*base, *options, *plan.extra], **environ))
        return nodes

    def _spawn(self, name: str, command: Sequence[str], **environ: str) -> Child:
        inherited = {k: v for k, v in os.environ.items() if k not in {variable(flag) for flag in OURS}}
        full = {**router_environ(self.plan.host, inherited), "PYTHONUNBUFFERED": "1", **environ}
        child = Child(name, command, full, self._forward)
        self.children.append(child)
        return child

    # ------------------------------------------------------------ waiting

    def check(self) -> None:
        """Raises ChildError when any child has ended."""
        for child in self.children:
            child.check()

    def _await(self, what: str, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise ChildError(f"waited {timeout_s:g} s for {what}")
            if self._stop.wait(POLL_S):
                raise KeyboardInterrupt

    def _await_lines(self, children: Sequence[Child]) -> None:
        for child in children:
            self._await(f"{child.name} to start", partial(_has_told, child))
            assert child.ready is not None
            self.addresses[child.name] = child.ready["url"]

    def _is_ready(self, url: str) -> bool:
        try:
            return self._http.get(f"{url}/readiness").status_code == 200
        except httpx.HTTPError:
            return False

    # ------------------------------------------------------------ router

    def _start_router(self, bootstrap_port: int) -> None:
        prefills = [
            (url, bootstrap_port) for name, url in self.addresses.items() if name.startswith("prefill-")
        ]
        decodes = [url for name, url in self.addresses.items() if name.startswith("decode-")]
        for left in reversed(range(ROUTER_TRIES)):
            port, metrics = free_ports(self.plan.host, 2)
            url = f"http://{self.plan.host}:{port}"
            command = router_command(self.plan.router, self.plan.host, port, metrics, prefills, decodes)
            child = self._spawn("router", command)
            serves = partial(router_serves, self._http, self.plan.router, url, len(prefills) + len(decodes))
            try:
                self._await("the router to see its workers", serves, ROUTER_TIMEOUT_S)
            except ChildError:
                if child.alive or not left:
                    raise
                # It ended alone: somebody took its port between our look and its bind.
                self.children.remove(child)
                self.check()
                continue
            self.addresses["router"] = url
            return

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End every child, the router first, so that no new request comes while the rest goes."""
        late = end_all(list(reversed(self.children)))
        if late:
            self._forward(f"ended by force: {', '.join(late)}")
        self._http.close()
        if self._owns_stop:
            self._stop.close()


def grouped(addresses: dict[str, str]) -> dict[str, object]:
    """Addresses as --json prints them: one text for bootstrap and router, a list for each role."""
    out: dict[str, object] = {name: addresses[name] for name in ("bootstrap", "router") if name in addresses}
    for role in ("prefill", "decode", "plain"):
        urls = [url for name, url in addresses.items() if name.startswith(f"{role}-")]
        if urls:
            out[role] = urls
    return out


def up(plan: Plan, *, as_json: bool = False) -> int:
    """Run a plan until a signal (0) or until a child ends (1, or 2 for a wrong option of a child); says which one. Raises ConfigError."""
    stop = EndRequest()
    stop.listen()
    with Fleet(plan, stop) as fleet:
        try:
            fleet.start()
            if as_json:
                print(json.dumps(grouped(fleet.addresses)), flush=True)
            else:
                for name, url in fleet.addresses.items():
                    print(f"{name} {url}", flush=True)
            while not stop.wait(2 * POLL_S):
                fleet.check()
        except ChildError as error:
            _say(f"pdjax up: {error}: stopping the others")
            return error.code
        except KeyboardInterrupt:
            return 0
    return 0
