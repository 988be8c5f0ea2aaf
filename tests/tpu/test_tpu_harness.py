"""The harness of the hardware suite, on the CPU: its checks run in small, its report says where, and it notices what is wrong."""

import json
import os
import signal
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tpu_hardware
import tpu_run
import tpu_serving
import tpu_suite
from tpu_bench import spec_of
from tpu_hardware import Hardware, of_this_process
from tpu_pages import compare
from tpu_report import Figure, Report
from tpu_suite import CHECKS, HOSTS, SERVING, TRANSFER, CheckFailed, Suite, not_run

from pdjax.engine.kernels.mover import make_mover

V5E = Hardware("tpu", "TPU v5 lite", 1, {"jax": "0"})


# Each check starts processes of its own, which on a busy machine takes its time.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def suite(tmp_path):
    return Suite(of_this_process(), "rehearsal", tmp_path)


@pytest.mark.parametrize("check", [c for c in CHECKS if c is not HOSTS], ids=lambda check: check.name)
def test_a_check_runs_in_small_and_its_report_says_where(suite, tmp_path, check):
    outcome = suite.run(check)
    assert (outcome.status, outcome.detail) == ("passed", "")
    assert suite.report.figures and all(f.check == check.name and f.value > 0 for f in suite.report.figures)
    told, page = suite.report.write(tmp_path / "report")
    found = json.loads(told.read_text())
    assert found["on_tpu"] is False and found["hbm_gb_s"] is None
    assert found["hardware"]["versions"]["jax"] == jax.__version__
    assert "Ran on CPU, not on TPU hardware" in found["headline"] and found["headline"] in page.read_text()
    assert [one["status"] for one in found["outcomes"]] == ["passed"]
    assert all(f["best"] is None and f["fraction"] is None for f in found["figures"])


def test_another_host_is_one_that_the_operator_names(suite, monkeypatch):
    assert "needs PDJAX_TPU_PEER=ip:port" in suite.run(HOSTS).detail
    suite.peer, asked = "10.0.0.2:7000", []
    monkeypatch.setattr(suite, "_work", lambda *call: asked.append((call[0], call[1], call[3:])))
    assert suite.run(HOSTS).status == "passed"
    assert asked == [("transfer-hosts", "transfer", ("--peer", "10.0.0.2:7000"))]


def test_a_check_whose_process_dies_has_failed(suite, monkeypatch):
    monkeypatch.setattr(suite, "environ", lambda chips: {**os.environ, "JAX_PLATFORMS": "nowhere"})
    outcome = suite.run(CHECKS[0])
    assert outcome.status == "failed" and "exit code 1" in outcome.detail and "nowhere" in outcome.detail
    assert suite.run(TRANSFER).status == "failed"
    assert not suite.report.ok and "failed" in suite.report.to_markdown()


STRAY = """
import sys
print("a library speaks\\n7\\n[1]")
if "--offer" in sys.argv:
    sys.stderr.write("more than a pipe holds\\n" * 10_000)
    print('{"listens": "127.0.0.1:1"}', flush=True)
    sys.stdin.read()
print('{"passed": {}}' if "transfer" in sys.argv else '{"pas', end="")
"""


def test_what_a_library_prints_and_half_a_line_are_not_taken_for_the_workers_word(
    suite, monkeypatch, tmp_path
):
    worker = tmp_path / "worker.py"
    worker.write_text(STRAY)
    monkeypatch.setattr(tpu_hardware, "WORKER", worker)
    monkeypatch.setattr(tpu_suite, "START_TIMEOUT_S", 20.0)
    assert suite.run(TRANSFER).status == "passed"
    outcome = suite.run(CHECKS[0])
    assert (outcome.status, outcome.detail) == ("failed", "exit code 0: it said nothing")
    assert suite.report.outcomes[-1] == outcome


class Careless:
    """A mover that loses one page of every gather."""

    def __init__(self):
        self.sound = make_mover("cpu", "float32")

    def gather(self, pools, ids, parts):
        return self.sound.gather(pools, np.array([ids[0], *ids[:-1]]), parts)

    def scatter(self, *args):
        return self.sound.scatter(*args)


def test_a_wrong_page_is_noticed():
    spec = spec_of((8, 16, 128), "float32", 2)
    content = np.random.default_rng(0).standard_normal((2, 8, 16, 128), np.float32)
    compare(make_mover("cpu", "float32"), spec, content, [3, 1, 5])
    with pytest.raises(AssertionError, match=r"gather of 0…: \d+ of \d+ bytes differ"):
        compare(Careless(), spec, content, [3, 1, 5])


