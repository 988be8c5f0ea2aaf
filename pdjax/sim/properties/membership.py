"""Liveness: who lives is listed, who leaves is not, and no fault leaves a penalty (V6, V8, V12 of protocol §10).

A bound that holds only while messages get through is excused by a fault in its window (``ctx.disturbed_ms``); the
bounds that must hold in any case are not. Time that a process spent stopped is added to its deadlines. Must never
excuse what no fault of the run explains.
"""

from __future__ import annotations

from typing import Any

from pdjax.sim.properties.base import SLACK_MS, STEP_MS, Context, Decision, Property, Track


def listed(ctx: Context, name: str, epoch: str) -> bool:
    """A look-up made now would find this life. Reads the table without sweeping it."""
    registry = ctx.world.net.registry
    if registry is None:
        return False
    return any(
        key.instance_id == name
        and str(held.seat.epoch) == epoch
        and ctx.now / 1000 - held.heard <= registry.ttl_s + SLACK_MS / 1000
        for key, held in registry._held.items()
    )


class V6(Property):
    name = "V6"
    sentence = "a living instance is listed, a dead or replaced one leaves"
    bound = "T_m = TTL + heartbeat + R"
    hears = ("born", "crashed")
    sampled = True

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.gone_ms: dict[tuple[str, str], float] = {}  # life → when it ended
        self.read: dict[str, Any] = {}  # node → the newest answer of the registry that was looked at

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        name, epoch = line["node"], line["epoch"]
        if line["event"] == "crashed":
            self.gone_ms[name, epoch] = line["t"]
            return
        for life in self.ctx.births:
            if life[0] == name and life[1] != epoch:
                self.gone_ms.setdefault(life, line["t"])  # replaced

        def check() -> None:
            node = self.ctx.node(name, epoch)
            bound_ms = self._bound_ms(name, epoch)
            if node is None or node.manager.draining:
                return
            calm = self.ctx.now - max(self.ctx.disturbed_ms, line["t"]) >= bound_ms
            there = self.ctx.world.net.registry is not None and not self.ctx.stopped(name)
            if calm and there and not listed(self.ctx, name, epoch):
                self.breach(f"{name} lives and is not listed")
            self.ctx.at(self.ctx.now + bound_ms, check)

        self.ctx.at(line["t"] + self._bound_ms(name, epoch), check)

    def on_sample(self) -> None:
        """No answer that the registry gave later than T_m after an end shows that life.

        Counted from the newest fault of a process or link: a stopped one may hand an old answer on.
        """
        if not self.gone_ms:
            return
        for node in self.ctx.up:
            known = node.registry._known
            if known is None or self.read.get(node.name) is known:
                continue
            self.read[node.name] = known
            latest_ms = node.registry._known_at * 1000 - self._bound_ms(node.name, node.manager.log.epoch)
            for entry in known.entries:
                gone_ms = self.gone_ms.get((entry.instance_id, str(entry.epoch)))
                if gone_ms is not None and max(gone_ms, self.ctx.broken_ms) < latest_ms:
                    self.breach(
                        f"{node.name} is told of a life of {entry.instance_id} that ended at {gone_ms:g} ms"
                    )

    def _bound_ms(self, name: str, epoch: str) -> float:
        s = self.ctx.settings(name)
        bound_ms = float(s.heartbeat_ttl_s + s.heartbeat_interval_s + s.answer_bound_s) * 1000
        return 2 * bound_ms if self.ctx.set_back(name, epoch) else bound_ms

    def at_end(self) -> None:
        if self.ctx.world.net.registry is None:
            return
        for node in self.ctx.nodes():
            calm = self.ctx.now - self.ctx.disturbed_ms >= self._bound_ms(node.name, node.manager.log.epoch)
            if (
                calm
                and not node.manager.draining
                and not listed(self.ctx, node.name, str(node.manager.epoch))
            ):
                self.breach(f"{node.name} lives and is not listed at the end")


class V8(Property):
    name = "V8"
    sentence = "a transient fault leaves no permanent penalty: healed, every pair serves again"
    bound = "the first request after the healing"
    hears = ("finished",)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if str(line.get("rid", "")).startswith("probe-") and line.get("outcome") != "ok":
            self.breach(
                f"{line['rid']}: {line.get('outcome')} ({line.get('reason')}) after everything was healed",
                line,
            )


class V12(Property):
    name = "V12"
    sentence = "after drain nothing is accepted, what runs ends, and the registration is removed"
    bound = "T_drain = request; the registration: τ more, counted from the end of the device step under way"
    hears = ("transition",)
    sampled = True

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.event == "leg" and d.opens

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.since: dict[tuple[str, str], float] = {}
        self.stepping: set[tuple[str, str]] = set()  # inside a device step when they were last looked at
        self.free_ms: dict[tuple[str, str], float] = {}  # when the newest step was first seen to be over

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        node = self.ctx.node(line["node"], line["epoch"])
        if node is not None and node.manager.draining:
            self.breach(f"{track}: accepted while draining", line)

    def on_sample(self) -> None:
        for node in self.ctx.up:
            if not node.manager.draining:
                continue
            key = (node.name, str(node.manager.epoch))
            since = self.since.setdefault(key, self.ctx.now)
            if node._busy or key in self.stepping:
                self.free_ms[key] = self.ctx.now
            (self.stepping.add if node._busy else self.stepping.discard)(key)
            if self.ctx.stopped(node.name):
                self.since[key] = self.ctx.now
            elif self.ctx.now - since > node.manager.settings.request_timeout_s * 1000 + STEP_MS:
                if node.manager.n_live:
                    self.breach(f"{node.name}: {node.manager.n_live} rooms live after the drain")
                elif listed(self.ctx, *key) and self._calm_for_ms(key) > STEP_MS:
                    self.breach(f"{node.name}: still listed after the drain")

    def _calm_for_ms(self, key: tuple[str, str]) -> float:
        """How long nothing has kept the node from leaving: no fault, no device step that it must finish."""
        return self.ctx.now - max(self.ctx.disturbed_ms, self.free_ms.get(key, -1e18))
