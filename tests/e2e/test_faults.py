"""Killed processes and mismatched pairs: errors in seconds, the other side serving, a new life used at once."""

import concurrent.futures
import os
import pathlib
import sys
import time

import httpx
import pytest
from fleets import Deployment

from pdjax.serve.children import Child, end_all

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TIMERS = [
    "--disaggregation-lease",
    "6",
    "--disaggregation-peer-timeout",
    "3",
    "--disaggregation-hello-interval",
    "0.5",
    "--disaggregation-answer-bound",
    "0.7",
    "--disaggregation-bootstrap-timeout",
    "8",
    "--disaggregation-transfer-timeout",
    "10",
    "--disaggregation-limbo-timeout",
    "11",
    "--disaggregation-request-timeout",
    "60",
    "--disaggregation-bootstrap-heartbeat-interval",
    "1",
    "--disaggregation-bootstrap-heartbeat-ttl",
    "3",
]
TINY = ("--context-length", "512", "--num-pages", "256", "--chunked-prefill-size", "64")
ROOM = iter(range(1, 10_000))
SOON_S = 15.0  # "in seconds": the peer silence, a lease and what a loaded machine adds


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with Deployment(
        tmp_path_factory.mktemp("faults"), "tiny", *TINY, *TIMERS, prefill=1, decode=1
    ) as deployment:
        deployment.start()
        yield deployment
        deployment.await_free()
        deployment.check_logs()


def body(fleet, n_out, **changes):
    sampling = {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True}
    where = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": fleet.bootstrap_port,
        "bootstrap_room": next(ROOM),
    }
    return {"input_ids": list(range(3, 40)), "sampling_params": sampling, **where, **changes}


def both(fleet, request):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        p = pool.submit(fleet.post, "prefill-0", "/generate", request)
        d = fleet.post("decode-0", "/generate", request)  # beside P's, which may wait for it
        return p.result(), d


def eventually_serves(fleet, within_s=30.0):
    """A request may still meet the registry's picture of the dead life: a router would try again."""
    deadline = time.monotonic() + within_s
    while True:
        p, d = both(fleet, body(fleet, 3))
        if (p.status_code, d.status_code) == (200, 200):
            return d.json()["output_ids"]
        assert time.monotonic() < deadline, (p.text, d.text)


def test_a_killed_p_ends_what_waits_for_it_and_its_new_life_serves(pair):
    right = eventually_serves(pair)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.post, "decode-0", "/generate", body(pair, 4))
        pair.await_any("decode-0", "bootstrapping")
        began = time.monotonic()
        pair.kill("prefill-0")
        answer = waiting.result()
    assert answer.status_code == 503, answer.text
    assert time.monotonic() - began < SOON_S
    assert pair.http.get(f"{pair.url('decode-0')}/health").status_code == 200
    pair.restart("prefill-0")
    assert eventually_serves(pair) == right
    pair.await_free()


def test_a_p_killed_while_d_decodes_does_not_disturb_it(pair):
    request = body(pair, 400)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(pair.post, "decode-0", "/generate", request)
        assert pair.post("prefill-0", "/generate", request).status_code == 200
        pair.await_any("decode-0", "running", unless=decoding.done)
        pair.kill("prefill-0")
        answer = decoding.result()
    assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 400
    pair.restart("prefill-0")
    eventually_serves(pair)
    pair.await_free()


def test_a_killed_d_frees_p_and_its_new_life_serves(pair, tmp_path):
    eventually_serves(pair)
    long = body(pair, 400)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        decoding = pool.submit(pair.post, "decode-0", "/generate", long)
        assert pair.post("prefill-0", "/generate", long).status_code == 200
        pair.await_any("decode-0", "running", unless=decoding.done)
        unpulled = body(pair, 4)  # D will never ask for this one
        assert pair.post("prefill-0", "/generate", unpulled).status_code == 200
        pair.kill("decode-0")
        with pytest.raises(Exception, match=r"disconnected|reset|closed|Disconnected"):
            decoding.result()
    assert pair.http.get(f"{pair.url('prefill-0')}/health").status_code == 200
    pair.restart("decode-0")
    eventually_serves(pair)
    pair.await_free(within_s=40)  # the unpulled room ends with its lease
    recorded = pair.replay_logs(tmp_path)
    assert "d0" in [step.get("crash") for step in recorded["steps"]]
    assert list(recorded["expect"]["outcomes"].values()).count("ok") >= 2  # before the death and after it


@pytest.mark.parametrize(
    ("option", "value", "named"), [("--page-size", "32", "page_size"), ("--model", "other", "weights")]
)
def test_p_and_d_that_do_not_fit_say_why(pair, tmp_path, option, value, named):
    from pdjax.model.tiny import make_tiny_model

    if value == "other":
        value = str(tmp_path / "other")
        make_tiny_model(tmp_path / "other", seed=7)
    command = list(pair.commands["decode-0"])
    if option in command:
        command[command.index(option) + 1] = value
    else:
        command += [option, value]
    pair.child("decode-0").tell(15)
    assert pair.child("decode-0").join(20)
    pair.children.remove(pair.child("decode-0"))
    pair.restart("decode-0", command)
    began = time.monotonic()
    answer = pair.post("decode-0", "/generate", body(pair, 4))
    assert answer.status_code == 503 and named in answer.text, answer.text
    assert time.monotonic() - began < SOON_S
    assert pair.http.get(f"{pair.url('decode-0')}/readiness").status_code == 503
    pair.await_free()
    pair.child("decode-0").tell(15)
    assert pair.child("decode-0").join(20)
    pair.children.remove(pair.child("decode-0"))
    pair.restart("decode-0")
    eventually_serves(pair)


def test_an_idle_server_sleeps(pair):
    """Under 3 % of one core: driver, poller, scheduler, registry client and HTTP together."""
    pair.await_free()

    def cpu_s(name):
        stat = pathlib.Path(f"/proc/{pair.child(name).process.pid}/stat").read_text()
        fields = stat.rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100  # clock ticks of the kernel are 1/100 s

    before, began = [cpu_s(n) for n in ("prefill-0", "decode-0")], time.monotonic()
    time.sleep(5)  # real time on purpose: the subject is what a process does with it
    took = time.monotonic() - began
    for name, then in zip(("prefill-0", "decode-0"), before, strict=True):
        assert (cpu_s(name) - then) / took < 0.03, name


BREAKS_AT_A_REQUEST = """
import sys
from pdjax.sched.scheduler import Scheduler
from pdjax.serve import cli
def fail(self, req):
    raise RuntimeError("broken on purpose")
Scheduler._take_in = fail
options = "--model tiny --port 0 --context-length 64 --num-pages 16 --max-running-requests 2"
sys.exit(cli.run(["serve", *options.split()]))
"""


def test_a_process_whose_scheduler_has_died_ends_with_its_requests():
    """V1: nobody else would end them; whoever supervises the process starts it again."""
    child = Child("broken", [sys.executable, "-c", BREAKS_AT_A_REQUEST], os.environ, print)
    try:
        deadline = time.monotonic() + 120
        while child.ready is None:
            child.check()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        request = {"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        with httpx.Client(trust_env=False, timeout=60) as http, pytest.raises(httpx.HTTPError):
            http.post(f"{child.ready['url']}/generate", json=request).raise_for_status()
        assert child.join(30), "the process goes on without its scheduler"
        assert child.process.returncode == 1
    finally:
        end_all([child])
