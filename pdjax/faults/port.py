"""FaultPort: through a Unix socket a test harness hurts this process from the inside, and hears what happens in it.

Only ``--disaggregation-fault-socket`` makes one. It wraps the ports of the manager and the turns of its threads, so the code
that serves is the code that is tested. One JSON object a line, both ways: {"id", "do", …} is answered by {"id",
"result"} or {"id", "error"}; {"hit", "line"} tells an event that was waited for, while the process stands still until
{"do": "go", "hit"} comes. Must never exist without its flag, nor listen on a network.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pdjax.core import wire
from pdjax.core.errors import ConfigError, PDError
from pdjax.core.pools import request_digest
from pdjax.engine.base import Leg
from pdjax.engine.manager import Ports
from pdjax.faults.channel import Cuts, FaultyChannel
from pdjax.faults.forge import forged_frame
from pdjax.faults.frames import FrameRules, Rule
from pdjax.faults.gate import Gate, Role
from pdjax.faults.transport import FaultyTransport
from pdjax.faults.work import ArmedErrors, PageHold, Parts

log = logging.getLogger(__name__)

CALL_LIMIT_S = 20.0  # of work on another thread
MAX_LINE_BYTES = 4 << 20


class Served(Parts, Protocol):
    """What the port needs of a node."""

    submit: Any


@dataclass
class _Place:
    transport: Any
    runner: Any
    scheduler: Any
    manager: Any


@dataclass(frozen=True)
class Watch:
    """An event that somebody waits for. room None, message "": any."""

    event: str
    room: int | None
    message: str

    def sees(self, line: Mapping[str, Any]) -> bool:
        """A milestone or message of the log, not the decision of the table that bears the same name."""
        return (
            line["event"] == self.event
            and not ("role" in line and self.event == "failed")
            and "kind" not in line
            and (self.room is None or ("room" in line and int(line["room"]) == self.room))
            and (not self.message or line.get("message") == self.message)
        )


@dataclass
class _Pace:
    """What work costs at least, in seconds: as the file of a scenario states it."""

    prefill_per_token_s: float = 0.0
    decode_step_s: float = 0.0


class _Turn(threading.local):
    """What the current thread is doing: hits of its turn, or None outside of one."""

    hits: list[tuple[int, Mapping[str, Any]]] | None = None


@dataclass
class _Refusal:
    status: int
    rooms: frozenset[int] = field(default_factory=frozenset)


class FaultPort:
    """``wrap`` and ``tap`` before the manager is made, ``attach`` after the scheduler, ``start``, ``close``."""

    def __init__(
        self, path: str, me: str, secret: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._me, self._secret, self._clock = path, me, secret, clock
        self.gate = Gate()
        self._cuts = Cuts(clock)
        self._rules = FrameRules(self._message_hit, secret)
        self._watches: list[Watch] = []
        self._pace = _Pace()
        self._refusals: list[_Refusal] = []
        self._numbers = itertools.count(1)
        self._turn = _Turn()
        self._place: Any = None
        self._hold: PageHold | None = None
        self._errors: ArmedErrors | None = None
        self._channel: FaultyChannel | None = None
        self._transport: FaultyTransport | None = None
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._write = threading.Lock()

    # ------------------------------------------------------------ around the ports

    def wrap(self, ports: Ports) -> Ports:
        """The same world with faults in it."""
        self._channel = FaultyChannel(
            ports.channel, self._me, self._rules, self._cuts, self._clock, self._peer_of,
            holding=lambda: bool(self._turn.hits),
        )  # fmt: skip
        self._transport = FaultyTransport(
            ports.transport, self._me, self._cuts, self._room_of, self._transfer_hit
        )
        return Ports(self._transport, self._channel, ports.registry, ports.clock)

    def _peer_of(self, address: str) -> str:
        return self._place.manager.peers.by_address(address) or ""

    def _room_of(self, uuid: int) -> int:
        rooms = list(self._place.manager.sender.rooms.values())
        return next((r.room for r in rooms if r.uuid == uuid), -1)

    def tap(self, then: Callable[[dict[str, Any]], None] | None) -> Callable[[dict[str, Any]], None]:
        """For the event log: tells what somebody waits for."""

        def line(record: dict[str, Any]) -> None:
            if then is not None:
                then(record)
            if any(watch.sees(record) for watch in self._watches):
                self._noticed(record)

        return line

    def _noticed(self, record: dict[str, Any]) -> None:
        number, turn = next(self._numbers), self._turn.hits
        if turn is None:  # an HTTP thread: nothing can be held here, its answer is waited for
            self._say({"hit": number, "line": record})
            return
        self.gate.hold(number)
        turn.append((number, record))

    def _message_hit(self, rule: Rule, m: wire.AnyMessage) -> None:
        self._say({"acted": rule.index, "room": m.room, "message": wire.EVENT_OF[type(m)]})

    def _transfer_hit(self, rule: Rule, room: int, uuid: int) -> None:
        self._say({"acted": rule.index, "room": room})

    # ------------------------------------------------------------ around the threads

    def attach(self, node: Served) -> None:
        scheduler, manager, runner = node.scheduler, node.manager, node.runner
        self._place = _Place(self._transport, runner, scheduler, manager)
        self._hold = PageHold(scheduler.cache)
        self._errors = ArmedErrors(self._place)
        self._around(manager, "turn", "driver")
        self._around(scheduler, "host_work", "scheduler")
        self._around(scheduler, "device_work", "scheduler")
        self._slow(runner, "prefill", lambda chunk: len(chunk.tokens) * self._pace.prefill_per_token_s)
        self._slow(runner, "decode", lambda rows: self._pace.decode_step_s)
        submit = node.submit

        def refusing(request: Any) -> None:
            self._refuse_if_told(request)
            submit(request)

        node.submit = refusing

    def _around(self, owner: Any, name: str, role: Role) -> None:
        """Each turn of a thread begins behind the gate, and ends before it when it met something waited for."""
        original, state = getattr(owner, name), self._turn

        def turn() -> Any:
            self.gate.enter(role)
            state.hits = []
            try:
                return original()
            finally:
                hits, state.hits = state.hits, None
                for number, record in hits:
                    if not self._say({"hit": number, "line": record}):
                        self.gate.release(number)
                if hits:
                    self.gate.enter(role)

        setattr(owner, name, turn)

    def _slow(self, owner: Any, name: str, cost_s: Callable[[Any], float]) -> None:
        original = getattr(owner, name)

        def work(what: Any) -> Any:
            if (seconds := cost_s(what)) > 0:
                time.sleep(seconds)  # this is the work that the file says it takes
            return original(what)

        setattr(owner, name, work)

    def _refuse_if_told(self, request: Any) -> None:
        for refusal in self._refusals:
            if request.room in refusal.rooms:
                reason = "bad_request" if refusal.status < 500 else "queue_full"
                digest = request_digest(request.prompt_ids, request.sampling.first_token_key())
                for room in sorted(refusal.rooms):
                    leg = Leg(
                        room, request.rid, digest, len(request.prompt_ids), request.bootstrap_host, None
                    )
                    with contextlib.suppress(PDError):  # it always raises: what the file says comes below
                        self._place.manager.refuse(leg, reason)
                raise PDError("refused by the trace", reason=reason, status=refusal.status, room=request.room)

    # ------------------------------------------------------------ the socket

    def start(self) -> None:
        """Raises ConfigError where the socket cannot be made."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # of the life before
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(1)
        except OSError as error:
            listener.close()
            raise ConfigError(f"--disaggregation-fault-socket {self._path}: {error.strerror}") from None
        self._listener = listener
        threading.Thread(target=self._serve, name="fault-port", daemon=True).start()
        log.warning("faults can be injected into this process through %s", self._path)

    def _serve(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._connection = connection
            try:
                with connection, connection.makefile("rb") as lines:
                    for line in lines:
                        self._command(line)
            except (
                OSError
            ) as error:  # a harness that was killed resets the connection: it has gone like any other
                log.warning("the harness at the fault socket has gone: %s", error)
            self._connection = None
            self.gate.release_all()

    def _command(self, line: bytes) -> None:
        answer: dict[str, Any] = {}
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError("the line is too long")
            command = msgspec.json.decode(line)
            answer["id"] = command.pop("id", None)
            answer["result"] = getattr(self, f"_do_{command.pop('do')}")(**command)
        except Exception as error:  # the harness is told, and the process goes on
            answer["error"] = f"{type(error).__name__}: {error}"
        self._say(answer)

    def _say(self, what: Mapping[str, Any]) -> bool:
        """False: nobody listens."""
        connection = self._connection
        if connection is None:
            return False
        try:
            with self._write:
                connection.sendall(msgspec.json.encode(what) + b"\n")
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.gate.release_all()
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    # ------------------------------------------------------------ commands

    def _do_watch(self, events: list[list[Any]]) -> None:
        self._watches = [Watch(event, room, message) for event, room, message in events]

    def _do_go(self, hit: int) -> None:
        self.gate.release(hit)

    def _do_flush(self) -> None:
        """What the held turn has sent leaves now: this process is about to be killed or stopped."""
        assert self._channel is not None
        self._on("driver", self._channel.send_late)

    def _do_rules(self, messages: list[list[Any]], transfers: list[list[Any]], ms_s: float) -> None:
        """Add rules: [index of the step, its value]. ms_s: seconds that a millisecond of the file lasts."""
        assert self._transport is not None
        self._rules.ms_s = self._transport.ms_s = ms_s
        self._rules.rules += [Rule(index, value) for index, value in messages]
        self._transport.rules += [Rule(index, value) for index, value in transfers]

    def _do_pace(self, prefill_per_token_s: float, decode_step_s: float) -> None:
        self._pace = _Pace(prefill_per_token_s, decode_step_s)

    def _do_cut(self, peer: str, for_s: float) -> None:
        self._cuts.cut(peer, for_s)

    def _do_refuse(self, rooms: list[int], status: int) -> None:
        self._refusals.append(_Refusal(status, frozenset(rooms)))

    def _do_error(self, where: str, room: int | None) -> None:
        assert self._errors is not None
        self._errors.arm(where, room)

    def _do_pages(self, free: int | None) -> bool:
        hold = self._hold
        assert hold is not None
        return bool(self._on("scheduler", lambda: hold.until(free)))

    def _do_address(self) -> str | None:
        """Where a P listens, which is what its frames come from; None on D."""
        address: str | None = self._place.manager.ports.channel.address
        return address

    def _do_address_of(self, peer: str) -> str:
        """What that peer's frames come from; "" when it is a stranger here."""
        return str(self._on("driver", lambda: self._place.manager.peers.address_of(peer)))

    def _do_forge(self, to: str, message: dict[str, Any]) -> str:
        manager = self._place.manager
        frame = self._on("driver", lambda: forged_frame(manager, to, message, self._secret))
        return str(frame.hex())

    def _do_inject(self, sender: str, frame: str) -> None:
        assert self._channel is not None
        self._channel.inject(sender, bytes.fromhex(frame))

    def _do_memory(self) -> dict[str, int]:
        """Arrays that live in this process, after what nobody holds is gone."""
        gc.collect()
        arrays = sys.modules["jax"].live_arrays()
        return {"arrays": len(arrays), "bytes": sum(array.nbytes for array in arrays)}

    def _do_reset(self) -> None:
        """As it was at the start of the process: no watch, rule, cut, refusal, armed error or page is held."""
        self._watches, self._refusals, self._pace = [], [], _Pace()
        assert self._channel is not None and self._transport is not None and self._errors is not None
        self._errors.clear()
        self.gate.release_all()
        self._on("driver", self._channel.reset)
        self._transport.reset()
        self._do_pages(None)

    def _on(self, role: Role, work: Callable[[], Any]) -> Any:
        """Have the thread do it, and wait for the result."""
        done = self.gate.call(role, work)
        if role == "driver":
            self._place.manager.ports.channel.wake()
        else:
            self._place.scheduler.wake()
        return done.result(CALL_LIMIT_S)


__all__ = ["FaultPort", "Served", "Watch"]
