"""What the steps of a trace do to a world: when each fires, and what each action means (trace-format).

A fault names its target and is skipped when there is none, so that deleting a step never changes what another means.
Must never change a server's code or state but through what the step says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pdjax.core import wire
from pdjax.engine.bootstrap.registry import BadRegistration
from pdjax.faults.forge import forged_frame
from pdjax.faults.frames import FrameRules, Rule
from pdjax.faults.work import INJECTED, rooms_pulling
from pdjax.sim.loop import Name
from pdjax.sim.net import REGISTRY
from pdjax.sim.router import SIDES, Router
from pdjax.sim.trace_types import EMITTERS, On, Step, Trace, room_text
from pdjax.sim.transport import Pull
from pdjax.sim.world import World


class _Said(msgspec.Struct):
    """What names a message: its type and its room."""

    t: str
    room: int


class _Glance(msgspec.Struct, array_like=True):
    """As much of a frame that a node has just made as its name needs."""

    instance: str
    epoch: int
    stamp_us: int
    echo_us: int
    echo_epoch: int
    held_us: int
    messages: list[_Said] = []


_glance = msgspec.msgpack.Decoder(_Glance)


@dataclass
class _Wait:
    step: Step
    left: int


@dataclass
class Scenario:
    """The steps of one trace at work. fired: index → True when the action found its target."""

    world: World
    router: Router
    trace: Trace
    fired: dict[int, bool] = field(default_factory=dict)
    pending: int = 0  # timed steps that have not fired
    last_s: float = 0.0
    _waiting: dict[str, list[_Wait]] = field(default_factory=dict)
    _due: list[Step] = field(default_factory=list)
    _transfers: list[Rule] = field(default_factory=list)
    _counts: dict[tuple[str, Any], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._messages = FrameRules(self._hit)
        self._requests = {s.value["rid"]: s.value for s in self.trace.steps if s.action == "request"}
        self.world.net.frame_name = self._frame_name
        self.world.taps.append(self._line)
        self.world.instants.insert(0, self._after_event)
        by_time: dict[float, list[Step]] = {}
        for step in self.trace.steps:
            if step.on is not None:
                self._waiting.setdefault(step.on.event, []).append(_Wait(step, step.nth))
            else:
                by_time.setdefault(step.at or 0.0, []).append(step)
        self.pending = sum(map(len, by_time.values()))
        for at_ms, steps in by_time.items():
            if at_ms == 0:
                self._perform_all(steps)
            else:
                name = ("steps", *(s.index for s in steps))
                self.world.net.at(at_ms / 1000, lambda s=steps: self._perform_all(s), name)  # type: ignore[misc]

    # ---------------------------------------------------------------- triggers

    def _line(self, line: dict[str, Any]) -> None:
        waiting = self._waiting.get(line["event"])
        if not waiting or ("role" in line and line["event"] == "failed") or "kind" in line:
            return
        for wait in list(waiting):
            if self._matches(wait.step.on, line):
                wait.left -= 1
                if wait.left == 0:
                    waiting.remove(wait)
                    self._trigger(wait.step)

    @staticmethod
    def _matches(on: On | None, line: Mapping[str, Any]) -> bool:
        assert on is not None
        return (
            (on.room is None or ("room" in line and int(line["room"]) == on.room))
            and (not on.node or on.node in (line["node"], line.get("instance")))
            and (not on.message or line.get("message") == on.message)
            and line["node"][0] in EMITTERS[on.event]
        )

    def _trigger(self, step: Step) -> None:
        if step.after:
            self.pending += 1
            self.world.net.after(step.after / 1000, lambda: self._perform_all([step]), ("steps", step.index))
        else:
            self.pending += 1
            self._due.append(step)

    def _after_event(self) -> None:
        """Steps that waited for what has just happened act before anything else does."""
        while self._due:
            due, self._due = self._due, []
            self._perform_all(due)

    def _perform_all(self, steps: list[Step]) -> None:
        for step in steps:
            self.pending -= 1
            self.last_s = self.world.now
            worked = getattr(self, f"_{step.action}")(step, step.value)
            self.fired[step.index] = worked is not False
            if step.action != "request":
                self.world.log("sim").line(
                    "step",
                    step=step.index,
                    action=step.action,
                    **({} if worked is not False else {"skipped": True}),
                )

    # ---------------------------------------------------------------- requests

    def _request(self, step: Step, value: Mapping[str, Any]) -> None:
        self.router.request(value, self._requests)

    def _abort(self, step: Step, value: Mapping[str, Any]) -> bool:
        return self.router.abort(value["rid"], tuple(value.get("to", SIDES)))

    def _disconnect(self, step: Step, value: Mapping[str, Any]) -> bool:
        return self.router.disconnect(value["rid"], tuple(value.get("to", SIDES)))

    # ---------------------------------------------------------------- messages

    def _frame_name(self, src: str, dst: str, frame: bytes) -> Name:
        messages = _glance.decode(memoryview(frame)[wire.HEAD_BYTES :]).messages
        if messages:
            kind, room = messages[0].t, room_text(messages[0].room)
        else:
            kind, room = "stamp", f"{src}-{dst}"
        n = self._counts[kind, room] = self._counts.get((kind, room), 0) + 1
        return "deliver", kind, room, n

    def _message(self, step: Step, value: Mapping[str, Any]) -> None:
        self._messages.rules.append(Rule(step.index, value))
        self.world.net.frame_rules = self._messages.copies

    def _hit(self, rule: Rule, m: wire.AnyMessage) -> None:
        self.world.log("sim").line(
            "hit", m.room, step=rule.index, do=rule.value["do"], message=wire.EVENT_OF[type(m)]
        )

    # ---------------------------------------------------------------- transfers

    def _transfer(self, step: Step, value: Mapping[str, Any]) -> None:
        self._transfers.append(Rule(step.index, value))
        self.world.net.part_rules = self._ruled_pull

    def _ruled_pull(
        self, pull: Pull, uuid: int
    ) -> Callable[[int, Any], tuple[Any, str | None, float | None]] | None:
        assert pull.server is not None
        src, dst = pull.server.owner.node, pull.owner.node
        room = next(iter(rooms_pulling(self.world.nodes[dst].manager, uuid)), -1)
        acting = []
        for rule in self._transfers:
            match = rule.value["match"]
            if (
                match.get("room", room) == room
                and match.get("from", src) == src
                and match.get("to", dst) == dst
                and match.get("part", 0) < len(pull.parts)
                and rule.turn()
            ):
                acting.append(rule)
                self.world.log("sim").line("hit", room, step=rule.index, do=rule.value["do"], uuid=str(uuid))
        if not acting:
            return None

        def fate(i: int, array: Any) -> tuple[Any, str | None, float | None]:
            extra = 0.0
            for rule in acting:
                value = rule.value
                if value["match"].get("part", i) != i:
                    continue
                do = value["do"]
                if do == "hang":
                    return array, None, None
                if do == "fail":
                    return None, INJECTED, extra
                if do == "corrupt":
                    array = array.copy()
                    array.reshape(-1).view(np.uint8)[0] ^= 1
                elif do == "truncate":
                    array = array.reshape(-1)[:-1]
                else:
                    extra += value["by"] / 1000
            return array, None, extra

        return fate

    # ---------------------------------------------------------------- frames that nobody sent

    def _inject(self, step: Step, value: Mapping[str, Any]) -> bool:
        if value["to"] == REGISTRY:
            return self._inject_registry(bytes.fromhex(value["bytes"]))
        to = self.world.nodes[value["to"]]
        if not to.alive:
            return False
        source = self.world.nodes[value["from"]] if "from" in value else None
        if "bytes" in value:
            frame = bytes.fromhex(value["bytes"])
        else:
            assert source is not None
            frame = forged_frame(source.manager, to.name, value["message"])
        if source is not None and (source.role == "prefill") != (to.role == "prefill"):
            sender = source.channel.address or source.channel.name
        elif to.role == "prefill":
            sender = "stranger@1"
        else:
            first_p = next(n for n in self.world.nodes.values() if n.role == "prefill")
            sender = first_p.channel.address or ""
        to.channel.take(sender, frame)
        return True

    def _inject_registry(self, data: bytes) -> bool:
        registry = self.world.net.registry
        if registry is None:
            return False
        try:
            registry.register({"garbage": data.hex()}, self.world.now)
        except BadRegistration as error:
            self.world.log(REGISTRY).line("refused", detail=str(error))
        return True

    # ---------------------------------------------------------------- work that raises

    def _error(self, step: Step, value: Mapping[str, Any]) -> bool:
        node = self.world.nodes[value["node"]]
        if not node.alive:
            return False
        node.errors.arm(value["in"], value.get("room"))
        return True

    # ---------------------------------------------------------------- processes and links

    def _crash(self, step: Step, name: str) -> bool:
        alive = self.world.net.registry is not None if name == REGISTRY else self.world.nodes[name].alive
        if alive:
            self.world.crash(name)
        return alive

    def _restart(self, step: Step, name: str) -> bool:
        alive = self.world.net.registry is not None if name == REGISTRY else self.world.nodes[name].alive
        if not alive:
            self.world.restart(name)
        return not alive

    def _stop(self, step: Step, value: Mapping[str, Any]) -> bool:
        name = value["node"]
        if name != REGISTRY and not self.world.nodes[name].alive:
            return False
        self.world.net.freeze(name, value["for"] / 1000)
        return True

    def _partition(self, step: Step, value: Mapping[str, Any]) -> None:
        a, b = value["between"]
        self.world.net.cut(a, b, value["for"] / 1000)

    def _clock(self, step: Step, value: Mapping[str, Any]) -> None:
        offsets = self.world.clock_offset_s
        offsets[value["node"]] = offsets.get(value["node"], 0.0) + value["jump"] / 1000

    def _drain(self, step: Step, value: Mapping[str, Any]) -> bool:
        name = value["node"]
        node = self.world.nodes[name]
        if not node.alive or node.draining:
            return False
        self.world.drain(name, value["within"] / 1000 if "within" in value else None)
        return True

    def _pages(self, step: Step, value: Mapping[str, Any]) -> bool:
        node = self.world.nodes[value["node"]]
        if not node.alive or not node.page_hold.until(value["free"]):
            return False
        if value["free"] is None:
            node.wake_scheduler()
        return True

    def idle_rules(self) -> list[int]:
        """Steps whose rule was in force and never acted: nothing matched it, or not often enough."""
        return sorted(rule.index for rule in [*self._messages.rules, *self._transfers] if not rule.used)

    def give_back_pages(self) -> None:
        """The pressure of ``pages`` steps is over."""
        for node in self.world.nodes.values():
            if node.alive and node.page_hold.until(None):
                node.wake_scheduler()
