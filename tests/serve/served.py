"""A fake engine behind the real application and a real HTTP server."""

import io

import httpx
from serve_fakes import FakeEngine

from pdjax.engine.bootstrap.httpd import HttpThread, bind
from pdjax.serve.app import build_app, protected
from pdjax.serve.health import PeerAccess
from pdjax.serve.limits import HttpLimits
from pdjax.serve.log import ServerLog


class Served:
    """``close`` it. key: of its API; limits, health_timeout_s: as build_app takes them; engine: of the FakeEngine."""

    def __init__(self, limits=None, health_timeout_s=20.0, log_text=None, key="", **engine):
        self.engine = FakeEngine(**engine)
        self.log_text = io.StringIO() if log_text is None else log_text
        log = ServerLog(self.log_text)
        limits = limits or HttpLimits()
        self.app = app = build_app(
            self.engine, limits, log, health_timeout_s=health_timeout_s, peers=PeerAccess(key)
        )
        self.desk = app.state.desk
        self._thread = HttpThread(
            protected(app, key), bind("127.0.0.1", 0), "test-http", counters=self.desk.counters
        )
        self._thread.start()
        self.url = self._thread.url
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def post(self, path, body):
        return self.http.post(path, json=body)

    def close(self):
        self.http.close()
        self._thread.stop()
        self.engine.close()
