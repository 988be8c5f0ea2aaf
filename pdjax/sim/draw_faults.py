"""The faults of a random world, as steps of a trace file: one method for each kind of the swarm (``draw``).

A kind draws its trigger, its target and its strength. Must never look at more than the file in the making, and never
draw what docs/checking.md says is not drawn.
"""

from __future__ import annotations

import random
from typing import Any

MESSAGES = ("hello", "unknown", "pending", "ready", "done", "done_ack", "abort", "failed")
P_EVENTS = ("admitted", "prefilled", "registered", "withdrawn")
D_EVENTS = ("peer_known", "pull_started", "landed", "scattered", "first_token")
ANY_EVENTS = ("success", "failed", "released")
TO_P, TO_D = ("hello", "done", "abort"), ("unknown", "pending", "ready", "failed", "done_ack")
# What a message may say that its sender would not say now: old, foreign and made-up names, never a false "quiet".
CONFUSED: dict[str, dict[str, list[Any]]] = {
    "hello": {"attempt": [1, 1 << 62], "ack_epoch": [0, 1], "digest": ["other"], "fingerprint": ["other"]},
    "abort": {"attempt": [1], "uuid": [0, 1], "digest": ["other"]},
    "done": {"attempt": [1], "uuid": [1]},
    "unknown": {"attempt": [1]},
    "pending": {"attempt": [1]},
    "ready": {"attempt": [1], "uuid": [1]},
    "failed": {"attempt": [1], "echo": [True, False]},
    "done_ack": {"attempt": [1], "uuid": [1]},
}
FAULTS = (
    "abort", "disconnect", "drop", "duplicate", "delay", "corrupt", "hang", "fail", "corrupt_part", "truncate", "slow",
    "inject", "error", "crash", "stop", "partition", "pages", "clock", "drain",
)  # fmt: skip
MAX_REQUESTS, MAX_FAULTS = 20, 10

Step = dict[str, Any]


