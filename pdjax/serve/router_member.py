"""This server in the worker lists of sglang routers (facts/router §5): put in when it is ready, taken out when it leaves.

A thread of its own looks at each router now and again, so that one that starts later or was restarted gets the server
too. A router that does not answer, or answers anything, costs the server nothing. Must never post a worker that is listed already: the
router would log a failed job for each.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from pdjax.engine.bootstrap.asking import SHOWN_CHARS, Blocking, NoAnswer, http_client, read
from pdjax.serve.engine_api import Role
from pdjax.serve.log import ServerLog

CALL_TIMEOUT_S = 2.0
FIRST_RETRY_S = 0.25
LEAVE_WAIT_S = 2.0
WORKER_TYPES: dict[Role, str] = {"null": "regular", "prefill": "prefill", "decode": "decode"}


class RouterMember:
    """``start`` once the HTTP port serves, ``leave`` once before it stops. counters and errors are for operators.

    ready: whether requests can be served; nothing is posted before it first holds. key: of routers with an API key.
    """

    def __init__(
        self,
        routers: Sequence[str],
        *,
        url: str,
        role: Role,
        bootstrap_port: int | None,
        ready: Callable[[], bool],
        log: ServerLog,
        interval_s: float,
        key: str = "",
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.errors: dict[str, str] = {}  # router → why it does not list us
        self._posted: dict[str, str] = {}  # router → the worker id of a post whose outcome is not known
        self._url, self._ready, self._log, self._interval_s = url, ready, log, interval_s
        self._worker: dict[str, Any] = {"url": url, "worker_type": WORKER_TYPES[role]}
        if role == "prefill":
            self._worker["bootstrap_port"] = bootstrap_port
        self._leaving = threading.Event()
        self._key = key
        self._askers: dict[str, Blocking] = {}  # each of its router's thread
        self._threads = [
            threading.Thread(target=self._run, args=(router,), name="router-member", daemon=True)
            for router in dict.fromkeys(one.rstrip("/") for one in routers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def begin_to_leave(self) -> None:
        """Its threads take it out of every router's list; ``leave`` waits for them."""
        self._leaving.set()

    def leave(self) -> None:
        """Out of every router's list; waits a moment for those that do not answer."""
        self.begin_to_leave()
        for thread in self._threads:
            thread.join(LEAVE_WAIT_S + CALL_TIMEOUT_S)

    def _run(self, router: str) -> None:
        try:
            with Blocking(http_client(self._key)) as self._askers[router]:
                self._keep(router)
        except (
            BaseException
        ) as error:  # no request needs this thread, so none is failed: but nobody is silent
            why = f"its thread has died: {type(error).__name__}: {error}"
            self.errors[router] = why
            self._log.event("router_unreachable", url=router, message=why)
            raise

    def _keep(self, router: str) -> None:
        retry_s = FIRST_RETRY_S
        while not self._ready():
            if self._leaving.wait(FIRST_RETRY_S):
                return
        while not self._leaving.is_set():
            try:
                self._be_listed(router)
                self.errors.pop(router, None)
                retry_s = self._interval_s
            except NoAnswer as error:
                self.counters["router_unreachable"] += 1
                if router not in self.errors:  # one line for each time that it goes away
                    self._log.event("router_unreachable", url=router, message=str(error))
                    retry_s = FIRST_RETRY_S
                self.errors[router] = str(error)
                retry_s = min(2 * retry_s, self._interval_s)
            self._leaving.wait(retry_s)
        self._be_gone(router)

    def _be_listed(self, router: str) -> None:
        """Raises NoAnswer."""
        listed = self._find(router)
        if listed is not None and all(listed.get(name) == value for name, value in self._worker.items()):
            return
        if listed is not None:  # an earlier life on this address was something else
            self._remove(router, listed)
        elif self._is_being_added(router):
            return
        worker_id = self._call(router, "POST", "", json=self._worker).get("worker_id")
        self._posted[router] = worker_id if isinstance(worker_id, str) else ""
        self.counters["router_registered"] += 1
        self._log.event("router_registered", url=router)

    def _is_being_added(self, router: str) -> bool:
        """The router answers a post before it has looked at the worker; a restarted one knows nothing of the post."""
        worker_id = self._posted.pop(router, "")
        if not worker_id:
            return False
        try:
            job = self._call(router, "GET", f"/{quote(worker_id, safe='')}").get("job_status")
        except NoAnswer:
            return False
        if not isinstance(job, dict) or job.get("status") not in ("pending", "processing"):
            return False
        self._posted[router] = worker_id
        return True

    def _be_gone(self, router: str) -> None:
        try:
            listed = self._find(router)
            if listed is not None:
                self._remove(router, listed)
        except NoAnswer:
            self.counters["router_leave_unheard"] += 1  # its health checks find out

    def _remove(self, router: str, listed: dict[str, Any]) -> None:
        worker_id = listed.get("id")
        if not isinstance(worker_id, str):
            raise NoAnswer(f"{router} is no sglang router: it lists a worker without an id")
        self._call(router, "DELETE", f"/{quote(worker_id, safe='')}")
        self.counters["router_removed"] += 1

    def _find(self, router: str) -> dict[str, Any] | None:
        workers = self._call(router, "GET", "").get("workers")
        if not isinstance(workers, list):
            raise NoAnswer(f"{router} is no sglang router: its /workers lists nothing")
        return next((w for w in workers if isinstance(w, dict) and w.get("url") == self._url), None)

    def _call(self, router: str, method: str, below: str, **body: Any) -> dict[str, Any]:
        """below: what follows /workers. An answer that is no object says nothing. Raises NoAnswer."""
        url = f"{router}/workers{below}"
        try:
            status, content = self._askers[router].ask(method, url, limit_s=CALL_TIMEOUT_S, **body)
            if not 200 <= status < 300:
                raise NoAnswer(f"{status} {content[:SHOWN_CHARS].decode(errors='replace')}")
            reply: object = read(content, object)
        except NoAnswer as error:
            raise NoAnswer(f"{method} {url}: {error}") from None
        return reply if isinstance(reply, dict) else {}
