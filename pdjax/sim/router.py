"""The simulated router x0 with its client c0: posts both legs, waits, retries, gives up, as the two real ones do.

mini: the answer is D's, whatever P says; a leg without a connection ends the request. rust: waits for both legs (of a
stream: for P's end first), and P's error comes before D's. Neither tells one server of the other's failure
(facts/router §3). Must never look into a server: it knows what an HTTP client knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdjax.core.errors import PDError
from pdjax.core.pools import request_digest
from pdjax.core.wire import MAX_ROOM
from pdjax.engine.base import Leg as ClaimedLeg
from pdjax.sched.request import SamplingParams
from pdjax.sim.loop import GAP_S, Event
from pdjax.sim.node import Client, Node
from pdjax.sim.runner import expected_tokens
from pdjax.sim.trace_types import Router as RouterSpec
from pdjax.sim.verdict import RETRIED, backoff_s, outcome_of, prompt_tokens, verdict
from pdjax.sim.world import World

SIDES = ("prefill", "decode")


@dataclass
class Leg:
    """One of the two posts of an attempt. status: None while open; 0: the connection broke."""

    side: str
    node: str
    options: Mapping[str, Any]
    clients: list[Client] = field(default_factory=list)
    accepted: bool = False
    status: int | None = None
    reason: str = ""
    closed: bool = False


@dataclass
class Record:
    """One request as its client sees it. rooms: of each attempt. Times in ms."""

    rid: str
    value: Mapping[str, Any]
    prompt: list[int]
    sampling: SamplingParams
    began: float
    rooms: list[int] = field(default_factory=list)
    legs: dict[str, Leg] = field(default_factory=dict)
    all_legs: list[Leg] = field(default_factory=list)
    aborted: bool = False
    outcome: str = ""
    reason: str = ""
    status: int = 0
    tokens: list[int] = field(default_factory=list)
    wrong: str = ""
    ended: float | None = None
    timeout: Event | None = None

    @property
    def stream(self) -> bool:
        return bool(self.value.get("stream", False))


class Router:
    """open: requests without an outcome."""

    def __init__(self, world: World, spec: RouterSpec, seed: int) -> None:
        self.world, self.spec, self.seed = world, spec, seed
        self.net = world.net
        self.records: dict[str, Record] = world.requests
        self.n_open = 0
        self.last_end_s = 0.0
        self._prompts: dict[str, list[int]] = {}
        world.on_crash.append(self._crashed)

    # ---------------------------------------------------------------- prompts

    def prompt_of(self, value: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]]) -> list[int]:
        """Token ids that only this rid has, after those that it shares with another."""
        chain = [value]
        while chain[-1]["rid"] not in self._prompts and "prefix" in chain[-1]:
            chain.append(values[chain[-1]["prefix"]["rid"]])
        for part in reversed(chain):  # a chain may be longer than Python's stack
            if part["rid"] not in self._prompts:
                self._prompts[part["rid"]] = self._prompt_after(part)
        return self._prompts[value["rid"]]

    def _prompt_after(self, value: Mapping[str, Any]) -> list[int]:
        own = prompt_tokens(value["rid"], self.seed, value["prompt"])
        if "prefix" in value:
            shared = self._prompts[value["prefix"]["rid"]][: value["prefix"]["tokens"]]
            own[: len(shared)] = shared
        return own

    # ---------------------------------------------------------------- one attempt

    def request(self, value: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]]) -> None:
        prompt = self.prompt_of(value, values)
        sampling = SamplingParams(max_new_tokens=value["output"])
        if "eos" in value:
            model = self.world.specs[value["decode"]].model
            stop = expected_tokens(prompt, sampling, value["eos"], model=model)[-1]
            sampling = SamplingParams(max_new_tokens=value["output"], stop_token_ids=frozenset({stop}))
        record = Record(value["rid"], value, prompt, sampling, self.world.now * 1000)
        self.records[record.rid] = record
        self.n_open += 1
        self._attempt(record, value["room"], value.get("legs", {}))

    def _attempt(self, record: Record, room: int, options: Mapping[str, Any]) -> None:
        first = not record.rooms
        record.rooms.append(room)
        self.world.posted |= set(_rooms(record, room))
        record.legs = {side: Leg(side, record.value[side], options.get(side, {})) for side in SIDES}
        record.all_legs += record.legs.values()
        posted = 0.0
        for leg in record.legs.values():
            delay = leg.options.get("delay", 0) / 1000
            posted = max(posted, delay)
            if not leg.options.get("drop", False):
                post = partial(self._post, record, leg, room)
                if delay:
                    self.net.after(delay, post, ("post", record.rid, leg.side))
                else:
                    post()
        log, event = self.world.log("x0"), "request" if first else "retry"

        def note() -> None:
            log.line(event, room, rid=record.rid, p=record.value["prefill"], d=record.value["decode"])

        if posted:
            self.net.after(posted, note, ("posted", record.rid))
        else:
            note()
        timeout_s = self.spec.timeout / 1000
        record.timeout = self.net.after(timeout_s, lambda: self._timed_out(record), ("timeout", record.rid))

    def _post(self, record: Record, leg: Leg, room: int) -> None:
        if record.ended is None and not leg.closed:
            name = ("http", record.rid, leg.side)
            self.net.post("x0", leg.node, lambda: self._arrive(record, leg, room), name)

    def _arrive(self, record: Record, leg: Leg, room: int) -> None:
        net, node = self.net, self.world.nodes[leg.node]
        until = net.blocked("x0", leg.node)
        if until and node.alive:
            net.at(until + GAP_S, lambda: self._arrive(record, leg, room), ("http", record.rid, leg.side))
            return
        if leg.closed:
            return
        if not node.alive:
            self._answer(record, leg, 0, "connection_refused")
            return
        leg.accepted = True
        rooms = _rooms(record, room)
        if "status" in leg.options:
            self._refuse(record, leg, node, rooms)
            return
        for one in rooms:
            client = Client()
            client.on_end = lambda: self._ended(record, leg)
            leg.clients.append(client)
            try:
                node.submit(record.rid, one, record.prompt, record.sampling, record.value["prefill"], client)
            except PDError as error:
                client.request = None
                for other in leg.clients[:-1]:
                    if other.request is not None:
                        node.scheduler.abort_request(other.request)
                self._answer(record, leg, error.status, error.reason)
                return

    def _refuse(self, record: Record, leg: Leg, node: Node, rooms: list[int]) -> None:
        status = leg.options["status"]
        reason = "bad_request" if status < 500 else "queue_full"
        digest = request_digest(record.prompt, record.sampling.first_token_key())
        for room in rooms:
            try:
                node.manager.refuse(
                    ClaimedLeg(room, record.rid, digest, len(record.prompt), record.value["prefill"], None),
                    reason,
                )
            except PDError as error:
                if error.reason == "duplicate_room":
                    status, reason = error.status, error.reason
        self._answer(record, leg, status, reason)

    # ---------------------------------------------------------------- answers

    def _ended(self, record: Record, leg: Leg) -> None:
        """A server has given the last output of one of the leg's parts."""
        ends = [client.end for client in leg.clients]
        if leg.status is not None or any(end is None for end in ends):
            return
        if len(ends) < record.value.get("n", 1):
            return
        bad = [end.failure for end in ends if end is not None and end.failure is not None]
        if bad:
            self._answer(record, leg, bad[0].status, bad[0].reason)
        elif any(end is not None and end.finish is not None and end.finish.type == "abort" for end in ends):
            self._answer(record, leg, 200, "client_abort")
        else:
            self._answer(record, leg, 200, "")

    def _answer(self, record: Record, leg: Leg, status: int, reason: str) -> None:
        """The server's answer, one trip later."""
        name = ("answer", record.rid, leg.side)

        def here() -> None:
            if leg.status is None and not leg.closed:
                leg.status, leg.reason = status, reason
                self._look(record)

        net = self.net
        net.after(net.delay(), lambda: net.when_open("x0", leg.node, here, name), name)

    def _crashed(self, name: str) -> None:
        for record in self.records.values():
            if record.ended is None:
                for leg in record.legs.values():
                    if leg.node == name and leg.accepted and leg.status is None:
                        self._answer(record, leg, 0, "connection_reset")

    def _look(self, record: Record) -> None:
        """Is this attempt decided?"""
        if record.ended is not None:
            return
        p, d = record.legs["prefill"], record.legs["decode"]
        decided = verdict(self.spec.mode, record.stream, p, d)
        if decided is not None:
            self._decided(record, *decided)

    def _timed_out(self, record: Record) -> None:
        if record.ended is None:
            self._decided(record, 502 if self.spec.mode == "rust" else 500, "router_timeout", True)

    def _decided(self, record: Record, status: int, reason: str, may_retry: bool) -> None:
        if record.timeout is not None:
            record.timeout.cancel()
        for leg in record.legs.values():
            if leg.status is None:
                self._close(record, leg)
        n = len(record.rooms)
        if may_retry and status in RETRIED and n <= self.spec.retries and not record.aborted:
            record.legs = {}
            delay = backoff_s(n, self.net.rng.random())
            self.net.after(delay, lambda: self._retry(record), ("retry", record.rid))
            return
        self._finish(record, status, reason)

    def _retry(self, record: Record) -> None:
        if record.aborted:
            self._finish(record, 500, "client_abort")
        else:
            self._attempt(record, self.net.rng.getrandbits(63), {})

    # ---------------------------------------------------------------- the end

    def _finish(self, record: Record, status: int, reason: str) -> None:
        record.ended, record.status = self.world.now * 1000, status
        self.n_open -= 1
        self.last_end_s = self.world.now
        record.outcome = outcome_of(status, reason, record.aborted)
        record.reason = reason if record.outcome != "ok" else ""
        if record.outcome == "ok":
            self._compare(record)
            if record.wrong:
                record.outcome, record.reason = "failed", "wrong_tokens"
        fields = {k: v for k, v in (("reason", record.reason), ("wrong", record.wrong)) if v}
        self.world.log("x0").line(
            "finished", record.rooms[0], rid=record.rid, outcome=record.outcome, status=status, **fields
        )

    def _compare(self, record: Record) -> None:
        spec = self.world.specs[record.value["decode"]]
        n = min(record.value["output"], spec.config.context_length - len(record.prompt))
        right = expected_tokens(record.prompt, record.sampling, n, model=spec.model)
        for client in record.legs["decode"].clients:
            record.tokens += client.tokens
            if client.tokens != right:
                record.wrong = f"tokens {client.tokens}, a server without PD gives {right}"

    def _close(self, record: Record, leg: Leg) -> None:
        """The router ends the connection of a leg: its server sees a disconnect, rust's D only when it next writes."""
        leg.closed = True
        late = self.spec.mode == "rust" and record.stream and leg.side == "decode"
        for client in leg.clients:
            if late:
                client.on_tokens = lambda c=client: self._hang_up(leg, c)  # type: ignore[misc]
            else:
                name = ("disconnect", record.rid, leg.side)
                self.net.post("x0", leg.node, lambda c=client: self._hang_up(leg, c), name)  # type: ignore[misc]

    def _hang_up(self, leg: Leg, client: Client) -> None:
        node = self.world.nodes[leg.node]
        until = self.net.blocked("x0", leg.node)
        if until:
            self.net.at(until + GAP_S, lambda: self._hang_up(leg, client), ("disconnect", leg.node))
        elif client.request is not None and client.end is None and node.serves(client):
            node.scheduler.abort_request(client.request)

    # ---------------------------------------------------------------- steps

    def abort(self, rid: str, sides: tuple[str, ...]) -> bool:
        """/abort_request on these sides. False: there is nothing to abort."""
        record = self.records.get(rid)
        if record is None or record.ended is not None:
            return False
        record.aborted = True
        for side in sides:
            self._abort_at(record.value[side], rid)
        return True

    def _abort_at(self, name: str, rid: str) -> None:
        until = self.net.frozen(name)
        if until:
            self.net.at(until + GAP_S, lambda: self._abort_at(name, rid), ("abort", name, rid))
        elif self.world.nodes[name].alive:
            self.world.nodes[name].scheduler.abort(rid)

    def disconnect(self, rid: str, sides: tuple[str, ...]) -> bool:
        """The connections of these legs close. False: there are none."""
        record = self.records.get(rid)
        if record is None or record.ended is not None:
            return False
        record.aborted = True
        for side in sides:
            leg = record.legs.get(side)
            if leg is not None and leg.status is None and not leg.closed:
                for client in leg.clients:
                    self._hang_up(leg, client)
                self._answer(record, leg, 0, "client_abort")
        return True


def _rooms(record: Record, first: int) -> list[int]:
    """The rooms of one attempt: each sample of a request has its own."""
    return [(first + i) & MAX_ROOM for i in range(record.value.get("n", 1))]
