"""The registry as an instance uses it: announce one seat, look others up, never block the caller.

One background thread runs an event loop: registrations, heartbeats and look-ups to several registries overlap, so a
dead registry delays no other. While a registry is down its last answer is used (facts/router: a cached route is used
when the registry does not answer). Must never call the sink on the caller's thread or under a lock, and never let an
answer, whatever it is, end a heartbeat or leave a look-up open (S11, V6).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pdjax.core.pools import Fingerprint
from pdjax.core.settings import PDSettings
from pdjax.engine.bootstrap.access import base_url, host_of, verifying
from pdjax.engine.bootstrap.asking import MAX_ANSWER_BYTES, NoAnswer, ask, http_client
from pdjax.engine.bootstrap.reach import Reach
from pdjax.engine.bootstrap.registration import as_json, beat_of
from pdjax.engine.bootstrap.registry import parse_print
from pdjax.engine.bootstrap.registry_answers import listing, peers, refusal
from pdjax.engine.ports import Entry, LookupDone

logger = logging.getLogger(__name__)

# One look-up answers a burst of requests; far below the heartbeat interval, so that nothing ages by it.
LOOKUP_CACHE_S = 0.25
CALL_TIMEOUT_S = 2.0
FIRST_RETRY_S = 0.1
LONELY_BEAT_S = 0.5
MAX_REGISTRIES = 256  # the injected host is the client's text: what is remembered about it is bounded (S12)
MAX_KNOWN_BYTES = 4 * MAX_ANSWER_BYTES  # of all their answers together, as they came
CLOSE_WAIT_S = 2.0


@dataclass(frozen=True)
class Membership:
    """What the registry last said about this instance. compatible is None until it has answered once.

    reachable: D: the side channel of one of them accepts connections; None: not looked at yet, or P.
    """

    registered: bool = False
    compatible: int | None = None
    reachable: bool | None = None
    rejected: Mapping[str, str] | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Answer:
    entries: tuple[Entry, ...]
    rejected: Mapping[str, str]
    error: str | None
    at: float
    silent: bool = False  # the latest look-up ended by CALL_TIMEOUT_S: not even a refusal came
    n_bytes: int = 0  # as long as the answer was


class HttpRegistryClient:
    """``RegistryClient`` of engine/ports.py over HTTP.

    host, port: the configured registry. host None means that none is configured: ``announce`` then has nobody to
    tell and raises ValueError, and ``lookup`` asks the host that the router injected. A configured registry is
    central: it is asked whatever host and port the router injected, and the injected host only prefers the instances
    whose serving URL has it (protocol §3, Finding P).
    fingerprint: the asker's; the registry then says which instances are compatible and why others are not.
    token: the registry's bearer key, "" for none. Only a configured registry gets it: the injected host is the
    client's text. ca_file: of the certificates that a registry's own is verified with; with one it is asked over https.
    """

    def __init__(
        self,
        host: str | None,
        port: int,
        *,
        fingerprint: Fingerprint | None = None,
        heartbeat_interval_s: float | None = None,
        token: str = "",
        ca_file: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.port = port
        self._token = token if host is not None else ""
        self._scheme = "https" if ca_file else "http"
        self._verify = verifying(ca_file)
        self.counters: Counter[str] = Counter()
        self.membership = Membership()
        self._asker = parse_print(fingerprint) if fingerprint is not None else None
        self._interval_s = (
            PDSettings().heartbeat_interval_s if heartbeat_interval_s is None else heartbeat_interval_s
        )
        self._clock = clock
        self._sink: Callable[[LookupDone], None] | None = None
        self._known: OrderedDict[tuple[str, int], _Answer] = OrderedDict()
        self._asking: dict[tuple[str, int], list[tuple[int, str]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._draining = False
        self._reach = Reach(self._side_channels)
        self._looking: asyncio.Task[None] | None = None
        self._closing = False
        self._dead: str | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pdjax-registry", daemon=True)

    # ------------------------------------------------------------ for any thread

    def start(self, sink: Callable[[LookupDone], None]) -> None:
        self._sink = sink
        self._thread.start()

    def announce(self, registration: Mapping[str, Any]) -> None:
        """Register and keep alive until ``close``. Returns at once; ``membership`` says how it went."""
        if self.host is None:
            raise ValueError("announce needs a configured registry: give a bootstrap host")
        payload = as_json(registration)

        def begin() -> None:
            self._keeper = self._spawn(self._keep_alive(payload))

        self._post(begin)

    def drain(self) -> None:
        """Say with the next beat, which comes at once, that this instance takes nothing new."""

        def say() -> None:
            self._draining = True
            self._beat_now.set()

        self._post(say)

    def leave(self) -> None:
        """Take the entry out and beat no more; the keeper's own end does it."""

        def end() -> None:
            if self._keeper is not None:
                self._keeper.cancel()

        self._post(end)

    def lookup(self, tag: int, host: str, port: int | None) -> None:
        """The answer goes to the sink: fresh, or the last known one while the registry does not answer."""
        where = (
            (self.host, self.port) if self.host is not None else (host, self.port if port is None else port)
        )
        self._post(lambda: self._look_up(tag, host, where))

    def peers(self, role: str) -> Future[LookupDone]:
        """Instances of a role that fit this one and take requests: of the configured registry, else of the last one used."""
        return asyncio.run_coroutine_threadsafe(self._peers(role), self._loop)

    def close(self) -> None:
        """Leave the registry and stop the thread; waits at most CLOSE_WAIT_S. Open look-ups get no answer."""
        if not self._thread.is_alive():
            if not self._loop.is_closed():
                self._loop.close()
            return
        self._post(self._stop)
        self._thread.join(CLOSE_WAIT_S + 1)

    def failed(self) -> str | None:
        """Why nobody keeps this instance listed or answers look-ups any more; None while somebody does."""
        return self._dead

    def _post(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed
            self.counters["after_close"] += 1

    # ------------------------------------------------------------ on the background thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._http = http_client(self._token, self._verify)
        self._stopped = asyncio.Event()
        self._beat_now = asyncio.Event()
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._dead = f"the registry client's thread has died: {type(error).__name__}: {error}"
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._stopped.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.wait([asyncio.ensure_future(self._gather_tasks())], timeout=CLOSE_WAIT_S)
        await self._http.aclose()

    async def _gather_tasks(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop(self) -> None:
        self._closing = True
        self._stopped.set()

    def _spawn(self, work: Any) -> asyncio.Task[None] | None:
        if self._closing:
            work.close()
            return None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by an error of ours says so; without the keeper this instance is not listed any more."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.counters["died"] += 1
        logger.error("a task of the registry client has died", exc_info=error)
        if task is self._keeper:
            self._dead = f"the registry client's heartbeats have died: {type(error).__name__}: {error}"

    async def _pause(self, wait_s: float) -> None:
        """Until the next beat is due; ``drain`` ends it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._beat_now.wait(), wait_s)
        self._beat_now.clear()

    async def _keep_alive(self, payload: dict[str, Any]) -> None:
        """PUT until it is accepted, then heartbeat; 404 (expired, restarted, replaced) registers again (V6)."""
        assert self.host is not None
        base = base_url(self.host, self.port, self._scheme)
        beat = beat_of(payload)
        registered, retry_s = False, FIRST_RETRY_S
        try:
            while True:
                body = {**(beat if registered else payload), "draining": self._draining}
                registered = await self._tell(base, body, registered)
                if registered:
                    retry_s = FIRST_RETRY_S
                    # Without a peer an instance is not ready: it looks for one more often.
                    lonely = not self.membership.compatible
                    await self._pause(min(self._interval_s, LONELY_BEAT_S) if lonely else self._interval_s)
                elif self.membership.registered:
                    self.membership = replace(self.membership, registered=False)  # a 404: register at once
                else:
                    await self._pause(min(retry_s, self._interval_s))
                    retry_s *= 2
        finally:
            # Also when the first PUT was never answered: it may have arrived.
            await self._leave(base, beat)

    async def _tell(self, base: str, body: Mapping[str, Any], registered: bool) -> bool:
        """One PUT or heartbeat. True: the registry lists this life, as far as this side can know."""
        method, path = ("POST", "/heartbeat") if registered else ("PUT", "/route")
        try:
            status, answer = await ask(self._http, method, base + path, limit_s=CALL_TIMEOUT_S, json=body)
            if status == 200:
                heard = peers(answer)
                now = Membership(True, heard.compatible, rejected=heard.rejected)
            else:
                message = refusal(answer)
        except NoAnswer as error:
            # Down, stalled or no registry at all: what it knew may still hold. The next beat finds out.
            self.counters["registry_silent"] += 1
            self._failed(f"registry {base} does not answer: {error}")
            return registered
        if status == 200:
            self.counters["heartbeat" if registered else "registered"] += 1
            self._heard(now, str(body.get("role")))
            return True
        self.counters[f"refused_{status}"] += 1
        if status == 401:
            message = "it has another secret; give both the same --disaggregation-secret-file"
        self._failed(f"registry {base}: {message or status}")
        return False

    def _failed(self, error: str) -> None:
        """One line when something else is wrong than before, not one for each try."""
        if error != self.membership.error:
            logger.warning("%s", error)
            self.membership = replace(self.membership, error=error)

    def _heard(self, now: Membership, role: str) -> None:
        before = self.membership
        self.membership = replace(now, reachable=before.reachable if now.compatible else None)
        if now.compatible != before.compatible:
            self._reach.forget()
        if role == "decode" and now.compatible and (self._looking is None or self._looking.done()):
            self._looking = self._spawn(self._look_around())

    async def _look_around(self) -> None:
        reachable = await self._reach.look()
        if self.membership.compatible:
            self.membership = replace(self.membership, reachable=reachable)

    async def _side_channels(self) -> list[str]:
        return [entry.zmq_addr for entry in (await self._fetch((str(self.host), self.port))).entries]

    async def _leave(self, base: str, beat: Mapping[str, Any]) -> None:
        try:
            await ask(self._http, "DELETE", f"{base}/route", limit_s=CLOSE_WAIT_S / 2, json=dict(beat))
        except NoAnswer:
            self.counters["leave_unheard"] += 1  # its TTL ends the entry

    def _look_up(self, tag: int, wanted_host: str, where: tuple[str, int]) -> None:
        known = self._known.get(where)
        if known is not None and known.error is None and self._clock() - known.at < LOOKUP_CACHE_S:
            self.counters["lookup_cached"] += 1
            self._answer(tag, wanted_host, known)
        elif known is not None and known.silent and known.entries:
            # One look-up at a time finds out whether it is back; the requests must not wait for its timeout.
            self.counters["lookup_last_known"] += 1
            self._answer(tag, wanted_host, known)
            if where not in self._asking:
                self._asking[where] = []
                self._spawn(self._ask(where))
        elif where in self._asking:
            self.counters["lookup_joined"] += 1
            self._asking[where].append((tag, wanted_host))
        else:
            self._asking[where] = [(tag, wanted_host)]
            self._spawn(self._ask(where))

    async def _ask(self, where: tuple[str, int]) -> None:
        """One request for all who wait; each gets an answer, also when this breaks (S11)."""
        found = _Answer((), {}, f"the look-up at registry {where[0]}:{where[1]} broke off", self._clock())
        try:
            found = self._remember(where, await self._fetch(where))
        finally:
            waiting = self._asking.pop(where)
            for tag, wanted_host in waiting if not self._closing else ():
                self._answer(tag, wanted_host, found)

    def _remember(self, where: tuple[str, int], fresh: _Answer) -> _Answer:
        """What the look-up is answered with: the last known instances while the registry does not answer."""
        known = self._known.get(where)
        if fresh.error is not None and known is not None and known.entries:
            self.counters["lookup_last_known"] += len(self._asking[where])
            fresh = self._known[where] = replace(known, silent=fresh.silent)
            return fresh
        self._known[where] = fresh
        self._known.move_to_end(where)
        n_bytes = sum(one.n_bytes for one in self._known.values())
        while len(self._known) > MAX_REGISTRIES or n_bytes > MAX_KNOWN_BYTES:
            n_bytes -= self._known.popitem(last=False)[1].n_bytes
        return fresh

    async def _peers(self, role: str) -> LookupDone:
        if self.host is None and not self._known:
            return LookupDone(0, (), {}, "no registry is configured, and no request has named one yet")
        where = (self.host, self.port) if self.host is not None else next(reversed(self._known))
        found = await self._fetch(where, "/list", role)
        return LookupDone(0, found.entries, found.rejected, found.error)

    async def _fetch(self, where: tuple[str, int], path: str = "/route", role: str = "prefill") -> _Answer:
        query = {"role": role}
        if self._asker is not None:
            asker = {"hash": self._asker.hash, "fields": dict(self._asker.fields)}
            query["fingerprint"] = msgspec.json.encode(asker).decode()
        self.counters["lookup_sent"] += 1
        url = f"{base_url(*where, self._scheme)}{path}"
        try:
            status, answer = await ask(self._http, "GET", url, limit_s=CALL_TIMEOUT_S, params=query)
            if status != 200:
                raise NoAnswer(f"{status} {refusal(answer)}".rstrip())
            entries, rejected = listing(answer)
        except NoAnswer as error:
            self.counters["lookup_failed"] += 1
            text = f"registry {where[0]}:{where[1]} does not answer: {error}"
            return _Answer((), {}, text, self._clock(), error.silent)
        return _Answer(entries, rejected, None, self._clock(), n_bytes=len(answer))

    def _answer(self, tag: int, wanted_host: str, answer: _Answer) -> None:
        entries = answer.entries
        if self.host is not None:
            # localhost against 127.0.0.1 must not lose the request: without a match every instance is a candidate.
            entries = tuple(e for e in entries if host_of(e.serving_url) == wanted_host) or entries
        if self._sink is None:
            return
        try:
            self._sink(LookupDone(tag, entries, answer.rejected, answer.error))
        except Exception:  # one bad sink call must not cost the other look-ups their answer (S11)
            self.counters["sink_errors"] += 1
            logger.exception("the sink of look-up %d failed", tag)
