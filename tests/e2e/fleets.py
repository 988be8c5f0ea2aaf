"""Real deployments for the end-to-end tests: a Fleet with extra routers, kills and restarts, and its event logs."""

import contextlib
import json
import os
import pathlib
import signal
import time

import httpx
from typer.testing import CliRunner

from pdjax.campaign.recorded import cut_out
from pdjax.core import conform, log_lines
from pdjax.engine.bootstrap.access import registry_token
from pdjax.serve.children import Child, end_all
from pdjax.serve.local import Fleet, Plan
from pdjax.serve.router import free_ports, router_command, router_environ, router_serves
from pdjax.sim.cli import app as sim_app

WAIT_S = 60.0
SECRET = b"of the test"
REGISTRY_KEY = {"authorization": f"Bearer {registry_token(SECRET)}"}


class Deployment(Fleet):
    """A Fleet whose instances write event logs into ``logs``, and that can be hurt. staged: P instances with host staging."""

    def __init__(self, logs: pathlib.Path, model="tiny", *extra: str, staged=(), **plan):
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "secret").write_bytes(SECRET + b"\n")
        options = ("--disaggregation-trace", str(logs), "--disaggregation-verify", "all")
        options += ("--disaggregation-secret-file", str(logs / "secret"), *extra)
        self.logs, self.staged = logs, staged
        self.output: list[str] = []
        super().__init__(Plan(model, extra=options, **{"router": "none", **plan}), forward=self.output.append)
        self.http = httpx.Client(trust_env=False, timeout=WAIT_S)

    def close(self):
        super().close()
        self.http.close()

    def url(self, name):
        return self.addresses[name]

    def child(self, name) -> Child:
        return next(c for c in reversed(self.children) if c.name == name)

    @property
    def bootstrap_port(self):
        return int(self.addresses["bootstrap"].rsplit(":", 1)[1])

    def add_router(self, name, kind, prefills=None, decodes=None, *options, port=0):
        """One more router over these nodes (default: all); its URL. port: the bootstrap port it is told, 0: the right one."""
        names = list(self.addresses)
        prefills = prefills or [n for n in names if n.startswith("prefill-")]
        decodes = decodes or [n for n in names if n.startswith("decode-")]
        told = self.bootstrap_port if port == 0 else port
        port, metrics = free_ports("127.0.0.1", 2)
        pairs = [(self.addresses[n], told) for n in prefills]
        command = router_command(
            kind, "127.0.0.1", port, metrics, pairs, [self.addresses[n] for n in decodes]
        )
        url = f"http://127.0.0.1:{port}"
        child = Child(
            name, [*command, *options], router_environ("127.0.0.1", dict(os.environ)), self.output.append
        )
        self.children.append(child)
        n = len(prefills) + len(decodes)
        self._await(f"{name} to serve", lambda: router_serves(self._http, kind, url, n), WAIT_S)
        self.addresses[name] = url
        return url

    def kill(self, name):
        child = self.child(name)
        child.tell(signal.SIGKILL)
        assert child.join(10)
        self.children.remove(child)

    def drop(self, name):
        """Ends one child for good."""
        child = self.child(name)
        self.children.remove(child)
        del self.addresses[name]
        assert end_all([child]) == []

    @contextlib.contextmanager
    def paused(self, *names):
        """These nodes compute nothing meanwhile, so that what waits for them stays as it is."""
        for name in names:
            self.post(name, "/pause_generation", {"mode": "in_place"}).raise_for_status()
        try:
            yield
        finally:
            for name in names:
                self.post(name, "/continue_generation", {}).raise_for_status()

    def restart(self, name, command=None):
        """A new life on the same HTTP address; returns when it says that it is ready."""
        old = self.commands[name]
        command = list(command or old)
        command[command.index("--port") + 1] = self.addresses[name].rsplit(":", 1)[1]
        child = self._spawn(name, command)
        self._await(f"{name} to start again", lambda: child.ready is not None, 300)
        return child

    commands: dict

    def _spawn(self, name, command, **environ):
        self.__dict__.setdefault("commands", {}).setdefault(name, list(command))
        if name in self.staged:
            environ["TPU_ENABLE_D2H_TRANSFER"] = "1"
        return super()._spawn(name, command, **environ)

    # ------------------------------------------------------------ requests

    def post(self, where, path, body, **kwargs):
        url = where if where.startswith("http") else self.url(where)
        return self.http.post(f"{url}{path}", json=body, **kwargs)

    def state(self, name):
        return self.http.get(f"{self.url(name)}/server_info").json()["internal_states"][0]

    def await_any(self, name, queue, unless=lambda: False):
        """Until a request stands in that queue of the node, or ``unless`` holds."""
        deadline = time.monotonic() + WAIT_S
        while not self.state(name)[queue] and not unless():
            assert time.monotonic() < deadline, f"nothing in {queue} of {name} after {WAIT_S} s"
            time.sleep(0.005)

    # ------------------------------------------------------------ checks

    def busy(self, name) -> dict:
        """What this node still holds; {} when every page, byte, room and request is free."""
        state = self.state(name)
        held = {k: v for k, v in state.get("held", {}).items() if v}
        if state["used_pages"]:
            held["pages"] = state["used_pages"]
        for gauge in ("registered_bytes", "pulls_live", "graveyard"):
            if state.get("transport", {}).get(gauge):
                held[gauge] = state["transport"][gauge]
        if state["num_running"] or state["num_waiting"] or state["http"]["live"]:
            held["requests"] = state["num_running"], state["num_waiting"], state["http"]["live"]
        return held

    def await_free(self, names=None, within_s=WAIT_S):
        """Every node asked (default: all that live) is as free as at its start; says what is not."""
        names = names or [n for n in self.addresses if n.startswith(("prefill-", "decode-", "plain-"))]
        deadline = time.monotonic() + within_s
        while held := {n: b for n in names if (b := self.busy(n))}:
            assert time.monotonic() < deadline, f"not free after {within_s} s: {held}"
            time.sleep(0.05)

    def log_lines(self):
        lines = []
        for file in sorted(self.logs.glob("*.ndjson")):
            lines += file.read_bytes().splitlines()
        return lines

    def check_logs(self, complete=True):
        """The merged event logs pass the properties that logs can show."""
        lines = self.log_lines()
        assert lines, "no event was logged"
        found = [str(f) for f in conform.check(lines, complete=complete)]
        assert found == [], found[:10]
        return lines

    def logged(self):
        """Event log → how many lines it has now."""
        return {path: len(path.read_bytes().splitlines()) for path in self.logs.glob("*.ndjson")}

    def replay_logs(self, where: pathlib.Path, since=None):
        """The event logs, imported and replayed by the ``sim`` command; the scenario. The replay's own log conforms, too.

        since: of ``logged``, when nothing was live: what came before is left out, such as a pause, which no scenario can say.
        """
        self.check_logs()
        trace, log = where / "run.json", where / "replayed.ndjson"
        paths = sorted(self.logs.glob("*.ndjson"))
        if since is not None:
            for path in paths:
                lines, _ = log_lines.read(path.read_bytes().splitlines())
                (where / path.name).write_bytes(b"\n".join([*cut_out(lines, since.get(path, 0)), b""]))
            paths = [where / path.name for path in paths if (where / path.name).stat().st_size > 1]
        sim("import", *paths, "-o", trace)
        sim("replay", trace, "--log", log)
        sim("check-log", log, "--complete")
        return json.loads(trace.read_text())


def sim(*call):
    """A sim command that must exit 0."""
    done = CliRunner().invoke(sim_app, [str(word) for word in call])
    assert done.exit_code == 0, (call, done.output[-3000:])


def pairs_served(lines):
    """(P, D) of every hand-off that succeeded, from the event logs."""
    found = set()
    for line in lines:
        raw = json.loads(line)
        if raw.get("role") == "sender" and raw["event"] == "done" and raw["to"] == "Success":
            found.add((raw["node"], raw["peer"]))
    return found
