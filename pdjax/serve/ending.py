"""How a server ends: it takes nothing new, finishes what it has, says its last words, and stops its threads in order.

Asked once (SIGTERM, SIGINT, POST /drain) it drains, within a bound; asked again it ends what runs at once; a third
signal ends the process on the spot. Must never wait without a bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdjax.core.kvpoll import KVPoll
from pdjax.engine.base import BaseKVBootstrapServer
from pdjax.engine.bootstrap.httpd import HttpThread
from pdjax.serve.end_request import EndRequest
from pdjax.serve.log import ServerLog

if TYPE_CHECKING:
    from pdjax.serve.node import Node

log = logging.getLogger(__name__)

POLL_S = 0.02  # of what still runs while it drains
LAST_WORDS_S = 2.0  # after an end by force: for the requests to be answered and the peers to be told


class Failure:
    """Whether something has died that requests wait for (V1): said once in the log, and never taken back.

    Nobody would end those requests: such a process leaves with code 1, whoever else asks it to, and is started again.
    """

    def __init__(self, node: Node, http: HttpThread, registry: BaseKVBootstrapServer | None) -> None:
        """registry: the one inside this process, which others wait for as well."""
        self._node, self._http, self._registry = node, http, registry
        self.serving = True  # False: the HTTP server is being stopped, its end is none of its death
        self._why: str | None = None

    def seen(self) -> bool:
        if self._why is None:
            self._why = self._died()
            if self._why is not None:
                log.error("this process ends: %s", self._why)
        return self._why is not None

    def _died(self) -> str | None:
        if self.serving and not self._http.alive:
            return "the HTTP server has ended"
        if self._registry is not None and self._registry.poll() == KVPoll.Failed:
            return "the registry of --with-bootstrap has ended"
        return self._node.failed()


@dataclass(frozen=True)
class Patience:
    """within_s: how long a drain may take. linger_s: it goes on until so long no client has asked for anything.

    A router hears of a drain after a while, and a refused leg tells the other half, which a closed port does not.
    """

    within_s: float
    linger_s: float


def end(
    node: Node, http: HttpThread, request: EndRequest, failure: Failure, log: ServerLog, patience: Patience
) -> int:
    """From "draining" to the last thread's end. The exit code.

    With a failure nothing can finish any more, so nothing is waited for: also one that comes during the drain.
    """
    began = time.monotonic()
    until = began + patience.within_s
    paused = node.end_pause()  # one that is asked for from here on holds
    node.drain()
    node.leave_routers()
    log.event("draining", instance_id=node.instance_id, reason="failed" if failure.seen() else request.by)
    if paused:
        log.event("pause_ended", instance_id=node.instance_id, reason="draining")

    def busy() -> bool:
        return not failure.seen() and (node.unfinished() > 0 or node.quiet_s() < patience.linger_s)

    _wait(node, request, busy, until)
    left = node.unfinished()
    if left or failure.seen():
        node.end_all()
        last = time.monotonic() + LAST_WORDS_S
        _wait(node, request, lambda: not node.failed() and node.unfinished() > 0, last, hurried=True)
    failure.seen()
    failure.serving = False
    http.stop()  # what is answered goes out; from here no new leg can come
    hurried = bool(left) or request.urgent or failure.seen()
    last = time.monotonic() + LAST_WORDS_S
    _wait(node, request, node.has_last_words, last if hurried else max(until, last), hurried=hurried)
    code = 1 if failure.seen() else 0
    unheard = node.close()
    log.event(
        "ended",
        instance_id=node.instance_id,
        seconds=round(time.monotonic() - began, 3),
        cut_off=left,
        unheard=unheard,
    )
    return code


def _wait(
    node: Node, request: EndRequest, busy: Callable[[], bool], until: float, *, hurried: bool = False
) -> None:
    """While it is busy, until the time is over. hurried: what goes on is the hurry itself.

    The watchdog looks on: what is stuck now is what the end waits for.
    """
    while busy() and time.monotonic() < until and (hurried or not request.urgent):
        request.wait(POLL_S)
        if node.watchdog is not None:
            node.watchdog.look(time.monotonic())