def test_a_wrong_token_of_the_whole_is_noticed(suite, monkeypatch):
    @contextmanager
    def fleet(*args, **plan):
        yield SimpleNamespace(addresses={"router": "http://nowhere"})

    monkeypatch.setattr(tpu_serving, "_fleet", fleet)
    monkeypatch.setattr(tpu_serving, "_generate", lambda url, ids: {"output_ids": [*ids, 7]})
    monkeypatch.setattr(tpu_serving, "_await_free", lambda fleet: None)
    with pytest.raises(
        CheckFailed, match=r"staged: a prompt of 2 tokens gives \[3, 4, 7\], one server gives \[3, 4, 8\]"
    ):
        tpu_serving._pair(suite, [[3], [3, 4]], [[3, 7], [3, 4, 8]], staged=True)


def test_wrong_logs_of_the_whole_are_noticed(tmp_path):
    with pytest.raises(CheckFailed, match="3 requests made 0 registrations"):
        tpu_serving._check_logs(tmp_path, 3, staged=True)
    (tmp_path / "p.ndjson").write_text('{"n": 1, "t": 0, "node": "p", "epoch": "1", "event": "started"}\n')
    with pytest.raises(CheckFailed, match="n=1 where n=0 belongs"):
        tpu_serving._check_logs(tmp_path, 0, staged=False)


def test_a_host_with_one_chip_runs_what_one_chip_can(tmp_path):
    suite = Suite(V5E, "full", tmp_path)
    assert [check for check in CHECKS if suite.lacks(check)] == [TRANSFER, HOSTS, SERVING]
    assert "needs 2 chips, this host has 1" in suite.lacks(SERVING)
    shown = suite.environ("1")
    assert shown["TPU_VISIBLE_CHIPS"] == "1" and shown["TPU_PROCESS_BOUNDS"] == "1,1,1"


def test_figures_stand_beside_the_roofline():
    assert V5E.hbm_gb_s == 819 and "Ran on TPU hardware: 1 × TPU v5 lite" in V5E.sentence
    assert Hardware("tpu", "TPU v9", 4, {}).hbm_gb_s is None
    report = Report(V5E, V5E.sentence)
    report.figures = [
        Figure("pages-rate", "gather", 409.5, "GB/s", 819.0),
        Figure("pages-rate", "time", 1, "ms"),
    ]
    assert report.to_json()["figures"][0]["fraction"] == 0.5
    assert "| pages-rate | gather | 409.5 GB/s | 819 GB/s | 0.50 |" in report.to_markdown()
    assert "| pages-rate | time | 1 ms | – | – |" in report.to_markdown()


def test_without_a_tpu_it_says_what_it_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tpu_hardware, "device_nodes", list)
    assert tpu_run.main(tmp_path) == 0
    said = capsys.readouterr().out
    assert "Nothing was run: no TPU on this machine" in said and "Compiled only" in said
    found = json.loads((tmp_path / "tpu-report.json").read_text())
    assert found["on_tpu"] is False and found["hardware"] is None
    assert {one["check"]: one["status"] for one in found["outcomes"]} == {c.name: "not run" for c in CHECKS}
    assert not_run("x").ok


@pytest.mark.parametrize(
    ("peer", "name", "said"),
    [
        ("", "file", "file: no report can be written there: File exists"),
        ("10.0.0.2", "report", "PDJAX_TPU_PEER: address '10.0.0.2' must be ip:port"),
        (
            "host:7000",
            "report",
            "PDJAX_TPU_PEER: address 'host:7000' has no numeric ip",
        ),
    ],
)
def test_what_would_spoil_a_run_at_its_end_is_said_before_it(tmp_path, monkeypatch, capsys, peer, name, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDJAX_TPU_PEER", peer)
    monkeypatch.setattr(tpu_hardware, "tpu_of_this_machine", lambda: pytest.fail("it began all the same"))
    assert tpu_run.main(tmp_path / name) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_suite_that_is_terminated_ends_its_children_as_at_ctrl_c(tmp_path, monkeypatch):
    def terminated(args):
        assert signal.getsignal(signal.SIGTERM) is not before, "it would end at once"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(tpu_hardware, "tpu_of_this_machine", lambda: (V5E, ""))
    monkeypatch.setattr(tpu_run, "fetch_smollm2", lambda progress: None)
    monkeypatch.setattr(tpu_run.pytest, "main", terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            tpu_run.main(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_chips_that_jax_cannot_use_are_no_tpu(monkeypatch):
    monkeypatch.setattr(tpu_hardware, "device_nodes", lambda: ["/dev/accel0"])
    found, why = tpu_hardware.tpu_of_this_machine()
    assert found is None and why.startswith("/dev/accel0 are there, but JAX finds no TPU: ")
    found, why = tpu_hardware.tpu_of_this_machine(timeout_s=0.01)
    assert found is None and "within 0.01 s" in why
