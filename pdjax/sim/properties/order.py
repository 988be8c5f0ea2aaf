"""Safety: lives, attempts, states and deadlines move forward only (S5, S6, S15, S18 of protocol §10).

Must never be derived from the table: the rules are written a second time.
"""

from __future__ import annotations

from typing import Any

from pdjax.sim.properties.base import ENDED, WIRE, Decision, Property, Track

ORDER = {"Bootstrapping": 0, "WaitingForInput": 1, "Transferring": 2}
_STATE = {0: "Failed", 1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring", 4: "Success", 5: "Absent"}


class S5(Property):
    name = "S5"
    sentence = "a message of another epoch or attempt changes nothing, and a retired room is remembered"
    bound = "tombstone ≥ notice life + message life"
    hears = ("transition",)

    @staticmethod
    def wants(d: Decision) -> bool:
        return (
            d.event in WIRE
            or (d.event == "tombstone_timer" and d.target == "Absent")
            or "mint_attempt" in d.effects
            or (d.event.startswith("leg") and d.source == "Absent")
        )

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.minted: set[str] = set()

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        event = line["event"]
        if track is None:
            return
        if event in WIRE:
            self._wire(line, track)
        elif event.startswith("leg") and line["to"] == "Absent":
            self.breach(f"{track}: its leg leaves no record, a duplicate would be taken", line)
        elif event.startswith("leg") and track.role == "receiver" and line["attempt"] == "0":
            self.breach(f"{track}: has no attempt of its own", line)
        elif event == "tombstone_timer" and line["to"] == "Absent":
            settings = self.ctx.settings(track.node)
            least_ms = (settings.notice_life_s + settings.message_life_s) * 1000
            if line["t"] - track.ended_ms < least_ms - 1:
                self.breach(
                    f"{track}: forgotten {line['t'] - track.ended_ms:g} ms after its end, messages live {least_ms:g}",
                    line,
                )
        elif event == "leg" and "mint_attempt" in line["effects"]:
            if line["attempt"] in self.minted:
                self.breach(f"{track}: attempt {line['attempt']} was minted before", line)
            self.minted.add(line["attempt"])

    def _wire(self, line: dict[str, Any], track: Track) -> None:
        life = self.ctx.lives[line["node"], line["epoch"]]
        peer = line.get("peer", "")
        birth = self.ctx.births.get((peer, line.get("peer_epoch", "0")), 0)
        newest = life.newest.get(peer, 0)
        if birth < newest:
            self.breach(f"{track}: {line['event']} of a past life of {peer} was acted on", line)
        life.newest[peer] = max(newest, birth)
        if line["from"] == "Absent" and line["to"] != "Absent":
            self.breach(f"{track}: {line['event']} created a record", line)
        message, _, attempt, room = life.delivered
        if message != line["event"] or room != track.room or line["from"] == line["to"]:
            return
        stranger = attempt != line["attempt"] and line["attempt"] != "0"
        if stranger and (track.role == "receiver" or int(attempt) < int(line["attempt"])):
            self.breach(
                f"{track}: {line['event']} of attempt {attempt} moved attempt {line['attempt']}", line
            )


class S6(Property):
    name = "S6"
    sentence = (
        "states move forward only; Success and Failed absorb; one end for each attempt and side; one copy"
    )
    hears = ("transition", "illegal")
    instants = True

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.source != d.target

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "illegal":
            self.breach(f"{line['node']} room {line.get('room')}: {line.get('detail')}", line)
            return
        if track is None:
            return
        source, target = line["from"], line["to"]
        if source == target:
            return
        if source != track.before:
            self.breach(f"{track}: was {track.before}, {line['event']} starts from {source}", line)
        if source in ENDED and (target != "Absent" or line["event"] != "tombstone_timer"):
            self.breach(f"{track}: {line['event']} moved it from {source} to {target}", line)
        if source in ORDER and target in ORDER and ORDER[target] <= ORDER[source]:
            self.breach(f"{track}: {line['event']} moved it back from {source} to {target}", line)
        if target == "Success" and source != "Transferring":
            self.breach(f"{track}: {line['event']} made it a success from {source}", line)
        if source in ORDER and target == "Absent":
            self.breach(f"{track}: {line['event']} forgot a live room", line)

    def on_instant(self) -> None:
        for track, record, _ in self.ctx.changed:
            state = "Absent" if record is None else _STATE[record.state]
            if state != track.state:
                self.breach(f"{track}: the log says {track.state}, the manager {state}")


class S15(Property):
    name = "S15"
    sentence = "deadlines are durations on the wire, compared with one process's own clock"
    hears = ()
    instants = True

    def on_instant(self) -> None:
        for track, record, node in self.ctx.changed:
            if record is None:
                continue
            s = record.settings
            latest_s = node.manager.ports.clock() + max(s.request_timeout_s, s.tombstone_life_s) + 1e-6
            for kind, at in record.timers.items():
                if not at <= latest_s:
                    self.breach(f"{track}: its {kind} deadline lies beyond every setting")


class S18(Property):
    name = "S18"
    sentence = "a message handled twice changes what it changes once"
    hears = ("transition",)
    ONCE = frozenset(
        [
            "reserve",
            "free_budget",
            "to_limbo",
            "register",
            "note_ready",
            "start_pull",
            "deliver",
            "bind_peer",
        ]
    )

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.event in WIRE

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        life = self.ctx.lives[line["node"], line["epoch"]]
        message, peer, attempt, room = life.delivered
        key = (message, peer, attempt, room, line.get("uuid", ""), line.get("peer_epoch"))
        last, track.last_wire = track.last_wire, (track.n_decisions, key)
        if last == (track.n_decisions - 1, key) and message == line["event"]:
            again = self.ONCE.intersection(line["effects"])
            if line["from"] != line["to"] or again:
                self.breach(
                    f"{track}: {message} once more moved it to {line['to']} {sorted(again)}".rstrip(" []"),
                    line,
                )
