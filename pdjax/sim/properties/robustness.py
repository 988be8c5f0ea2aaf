"""Safety: nobody is stopped or made to remember without bound by what others send (S11, S12 of protocol §10).

Must never be derived from the table: the rules are written a second time.
"""

from __future__ import annotations

from typing import Any

from pdjax.sim.properties.base import Property, Track
from pdjax.sim.properties.upkeep import kept_entries, kept_record

STORM_MS, STORM_MESSAGES = 100.0, 60  # docs/decisions/0002, 0004: two sides that answer each other for ever


class S11(Property):
    name = "S11"
    sentence = "no request, message or peer stops a thread, a scheduler, or another request"
    hears = ("effect_failed", "finished", "step")

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.injected = False  # some work was told to raise

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "step":
            self.injected |= line["action"] == "error"
            return
        if line["event"] == "finished":
            if line.get("reason") == "engine_error" and not self.injected:
                self.breach(f"request {line['rid']}: a server failed by itself", line)
            return
        if "injected" not in str(line.get("detail", "")):
            self.breach(f"{line['node']}: {line.get('effect')} failed: {line.get('detail')}", line)

    def at_end(self) -> None:
        for node in self.ctx.nodes():
            n = node.scheduler.counts["engine_errors"]
            if n and not self.injected:
                self.breach(f"{node.name}: its scheduler met {n} errors that nobody injected")


class S12(Property):
    name = "S12"
    sentence = (
        "what peers can make a process remember is bounded and forgotten in time, and nothing is allocated for an"
        " unknown id"
    )
    bound = (
        "records ≤ legs accepted and not forgotten; early entries, peers ≤ their settings; "
        "60 messages about one room in 100 ms, and one for each hello interval that a process stood still"
    )
    hears = ("leg", "leg_bad", "leg_refused", "sent")
    instants = True

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.sent: dict[tuple[str, int], tuple[float, int]] = {}

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "sent":
            key = (line["node"], int(line["room"]))
            since, n = self.sent.get(key, (line["t"], 0))
            if line["t"] - since > STORM_MS:
                since, n = line["t"], 0
            self.sent[key] = since, n + 1
            if n + 1 > STORM_MESSAGES and n + 1 == 1 + STORM_MESSAGES + self._read_at_once(key[0]):
                self.breach(f"room {key[1]}: {key[0]} sends more than {n} messages in {STORM_MS:g} ms", line)
            return
        if line["from"] == "Absent" and line["to"] != "Absent":
            self.ctx.lives[line["node"], line["epoch"]].legs += 1

    def _read_at_once(self, name: str) -> int:
        """A process that was stopped finds every repetition of a notice when it goes on, and answers each."""
        interval_ms = self.ctx.settings(name).hello_interval_s * 1000
        return int(max(self.ctx.stops.values(), default=0.0) / interval_ms)

    def on_instant(self) -> None:
        for life, node in self.ctx.active:
            manager, name = node.manager, node.name
            settings, side = manager.settings, manager.sender
            if len(manager.rooms) > life.legs:
                self.breach(f"{name}: {len(manager.rooms)} records for {life.legs} legs")
            n_early = sum(map(len, side.early.values())) if side.early else 0
            if side.n_early > settings.max_early or side.n_early != n_early:
                self.breach(f"{name}: {side.n_early} early entries counted, {len(side.early)} rooms of them")
            if len(manager.peers.links) > settings.max_peers:
                self.breach(f"{name}: {len(manager.peers.links)} peers remembered")
            if side.early or side.limbo:
                for text in kept_entries(manager):
                    self.breach(f"{name}: {text}")
        for track, record, node in self.ctx.changed:
            for text in kept_record(record, node.manager._armed) if record is not None else ():
                self.breach(f"{track}: {text}")
