"""The simulated registry client: announces, beats, looks up and remembers as the HTTP client does, over the registry
object itself. Must never import HTTP or read real time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pdjax.engine.bootstrap.registry import Print, Registry, parse_key, parse_print, parse_uint
from pdjax.engine.ports import Entry, LookupDone
from pdjax.sim.loop import GAP_S, Event
from pdjax.sim.net import REGISTRY, SimNet

T = TypeVar("T")

# As the HTTP client has them.
LOOKUP_CACHE_S = 0.25
CALL_TIMEOUT_S = 2.0
FIRST_RETRY_S = 0.1
LONELY_BEAT_S = 0.5

OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}


class SimRegistryClient:
    """A RegistryClient at one node. heartbeat_s None: registers once and never again (for tests of other things)."""

    def __init__(
        self, net: SimNet, fingerprint: Any, *, node: str = "", heartbeat_s: float | None = None
    ) -> None:
        self.net, self.node, self._heartbeat_s = net, node, heartbeat_s
        self._asker: Print | str = fingerprint if isinstance(fingerprint, str) else parse_print(fingerprint)
        self._sink: Callable[[LookupDone], None] = lambda done: None
        self._payload: Mapping[str, Any] = {}
        self._known: LookupDone | None = None
        self._known_at = float("-inf")
        self._asking: list[tuple[int, str]] = []
        self._beat: Event | None = None
        self.registered = False
        self._draining = False
        self.compatible = 0
        self.closed = False

    def start(self, sink: Callable[[LookupDone], None]) -> None:
        self._sink = sink

    # ---------------------------------------------------------------- one call over the wire

    def _call(
        self, op: Callable[[Registry, float], T], done: Callable[[T | None, str], None], what: str
    ) -> None:
        """op at the registry, then done(answer, error) here; done exactly once, unless the process has ended."""
        net, name = self.net, (what, self.node)
        began, answered = net.clock(), False

        def here(answer: T | None, error: str) -> None:
            nonlocal answered
            until = net.frozen(self.node)
            if until:
                net.at(until + GAP_S, lambda: here(answer, error), name)
            elif not answered and not self.closed:
                answered = True
                done(answer, error)

        def give_up() -> None:
            net.at(began + CALL_TIMEOUT_S, lambda: here(None, "the registry does not answer"), name)

        def there() -> None:
            until = net.frozen(REGISTRY)
            if net.is_cut(self.node, REGISTRY):
                give_up()
            elif until:
                give_up()
                net.at(until + GAP_S, there, name)
            elif net.registry is None:
                net.after(net.delay(), lambda: here(None, "the registry does not answer"), name)
            else:
                answer = self._at_registry(net.registry, op)
                if (
                    answer is True and what == "beat"
                ):  # most calls of a long run: its way back changes nothing
                    here(answer, "")
                else:
                    net.after(net.delay(), lambda: here(answer, ""), name)

        net.after(net.delay(), there, name)

    def _at_registry(self, registry: Registry, op: Callable[[Registry, float], T]) -> T:
        now = self.net.clock()
        for key in registry.sweep(now):
            self.net.on_member("evicted", key.instance_id)
        return op(registry, now)

    # ---------------------------------------------------------------- membership

    def announce(self, registration: Mapping[str, Any], *, listed: bool = False) -> None:
        """listed: the registry has the entry already (a world that begins with everybody there)."""
        self._payload = registration
        self._key, self._epoch = parse_key(registration), parse_uint(registration["epoch"], "epoch")
        if listed and self.net.registry is not None:
            self._register(self.net.registry, self.net.clock())
            self.registered = True
            if self._heartbeat_s is not None:
                self._next(self._heartbeat_s)
            return
        self._tell(FIRST_RETRY_S)

    def _register(self, registry: Registry, now: float) -> bool:
        status = registry.register({**self._payload, "draining": self._draining}, now)
        if status in ("new", "replaced"):
            self.net.on_member("listed", str(self._payload["instance_id"]))
        self._count_peers(registry, now)
        return status not in ("stale", "full")

    def _count_peers(self, registry: Registry, now: float) -> None:
        role = OTHER_ROLE[str(self._payload["role"])]
        self.compatible = sum(x.reason is None for x in registry.list(role, now, self._asker))

    def _heartbeat(self, registry: Registry, now: float) -> bool:
        if not registry.heartbeat(self._key, self._epoch, now, draining=self._draining):
            return False
        if not self.compatible:
            self._count_peers(registry, now)
        return True

    def _next(self, delay_s: float) -> None:
        self._beat = self.net.after(delay_s, lambda: self._tell(FIRST_RETRY_S), ("beat", self.node))

    def _tell(self, retry_s: float) -> None:
        if self.closed:
            return
        until = self.net.frozen(self.node)
        if until:
            self._beat = self.net.at(until + GAP_S, lambda: self._tell(retry_s), ("beat", self.node))
            return
        was = self.registered

        def done(accepted: bool | None, error: str) -> None:
            if self._heartbeat_s is None:
                return
            if accepted is not None:
                self.registered = accepted
            if self.registered:  # also when the registry is silent: what it knew may still hold
                self._next(self._heartbeat_s if self.compatible else min(self._heartbeat_s, LONELY_BEAT_S))
            elif was:
                self._tell(FIRST_RETRY_S)  # not known any more: register at once
            else:
                wait_s = min(retry_s, self._heartbeat_s)
                self._beat = self.net.after(wait_s, lambda: self._tell(retry_s * 2), ("beat", self.node))

        self._call(self._heartbeat if was else self._register, done, "beat")

    def drain(self) -> None:
        """The next beat says that this node takes nothing new."""
        self._draining = True

    def leave(self) -> None:
        """Out of the registry, and no beat any more."""
        if self._beat is not None:
            self._beat.cancel()
        self._heartbeat_s = None
        self._call(self._remove, lambda answer, error: None, "leave")

    def _remove(self, registry: Registry, now: float) -> bool:
        removed = registry.remove(self._key, self._epoch)
        if removed:
            self.net.on_member("evicted", self._key.instance_id)
        return removed

    # ---------------------------------------------------------------- look-ups

    def lookup(self, tag: int, host: str, port: int | None) -> None:
        if (
            self._known is not None
            and not self._known.error
            and self.net.clock() - self._known_at < LOOKUP_CACHE_S
        ):
            self.net.after(GAP_S, lambda: self._answer([(tag, host)]), ("lookup", self.node))
            return
        self._asking.append((tag, host))
        if len(self._asking) == 1:
            self._call(self._list, self._listed, "lookup")

    def _list(self, registry: Registry, now: float) -> LookupDone:
        listed = registry.route("prefill", now, fingerprint=self._asker)
        entries = tuple(
            Entry(x.seat.key.instance_id, x.seat.epoch, x.seat.zmq_addr, x.seat.serving_url)
            for x in listed
            if x.reason is None
        )
        return LookupDone(0, entries, {x.seat.key.instance_id: x.reason for x in listed if x.reason}, None)

    def _listed(self, answer: LookupDone | None, error: str) -> None:
        if answer is not None:
            self._known, self._known_at = answer, self.net.clock()
        elif self._known is None or not self._known.entries:
            self._known, self._known_at = LookupDone(0, (), {}, error), self.net.clock()
        asking, self._asking = self._asking, []
        self._answer(asking)

    def _answer(self, asking: list[tuple[int, str]]) -> None:
        known = self._known
        if self.closed or known is None:
            return
        for tag, host in asking:
            mine = tuple(e for e in known.entries if urlsplit(e.serving_url).hostname == host)
            self._sink(LookupDone(tag, mine or known.entries, known.rejected, known.error))

    def close(self) -> None:
        self.closed = True
