"""The processes of one scenario file: registry, instances with their fault sockets, and their event logs.

Nodes have the names of the file (p0, d0, b0). Each is started, killed, stopped and started again on the same address by
its process id. Must never leave a process behind, nor touch one that it did not start.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from pdjax.campaign.plans import MAX_PEERS, FleetPlan, NodePlan, role_of
from pdjax.campaign.remote import Remote, RemoteError
from pdjax.engine.bootstrap.access import registry_token
from pdjax.serve.children import Child, ChildError, end_all
from pdjax.serve.router import free_ports, router_command, router_environ

T = TypeVar("T")
# A process is gone, or does not answer as it must.
DOWN = (RuntimeError, ChildError, OSError, httpx.HTTPError, RemoteError)
# Of one fleet, whatever it is, and no reason to lose what the others have shown.
FAILURES = (*DOWN, ValueError, LookupError, TypeError, AssertionError, msgspec.MsgspecError)
PROGRAM = (sys.executable, "-m", "pdjax.serve.cli")
START_S = 300.0  # a first start compiles
LISTED_S = 30.0  # an instance that serves has told the registry so
POLL_S = 0.02
REGISTRY, ROUTER = "b0", "x0"


@dataclass
class Seat:
    """One process of the fleet. lives: how many there were; started_s: how long the newest took to serve.

    leaving: it was told to end, and does so when it is done. struck: this harness has killed it. told: how it
    has ended is known to whoever asks for ``wrong_ends``.
    """

    name: str
    command: list[str]
    child: Child | None = None
    url: str = ""
    remote: Remote | None = None
    stopped: bool = False
    leaving: bool = False
    struck: bool = False
    told: bool = False
    lives: int = 0
    started_s: float = 0.0
    output: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive

    def wrong_end(self) -> str | None:
        """How its newest life has ended, if it was not to end, or not like that."""
        if self.child is None or self.child.alive or self.struck or self.told:
            return None
        code = self.child.process.returncode
        if not self.leaving:
            return f"{self.name} has ended by itself, with code {code}"
        # A router is none of ours: Python's ends by the very signal.
        return (
            f"{self.name} was told to end, and did with code {code}" if code and self.name != ROUTER else None
        )


class Fleet:
    """``async with Fleet(plan, directory, heard)``. heard: what the fault sockets of the processes say."""

    def __init__(
        self, plan: FleetPlan, directory: Path, heard: Callable[[Remote, dict[str, Any]], None] | None = None
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.logs = directory / "logs"
        self.seats: dict[str, Seat] = {}
        self.heard = heard or (lambda remote, said: None)
        self._wrong_ends: list[str] = []  # of lives before the newest
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(trust_env=False, timeout=30.0, limits=limits)
        self._secret_file = directory / "secret"
        self._registry_key: dict[str, str] = {}
        self._environ = {**router_environ("127.0.0.1", dict(os.environ)), "PYTHONUNBUFFERED": "1"}

    async def __aenter__(self) -> Fleet:
        self.logs.mkdir(parents=True)
        if self.plan.secret:
            secret = secrets.token_hex().encode()
            self._secret_file.write_bytes(secret + b"\n")
            self._registry_key = {"authorization": f"Bearer {registry_token(secret)}"}
        anywhere = ["--host", "127.0.0.1", "--port", "0"]
        self._seat(REGISTRY, [*PROGRAM, "bootstrap", *anywhere, *self._secret, *self.plan.bootstrap])
        try:
            await self.start(REGISTRY)
            for node in self.plan.nodes:
                self._seat(node.name, self._command(node))
            by_role = [[n for n in self.instances if role_of(n) == role] for role in ("prefill", "decode")]
            await asyncio.gather(*map(self._start_in_order, by_role))
            await asyncio.gather(*(self.ready(node.name) for node in self.plan.nodes))
            if self.plan.router:
                self._seat(ROUTER, self._router_command())
                await self.start(ROUTER)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ends = await self.close()
        if error is not None:
            for said in ends:
                error.add_note(said)

    def _seat(self, name: str, command: list[str]) -> None:
        self.seats[name] = Seat(name, command)

    @property
    def _secret(self) -> list[str]:
        return ["--disaggregation-secret-file", str(self._secret_file)] if self.plan.secret else []

    def _command(self, node: NodePlan) -> list[str]:
        port = self.seats[REGISTRY].url.rpartition(":")[2]
        return [
            *PROGRAM, "serve", "--model", self.plan.model, "--host", node.host, "--port", "0",
            "--instance-id", node.name, "--disaggregation-mode", node.role,
            "--disaggregation-bootstrap-host", "127.0.0.1", "--disaggregation-bootstrap-port", port,
            "--disaggregation-trace", str(self.logs), "--disaggregation-verify", "all",
            "--disaggregation-fault-socket", str(self._socket(node.name)), "--drain-linger", "0",
            *self._secret, *node.options,
        ]  # fmt: skip

    def _router_command(self) -> list[str]:
        port, metrics = free_ports("127.0.0.1", 2)
        urls = {node.name: self.seats[node.name].url for node in self.plan.nodes}
        prefills = [(url, self.bootstrap_port) for name, url in urls.items() if name.startswith("p")]
        decodes = [url for name, url in urls.items() if name.startswith("d")]
        return router_command(self.plan.router, "127.0.0.1", port, metrics, prefills, decodes)

    def _socket(self, name: str) -> Path:
        return self.directory / f"{name}.sock"

    @property
    def bootstrap_port(self) -> int:
        return int(self.seats[REGISTRY].url.rpartition(":")[2])

    @property
    def instances(self) -> list[str]:
        return [node.name for node in self.plan.nodes]

    def remote(self, name: str) -> Remote:
        """The fault socket of an instance that has been started."""
        remote = self.seats[name].remote
        assert remote is not None
        return remote

    # ------------------------------------------------------------ lives

    async def start(self, name: str) -> None:
        """A life of this seat; returns when it serves. Raises ChildError."""
        seat, began = self.seats[name], time.monotonic()
        if seat.remote is not None:  # of the life before
            await seat.remote.close()
            seat.remote = None
        self._wrong_ends += [said] if (said := seat.wrong_end()) else []
        seat.child = Child(name, seat.command, self._environ, seat.output.append)
        seat.leaving = seat.struck = seat.told = False
        seat.lives += 1
        while not await self._serves(seat):
            seat.child.check()
            if time.monotonic() - began > START_S:
                raise ChildError(f"{name} did not start within {START_S:g} s")
            await asyncio.sleep(POLL_S)
        if name in self.instances:
            seat.remote = Remote(name, lambda remote, said: self.heard(remote, said))
            await seat.remote.open(str(self._socket(name)))
            if name.startswith("p"):
                await self._keep_side_channel(seat)
        seat.started_s = time.monotonic() - began

    async def _start_in_order(self, names: list[str]) -> None:
        """At once, but the epochs of their lives in this order, as in the simulator: which of two D has the newer attempt
        is what a P decides by."""
        starting = []
        for name in names:
            starting.append(asyncio.create_task(self.start(name)))
            while not (self._lives(name) or starting[-1].done()):
                await asyncio.sleep(POLL_S)
        await asyncio.gather(*starting)

    async def _serves(self, seat: Seat) -> bool:
        """A router says nothing by itself: it is asked. What it had for an address, it has in every later life."""
        assert seat.child is not None
        port = seat.command.index("--port") + 1
        if seat.name == ROUTER:
            seat.url = f"http://127.0.0.1:{seat.command[port]}"
            try:
                return (await self.http.get(f"{seat.url}/health")).status_code == 200
            except httpx.HTTPError:
                return False
        if seat.child.ready is None:
            return False
        seat.url = seat.child.ready["url"]
        seat.command[port] = seat.url.rpartition(":")[2]
        return True

    async def _keep_side_channel(self, seat: Seat) -> None:
        """A new life of P listens where the old one did: its peers know that address."""
        assert seat.remote is not None
        if "--disaggregation-port-base" not in seat.command:
            address = await seat.remote.do("address")
            seat.command += ["--disaggregation-port-base", address.rpartition(":")[2]]
            seat.command += ["--disaggregation-max-peers", str(MAX_PEERS)]

    async def ready(self, name: str) -> None:
        """Until the instance has found a peer; where no other one runs its model, until it is listed."""
        if not self.plan.can_meet(name):
            await self.listed(name)
            return
        deadline = time.monotonic() + START_S
        while (await self.http.get(f"{self.seats[name].url}/readiness")).status_code != 200:
            if time.monotonic() > deadline:
                raise ChildError(f"{name} found no peer within {START_S:g} s")
            await asyncio.sleep(POLL_S)

    async def listed(self, name: str) -> None:
        """Until the registry shows the newest life of this instance, if there is a registry to show it."""
        deadline = time.monotonic() + LISTED_S
        while self.seats[REGISTRY].alive and not self.seats[REGISTRY].stopped:
            answer = await self.http.get(
                f"{self.seats[REGISTRY].url}/list",
                params={"role": role_of(name)},
                headers=self._registry_key,
            )
            if (name, self._newest_life(name)) in [
                (one["instance_id"], str(one["epoch"])) for one in answer.json()["instances"]
            ]:
                return
            if time.monotonic() > deadline:
                raise ChildError(f"the registry did not list {name} within {LISTED_S:g} s")
            await asyncio.sleep(POLL_S)

    def _newest_life(self, name: str) -> str:
        return str(max(self._lives(name)))

    def _lives(self, name: str) -> list[int]:
        """The epochs of its lives, after which their event logs are named."""
        return [int(path.stem.rpartition("-")[2]) for path in self.logs.glob(f"{name}-*.ndjson")]

    def kill(self, name: str) -> bool:
        """SIGKILL. False: it is dead already."""
        seat = self.seats[name]
        if not seat.alive:
            return False
        assert seat.child is not None
        seat.struck = True
        seat.child.tell(signal.SIGKILL)
        seat.child.join(10.0)
        seat.stopped = False
        return True

    def stop(self, name: str) -> bool:
        """SIGSTOP. False: it is dead."""
        seat = self.seats[name]
        if not seat.alive:
            return False
        assert seat.child is not None
        seat.child.tell(signal.SIGSTOP)
        seat.stopped = True
        return True

    def go_on(self, name: str) -> None:
        seat = self.seats[name]
        if seat.stopped and seat.alive:
            assert seat.child is not None
            seat.child.tell(signal.SIGCONT)
        seat.stopped = False

    async def drain(self, name: str) -> None:
        """POST /drain: from now on it may end at any time."""
        self.seats[name].leaving = True
        await self.http.post(f"{self.seats[name].url}/drain")

    def terminate(self, name: str) -> None:
        """SIGTERM."""
        seat = self.seats[name]
        if seat.alive:
            assert seat.child is not None
            seat.leaving = True
            seat.child.tell(signal.SIGTERM)

    def wrong_ends(self) -> list[str]:
        """Processes that have ended and were not to, or not with that code; each is told once."""
        now = {seat.name: said for seat in self.seats.values() if (said := seat.wrong_end())}
        for name in now:
            self.seats[name].told = True
        found, self._wrong_ends = [*self._wrong_ends, *now.values()], []
        return found

    async def end(self) -> list[str]:
        """Ask every process to end, the router first, and wait: what ``wrong_ends`` then has to tell."""
        for seat in self.seats.values():
            self.go_on(seat.name)
            if seat.remote is not None:
                await seat.remote.close()
            if seat.alive:
                seat.leaving = True
        children = [seat.child for seat in self.seats.values() if seat.child is not None]
        await asyncio.to_thread(end_all, children[::-1])
        return self.wrong_ends()

    async def close(self) -> list[str]:
        """Everything: what ``end`` has to tell."""
        ends = await self.end()
        await self.http.aclose()
        self._secret_file.unlink(missing_ok=True)
        return ends

    # ------------------------------------------------------------ what they hold

    async def state(self, name: str) -> dict[str, Any]:
        answer = await self.http.get(f"{self.seats[name].url}/server_info")
        found: dict[str, Any] = answer.json()["internal_states"][0]
        return found

    async def held(self, name: str, *, strict: bool = True) -> dict[str, int]:
        """What is not free on this instance; strict False: without abandoned pulls and the notices that wait for them."""
        try:
            state = await self.state(name)
        except httpx.HTTPError:
            seat = self.seats[name]
            if seat.alive and not seat.leaving:
                raise
            return {"leaving": 1} if seat.alive else {}  # its server goes first, the process last
        held = dict(state["held"])
        transport = state["transport"]
        if not strict and transport.get("graveyard"):
            held["pulls"] -= transport["graveyard"]
            held["notices"] = 0
        elif strict:
            held["graveyard"] = transport.get("graveyard", 0)
        held["pulls_live"] = transport.get("pulls_live", 0)
        held["registered_bytes"] = transport.get("registered_bytes", 0)
        held["pages"] = state["used_pages"]
        held["requests"] = state["num_running"] + state["num_waiting"] + state["http"]["live"]
        return {k: v for k, v in held.items() if v}

    async def held_by_all(self, *, strict: bool = True) -> dict[str, dict[str, int]]:
        names = [n for n in self.instances if self.seats[n].alive and not self.seats[n].stopped]
        found = await asyncio.gather(*(self.held(n, strict=strict) for n in names))
        return {name: held for name, held in zip(names, found, strict=True) if held}

    async def until_free(
        self, within_s: float, *, strict: bool = True
    ) -> tuple[float, dict[str, dict[str, int]]]:
        """(seconds it took, what is left when the time is over: {} when all is free)."""
        began = time.monotonic()
        while held := await self.held_by_all(strict=strict):
            if time.monotonic() - began > within_s:
                return time.monotonic() - began, held
            await asyncio.sleep(0.05)
        return time.monotonic() - began, {}

    def log_files(self) -> list[Path]:
        return sorted(self.logs.glob("*.ndjson"))


def failure(error: BaseException) -> str:
    """A fleet or a campaign that failed in the middle, with the processes that had ended by themselves."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
    return f"the fleet failed: {type(error).__name__} {error}{notes}"


def to_its_end(campaign: Coroutine[Any, Any, T]) -> T:
    """Run it; a SIGTERM ends the processes that it started, as Ctrl-C does, and then this one (143)."""

    async def ended_by_signal() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await campaign

    try:
        return asyncio.run(ended_by_signal())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