class Faults:
    """What the kinds share: the one Random of the file, who is there, and which rooms are asked for."""

    rng: random.Random
    ps: list[str]
    ds: list[str]
    nodes: list[str]
    span_ms: float  # over which requests and faults are spread
    rooms: list[tuple[str, int]]  # (rid, room) of every request that was drawn
    short: set[str]  # nodes whose pages are taken away
    drained: set[str]
    extra: int  # requests that a restarted node is asked for

    def _when(self) -> float:
        return round(self.rng.uniform(0, self.span_ms), 2)

    def _trigger(self, room: int | None = None) -> Step:
        """A time, or an event of a room: faults that follow the protocol's own steps find more."""
        rng = self.rng
        if rng.random() < 0.4:
            return {"at": self._when()}
        if room is None:
            room = rng.choice(self.rooms)[1]
        event = rng.choice(["sent", "delivered", *P_EVENTS, *D_EVENTS, *ANY_EVENTS])
        on: Step = {"event": event, "room": room if room < 1 << 53 else str(room)}
        if event in ("sent", "delivered"):
            on["message"] = rng.choice(MESSAGES)
        step: Step = {"on": on}
        if rng.random() < 0.2:
            step["nth"] = 2
        if rng.random() < 0.5:
            step["after"] = rng.choice([0.05, 0.3, 5, 200])
        return step

    def _abort(self) -> list[Step]:
        rid, room = self.rng.choice(self.rooms)
        action: Step = {"rid": rid}
        if self.rng.random() < 0.6:
            action["to"] = [self.rng.choice(["prefill", "decode"])]
        return [{**self._trigger(room), "abort": action}]

    def _disconnect(self) -> list[Step]:
        rid, room = self.rng.choice(self.rooms)
        return [{**self._trigger(room), "disconnect": {"rid": rid}}]

    def _room(self) -> int | str:
        """A room of some request, as a file has it."""
        room = self.rng.choice(self.rooms)[1]
        return room if room < 1 << 53 else str(room)

    def _message(self, do: str) -> list[Step]:
        rng = self.rng
        match: Step = {"room": self._room()}  # a rule that is left over must not meet a probe
        if rng.random() < 0.8:
            match["type"] = rng.choice(MESSAGES)
        rule: Step = {
            "match": match,
            "nth": rng.choice([1, 1, 2]),
            "times": rng.choice([1, 1, 2, 8]),
            "do": do,
        }
        if do in ("delay", "duplicate"):
            rule["by"] = rng.choice([0.1, 1, 30, 400, 2500])
        return [{**self._trigger(), "message": rule}]

    def _drop(self) -> list[Step]:
        return self._message("drop")

    def _duplicate(self) -> list[Step]:
        return self._message("duplicate")

    def _delay(self) -> list[Step]:
        return self._message("delay")

    def _corrupt(self) -> list[Step]:
        return self._message("corrupt")

    def _transfer(self, do: str) -> list[Step]:
        rng = self.rng
        match: Step = {"room": self._room()}
        rule: Step = {"match": match, "nth": rng.choice([1, 1, 2]), "times": rng.choice([1, 1, 2]), "do": do}
        if do == "slow":
            rule["by"] = rng.choice([1, 50, 700, 3000])
        return [{"at": 0, "transfer": rule}]

    def _hang(self) -> list[Step]:
        return self._transfer("hang")

    def _fail(self) -> list[Step]:
        return self._transfer("fail")

    def _corrupt_part(self) -> list[Step]:
        return self._transfer("corrupt")

    def _truncate(self) -> list[Step]:
        return self._transfer("truncate")

    def _slow(self) -> list[Step]:
        return self._transfer("slow")

    def _inject(self) -> list[Step]:
        rng = self.rng
        to, sender = rng.choice(
            [(rng.choice(self.ps), rng.choice(self.ds)), (rng.choice(self.ds), rng.choice(self.ps))]
        )
        if rng.random() < 0.2:
            return [
                {**self._trigger(), "inject": {"to": to, "bytes": rng.randbytes(rng.randrange(40)).hex()}}
            ]
        room = rng.choice([*[r for _, r in self.rooms], 77777])
        kind = rng.choice(MESSAGES if rng.random() < 0.1 else TO_P if to in self.ps else TO_D)
        message: Step = {"type": kind, "room": room if room < 1 << 53 else str(room)}
        for field_, values in CONFUSED.get(kind, {}).items():
            if kind in ("done", "failed") or rng.random() < 0.4:
                message[field_] = rng.choice(values)
        if kind == "hello" and {"digest", "ack_epoch", "fingerprint"} & message.keys():
            message["attempt"] = 1  # no D says so in the name of an attempt that lives: docs/checking.md
        if kind == "ready" and "uuid" in message:
            message["attempt"] = 1  # likewise P
        return [
            {
                **self._trigger(room if room != 77777 else None),
                "inject": {"to": to, "from": sender, "message": message},
            }
        ]

    def _error(self) -> list[Step]:
        rng = self.rng
        if rng.random() < 0.5:
            action: Step = {"node": rng.choice(self.ps), "in": rng.choice(["prefill", "gather", "register"])}
        else:
            action = {"node": rng.choice(self.ds), "in": rng.choice(["pull", "scatter", "decode"])}
        return [{"at": self._when(), "error": {**action, "room": self._room()}}]

    def _crash(self) -> list[Step]:
        rng = self.rng
        name = rng.choice([*self.nodes, "b0"])
        crash = {**self._trigger(), "crash": name}
        if rng.random() < 0.2:  # away from the start, until the registry has forgotten it
            crash = {"at": 0, "crash": name}
        back = {k: v for k, v in crash.items() if k != "crash"}
        gap = rng.choice([0, 1, 40, 700, 2500])
        steps = [crash, {**self._later(back, gap), "restart": name}]
        asked = name != "b0" and rng.random() < 0.7  # a new life is heard of when it has something to do
        if asked and len(self.rooms) + self.extra < MAX_REQUESTS:
            self.extra += 1
            request = {
                "rid": f"x{self.extra}", "room": 9000 + self.extra, "prompt": 5, "output": 2,
                "prefill": name if name in self.ps else rng.choice(self.ps),
                "decode": name if name in self.ds else rng.choice(self.ds),
            }  # fmt: skip
            steps.append({**self._later(back, gap + rng.choice([0.5, 3, 100])), "request": request})
        return steps

    @staticmethod
    def _later(trigger: Step, by_ms: float) -> Step:
        key = "at" if "at" in trigger else "after"
        return {**trigger, key: round(trigger.get(key, 0) + by_ms, 2)}

    def _stop(self) -> list[Step]:
        rng = self.rng
        return [
            {
                **self._trigger(),
                "stop": {"node": rng.choice(self.nodes), "for": rng.choice([1, 60, 400, 1200, 2500])},
            }
        ]

    def _partition(self) -> list[Step]:
        rng = self.rng
        pair = [rng.choice(self.ps), rng.choice(self.ds)]
        return [{**self._trigger(), "partition": {"between": pair, "for": rng.choice([5, 100, 900, 2500])}}]

    def _pages(self) -> list[Step]:
        rng = self.rng
        name = rng.choice(self.ds if rng.random() < 0.8 else self.ps)
        self.short.add(name)
        return [{**self._trigger(), "pages": {"node": name, "free": rng.choice([0, 1, 4])}}]

    def _clock(self) -> list[Step]:
        rng = self.rng
        return [
            {
                "at": self._when(),
                "clock": {"node": rng.choice(self.nodes), "jump": rng.choice([-(10**7), 10**7])},
            }
        ]

    def _drain(self) -> list[Step]:
        rng = self.rng
        side = rng.choice([self.ps, self.ds])
        if len(side) < 2 or self.drained:
            return []
        self.drained.add(name := rng.choice(side))
        if rng.random() < 0.5:
            return [{**self._trigger(), "drain": name}]
        return [{**self._trigger(), "drain": {"node": name, "within": rng.choice([0, 2, 30, 300])}}]
