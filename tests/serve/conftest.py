import io

import httpx
import pytest
from serve_fakes import FakeEngine

from pdjax.engine.bootstrap.httpd import HttpThread, bind
from pdjax.serve.app import build_app
from pdjax.serve.limits import HttpLimits
from pdjax.serve.log import ServerLog


class Served:
    """A fake engine behind the real application and a real HTTP server."""

    def __init__(self, limits=None, health_timeout_s=20.0, log_text=None, **engine):
        self.engine = FakeEngine(**engine)
        self.log_text = io.StringIO() if log_text is None else log_text
        log = ServerLog(self.log_text)
        self.app = app = build_app(
            self.engine, limits or HttpLimits(), log, health_timeout_s=health_timeout_s
        )
        self.desk = app.state.desk
        self._thread = HttpThread(app, bind("127.0.0.1", 0), "test-http")
        self._thread.start()
        self.url = self._thread.url
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def post(self, path, body):
        return self.http.post(path, json=body)

    def close(self):
        self.http.close()
        self._thread.stop()
        self.engine.close()


@pytest.fixture
def serve():
    servers = []

    def start(role="null", **more):
        servers.append(Served(role=role, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def shared():
    """One server for each role, for tests whose requests are refused before the engine hears of them."""
    servers = {}

    def get(role="null"):
        if role not in servers:
            servers[role] = Served(role=role)
        return servers[role]

    yield get
    for server in servers.values():
        server.close()
