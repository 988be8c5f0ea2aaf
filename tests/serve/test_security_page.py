"""docs/security.md states every limit with its present value, is found from where people look, and what it says of the source holds."""

import ast
import pathlib

import pytest

from pdjax.core import wire
from pdjax.core.settings import PDSettings
from pdjax.engine import descriptors
from pdjax.engine.bootstrap import asking, client, connections, httpd, registry, server
from pdjax.engine.jax_transfer import channel
from pdjax.serve.app import OPEN_PATHS
from pdjax.serve.args import ServeArgs
from pdjax.serve.limits import HttpLimits

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
SETTINGS, HTTP = PDSettings(), HttpLimits()


@pytest.mark.parametrize(
    "stated",
    [
        f"`--max-connections` {connections.MAX_CONNECTIONS}",
        f"`ulimit -n` less {descriptors.SPARE_DESCRIPTORS} |",
        f"| time for a TLS handshake | {connections.HEAD_TIMEOUT_S:g} s |",
        f"| time to say what it wants, after that | {connections.HEAD_TIMEOUT_S:g} s |",
        f"| time to send a body | {httpd.BODY_TIMEOUT_S:g} s |",
        f"`max_body_bytes` {HTTP.max_body_bytes}; {server.MAX_BODY_BYTES} at the registry",
        f"{connections.MAX_CONNECTIONS} × {HTTP.max_body_bytes >> 20} MiB by default,"
        f" {connections.MAX_CONNECTIONS * HTTP.max_body_bytes >> 30} GiB",
        f"is {connections.MAX_CONNECTIONS * server.MAX_BODY_BYTES >> 20} MiB",
        f"`max_batch` {HTTP.max_batch}",
        f"`--max-queue` {ServeArgs.max_queue}",
        f"`--disaggregation-max-rooms` {SETTINGS.max_rooms}",
        f"| instances | {registry.MAX_ENTRIES} |",
        f"| {asking.MAX_ANSWER_BYTES} bytes; {client.CALL_TIMEOUT_S:g} s from the call",
        f"| {client.MAX_REGISTRIES}, and {client.MAX_KNOWN_BYTES} bytes of their answers",
        f"`--disaggregation-max-connections` {SETTINGS.max_channel_connections}",
        f"at most {descriptors.SIDE_CHANNEL_SHARE:.0%} of `ulimit -n` less {descriptors.SPARE_DESCRIPTORS}",
        f"up to {descriptors.WANTED_DESCRIPTORS}",
        f"`--disaggregation-max-frame` {SETTINGS.max_frame_bytes}",
        f"| messages of a frame | {wire.MAX_FRAME_MESSAGES} |",
        f"| time for a ZMQ handshake | {channel.HANDSHAKE_MS // 1000} s |",
        f"`--disaggregation-max-peers` {SETTINGS.max_peers}",
        f"`--disaggregation-max-early` {SETTINGS.max_early}",
        f"`--disaggregation-max-tombstones` {SETTINGS.max_tombstones}",
        *(f"`{path}`" for path in OPEN_PATHS),
    ],
)
def test_the_page_states_it(stated):
    assert stated in PAGE


def test_the_page_is_linked_from_where_people_look():
    assert "(docs/security.md)" in (ROOT / "README.md").read_text()
    assert "(security.md)" in (ROOT / "docs" / "operations.md").read_text()


# ---------------------------------------------------------------- nothing that arrives is run

RUNS_WHAT_IT_READS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch",
}
# Workers of one `sim` command, its own children over pipes that nobody else can open.
POOLS = {"pdjax/sim/workers.py", "pdjax/sim/mutate/campaign.py"}
CONNECTIONS = (["connection"], ["managers"], ["shared_memory"])
EVALUATED = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "socket.recv_pyobj", "socket.send_pyobj"}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def findings(name, text):
    """What of this source could run bytes that it has read."""
    tree = ast.parse(text)
    for module in imported(tree):
        top, *rest = module.split(".")
        opens = top == "multiprocessing" and (name not in POOLS or rest[:1] in CONNECTIONS)
        if top in RUNS_WHAT_IT_READS or opens:
            yield module
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in EVALUATED | UNSAFE_CALLS or called.endswith(("recv_pyobj", "send_pyobj")):
                yield called
            if any(one.arg == "allow_pickle" for one in node.keywords):
                yield "allow_pickle"


def test_nothing_in_the_package_unpickles_or_evaluates():
    found = {}
    for path in sorted((ROOT / "pdjax").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if told := set(findings(name, path.read_text())):
            found[name] = told
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as p",
        "from multiprocessing.connection import Client",
        "import multiprocessing",
        "import numpy\nnumpy.load(f, allow_pickle=True)",
        "eval(text)",
        "import yaml\nyaml.load(text)",
        "s.recv_pyobj()",
    ],
)
def test_a_breach_is_seen(source):
    assert list(findings("pdjax/serve/x.py", source))


def test_a_pool_may_not_open_a_connection():
    assert not list(findings("pdjax/sim/workers.py", "import multiprocessing"))
    assert list(findings("pdjax/sim/workers.py", "from multiprocessing.managers import BaseManager"))
