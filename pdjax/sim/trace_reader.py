"""The checks of trace.json that the schema cannot say: nodes, rids, rooms and steps that can happen.

Every error names the key and the step. Must never accept a file whose steps cannot fire, round a room, or run anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdjax.core import wire
from pdjax.core.reasons import REASONS
from pdjax.sim.digest import is_digest
from pdjax.sim.flags import node_spec
from pdjax.sim.loop import KINDS, Name, name_of
from pdjax.sim.node import NodeSpec, Timing
from pdjax.sim.schema import TraceError, show
from pdjax.sim.trace_types import (
    ACTIONS,
    EMITTERS,
    PROPERTIES,
    ROUTER_REASONS,
    WORK_OF,
    Expected,
    On,
    Router,
    Step,
    Trace,
)

_TO_SENDER = tuple(wire.EVENT_OF[kind] for kind in wire.TO_SENDER)


def exact_room(value: Any, path: str) -> int:
    """A room as an integer below 2^63. Raises TraceError."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= wire.MAX_ROOM:
        raise TraceError(
            path, f"an exact integer in [0, 2^63), or its digits as a text, expected, {show(value)} found"
        )
    return value


@dataclass
class Reader:
    """One file on its way to a Trace."""

    raw: Mapping[str, Any]
    nodes: dict[str, NodeSpec] = field(default_factory=dict)
    requests: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rooms: dict[int, None] = field(default_factory=dict)
    rooted: set[str] = field(default_factory=set)  # requests whose chain of prefixes was seen to end

    def trace(self) -> Trace:
        raw = self.raw
        world, expect = raw.get("world", {}), raw.get("expect", {})
        self._read_nodes(world)
        for i, step in enumerate(raw["steps"]):
            self._note_rooms(step, f"steps[{i}]")
        steps = tuple(self._step(i, step) for i, step in enumerate(raw["steps"]))
        offsets = world.get("clock_offset", {})
        for name in offsets:
            self._node(name, f"world.clock_offset.{name}")
        return Trace(
            raw=raw,
            name=raw.get("name", ""),
            why=raw.get("why", ""),
            seed=raw.get("seed", 0),
            nodes=tuple(self.nodes.values()),
            router=Router(**world.get("router", {})),
            timing=Timing(**world.get("timing", {})),
            clock_offset=offsets,
            steps=steps,
            outcomes={k: self._expected(k, v) for k, v in expect.get("outcomes", {}).items()},
            violations=tuple(self._property(i, v) for i, v in enumerate(expect.get("violations", ()))),
            quiescent_within=expect.get("quiescent_within"),
            choices=tuple(self._choices(raw.get("choices", ()))),
            digest=self._digest(),
        )

    # ---------------------------------------------------------------- the world

    def _read_nodes(self, world: Mapping[str, Any]) -> None:
        ranks = world.get("ranks", 1)
        if ranks > 1:
            raise TraceError("world.ranks", f"{ranks} hosts for each instance: this version has only one")
        names = [*world.get("prefill", ["p0"]), *world.get("decode", ["d0"])]
        pages = world.get("pages", {})
        for name in pages:
            if name not in names:
                raise TraceError(f"world.pages.{name}", self._no_such(name, names))
        flags = world.get("flags", {})
        for key, value in flags.items():
            if isinstance(value, dict) and key not in names:
                raise TraceError(f"world.flags.{key}", self._no_such(key, names))
        common = {k: v for k, v in flags.items() if not isinstance(v, dict)}
        for name in names:
            values = {(k, f"world.flags.{k}"): v for k, v in common.items()}
            values |= {(k, f"world.flags.{name}.{k}"): v for k, v in flags.get(name, {}).items()}
            self.nodes[name] = node_spec(
                name, values, world.get("page_size", 16), pages.get(name, 64), world.get("pools", ["main_kv"])
            )

    @staticmethod
    def _no_such(name: str, names: Iterable[str]) -> str:
        return f"the file has no node {name}; it has {', '.join(names)}"

    def _node(self, name: str, path: str, *, also: tuple[str, ...] = ()) -> str:
        if name not in self.nodes and name not in also:
            raise TraceError(path, self._no_such(name, [*self.nodes, *also]))
        return name

    # ---------------------------------------------------------------- steps

    def _note_rooms(self, step: Mapping[str, Any], path: str) -> None:
        """The rooms and rids that the file has, so that later checks know them whatever the order of steps."""
        if "request" in step:
            request, path = step["request"], f"{path}.request"
            if request["rid"] in self.requests:
                raise TraceError(f"{path}.rid", f"{request['rid']} is the rid of another request")
            self.requests[request["rid"]] = request
            room = exact_room(request["room"], f"{path}.room")
            for i in range(request.get("n", 1)):
                self.rooms[(room + i) & wire.MAX_ROOM] = None
        if "room" in step.get("inject", {}).get("message", {}):
            self.rooms[exact_room(step["inject"]["message"]["room"], f"{path}.inject.message.room")] = None

    def _room(self, value: Any, path: str) -> int:
        room = exact_room(value, path)
        if room not in self.rooms:
            raise TraceError(path, f"the file has no room {room}: this can never happen")
        return room

    def _step(self, index: int, step: Mapping[str, Any]) -> Step:
        path = f"steps[{index}]"
        action = next(a for a in ACTIONS if a in step)
        value = step[action]
        check = getattr(self, f"_check_{action}")
        value = check(value, f"{path}.{action}")
        on = self._on(step["on"], f"{path}.on") if "on" in step else None
        return Step(index, action, value, step.get("at"), on, step.get("nth", 1), step.get("after", 0.0))

    def _on(self, on: Mapping[str, Any], path: str) -> On:
        event, node, message = on["event"], on.get("node", ""), on.get("message", "")
        if node:
            self._node(node, f"{path}.node", also=("x0", "b0"))
            if node[0] not in EMITTERS[event]:
                raise TraceError(f"{path}.node", f"{node} never emits {event}: this can never happen")
        if message and event not in ("sent", "delivered"):
            raise TraceError(f"{path}.message", f"{event} has no message; sent and delivered have")
        room = self._room(on["room"], f"{path}.room") if "room" in on else None
        if room is not None and EMITTERS[event] == "pdb":
            raise TraceError(f"{path}.room", f"{event} is about a process, not about a room")
        return On(event, room, node, message)

    def _check_request(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        out = dict(value)
        out["room"] = exact_room(value["room"], f"{path}.room")
        for side, letter in (("prefill", "p"), ("decode", "d")):
            first = next(name for name in self.nodes if name[0] == letter)
            out[side] = self._node(value.get(side, first), f"{path}.{side}")
        if value.get("eos", 0) > value["output"]:
            raise TraceError(f"{path}.eos", f"token {value['eos']} of {value['output']} can never come")
        prefix = value.get("prefix")
        if prefix is not None:
            other = self._rid(prefix["rid"], f"{path}.prefix.rid")
            if other == value["rid"]:
                raise TraceError(f"{path}.prefix.rid", "a request shares its prompt with another one")
            longest = min(value["prompt"], self.requests[other]["prompt"])
            if prefix["tokens"] > longest:
                raise TraceError(f"{path}.prefix.tokens", f"at most {longest} tokens are in both prompts")
            seen, at = {value["rid"]}, other
            while at not in self.rooted and "prefix" in self.requests.get(at, {}):
                if at in seen:
                    raise TraceError(f"{path}.prefix.rid", "prompts that share each other's beginning")
                seen.add(at)
                at = self.requests[at]["prefix"]["rid"]
            self.rooted |= seen
        return out

    def _rid(self, rid: str, path: str) -> str:
        if rid not in self.requests:
            raise TraceError(path, f"the file has no request {rid}")
        return rid

    def _check_abort(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        self._rid(value["rid"], f"{path}.rid")
        return value

    _check_disconnect = _check_abort

    def _check_message(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        return {**value, "match": self._match(value["match"], f"{path}.match")}

    def _check_transfer(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        match = self._match(value["match"], f"{path}.match")
        for side, letter in (("from", "p"), ("to", "d")):
            if match.get(side, letter)[0] != letter:
                raise TraceError(
                    f"{path}.match.{side}", f"KV goes from a P to a D: {match[side]} stands on the wrong side"
                )
        return {**value, "match": match}

    def _match(self, match: Mapping[str, Any], path: str) -> dict[str, Any]:
        out = dict(match)
        if "room" in match:
            out["room"] = self._room(match["room"], f"{path}.room")
        for side in ("from", "to"):
            if side in match:
                self._node(match[side], f"{path}.{side}")
        if "from" in match and "to" in match and match["from"][0] == match["to"][0]:
            raise TraceError(f"{path}.to", f"{match['from']} and {match['to']} never speak to each other")
        kind, sender = match.get("type"), match.get("from", "")
        if kind is not None and sender and (kind in _TO_SENDER) != (sender[0] == "d"):
            raise TraceError(f"{path}.type", f"{sender} never sends {kind}: this can never happen")
        return out

    def _check_inject(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        self._node(value["to"], f"{path}.to", also=("b0",))
        if "from" in value:
            self._node(value["from"], f"{path}.from")
        if "message" not in value:
            return value
        if "from" not in value:
            raise TraceError(f"{path}.from", "is missing: a message comes from somebody")
        if value["to"] == "b0" or value["from"][0] == value["to"][0]:
            raise TraceError(f"{path}.to", "messages go between a P and a D; for the registry give bytes")
        message = dict(value["message"])
        kind = next(k for k, name in wire.EVENT_OF.items() if name == message["type"])
        for key in message:
            if key not in (*kind.__struct_fields__, "type", "uuid"):
                raise TraceError(f"{path}.message.{key}", f"{message['type']} has no such field")
        if "room" in message:
            message["room"] = exact_room(message["room"], f"{path}.message.room")
        for key in ("attempt", "uuid", "ack_epoch"):
            if isinstance(message.get(key), str) and re.fullmatch("[0-9]{1,20}", message[key]):
                message[key] = int(message[key])
            if key in message and (type(message[key]) is not int or not 0 <= message[key] < 1 << 64):
                raise TraceError(f"{path}.message.{key}", "an integer in [0, 2^64), or its digits, expected")
        return {**value, "message": message}

    def _check_error(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        self._node(value["node"], f"{path}.node")
        if WORK_OF[value["in"]] != value["node"][0]:
            raise TraceError(f"{path}.in", f"{value['node']} never does {value['in']}: this can never happen")
        return (
            {**value, "room": self._room(value["room"], f"{path}.room")} if "room" in value else dict(value)
        )

    def _check_crash(self, value: str, path: str) -> str:
        return self._node(value, path, also=("b0",))

    _check_restart = _check_crash

    def _check_drain(self, value: str | Mapping[str, Any], path: str) -> Mapping[str, Any]:
        if isinstance(value, str):
            return {"node": self._node(value, path)}
        self._node(value["node"], f"{path}.node")
        return value

    def _check_stop(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        self._node(value["node"], f"{path}.node", also=("b0",))
        return value

    def _check_partition(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        for i, name in enumerate(value["between"]):
            self._node(name, f"{path}.between[{i}]", also=("b0", "x0"))
        if value["between"][0] == value["between"][1]:
            raise TraceError(f"{path}.between", "two different nodes expected")
        return value

    def _check_pages(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        self._node(value["node"], f"{path}.node")
        return value

    def _check_clock(self, value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        if value["node"] in ("b0", "x0", "c0"):
            raise TraceError(
                f"{path}.node", f"nothing reads the wall clock of {value['node']}: a P or a D expected"
            )
        self._node(value["node"], f"{path}.node")
        return value

    # ---------------------------------------------------------------- expectations and choices

    def _expected(self, rid: str, value: Any) -> Expected:
        path = f"expect.outcomes.{rid}"
        self._rid(rid, path)
        if isinstance(value, str):
            return Expected(value)
        reason = value.get("reason", "")
        if reason and reason not in REASONS and reason not in ROUTER_REASONS:
            raise TraceError(
                f"{path}.reason", f"{reason} is unknown; one of {', '.join([*REASONS, *ROUTER_REASONS])}"
            )
        return Expected(value["outcome"], reason, value.get("within"))

    def _property(self, i: int, name: str) -> str:
        if name not in PROPERTIES:
            raise TraceError(
                f"expect.violations[{i}]", f"there is no property {name}: S1 to S18 and V1 to V12"
            )
        return name

    def _choices(self, choices: Iterable[Any]) -> Iterable[Name]:
        for i, choice in enumerate(choices):
            try:
                name = name_of(choice)
            except ValueError as error:
                raise TraceError(f"choices[{i}]", str(error)) from None
            for process in name[1 : 1 + KINDS[name[0]]]:
                if process != "":  # a pull from an address where nobody is
                    self._node(process, f"choices[{i}].{name[0]}", also=("b0", "x0"))
            yield name

    def _digest(self) -> str:
        digest: str = self.raw.get("digest", "")
        if "digest" in self.raw and not is_digest(digest):
            raise TraceError(
                "digest", f"what --pin writes (hash:lines:checks) expected, {show(digest)} found"
            )
        return digest
