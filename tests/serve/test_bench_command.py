"""``pdjax bench`` as a command, against the real HTTP layer with a scripted engine."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from serve_fakes import failed, text_outputs

from pdjax.serve.bench import BenchArgs
from pdjax.serve.cli import run

TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n'


def bench(served, *more):
    return run(["bench", "--url", served.url, "--num-requests", "6", "--vocab-size", "256", *more])


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_bench_measures_a_server_and_writes_its_figures(serve, tmp_path, capsys, api):
    served = serve(script=lambda request: text_outputs("abc", finish="length"))
    files = ("--json-file", str(tmp_path / "f.json"), "--html", str(tmp_path / "f.html"))
    bounds = ("--goodput", "ttft:60000", "itl:60000")
    assert bench(served, "--api", api, "--concurrency", "2", "--input-len", "5", *files, *bounds) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert (figures["succeeded"], figures["requests"], figures["errors"]) == (6, 6, {})
    assert figures["output_tokens"] == 18 and figures["goodput"]["share"] == 1.0
    assert figures["ttft_ms"]["p50"] > 0 and figures["notes"] == []
    assert "<svg" in (tmp_path / "f.html").read_text()
    printed = capsys.readouterr().out
    assert "time to first token" in printed and "6 of 6" in printed
    asked = served.engine.requests
    assert len(asked) == 7, "one to warm up"
    assert api != "generate" or {len(request.prompt_ids) for request in asked} == {5}


def test_bench_sends_a_trace_cut_to_what_the_server_takes(serve, tmp_path):
    served = serve(context_length=128)
    (tmp_path / "trace").write_text(TRACE * 3)
    assert bench(served, "--trace", str(tmp_path / "trace"), "--input-len", "40", "--warmup", "0") == 0
    asked = served.engine.requests
    assert [(len(r.prompt_ids), r.sampling.max_new_tokens) for r in asked] == [(40, 9)] * 3
    assert len({tuple(r.prompt_ids) for r in asked}) == 1, "they share their first block"


def test_bench_counts_errors_by_kind_and_ends_with_1_when_nothing_succeeded(serve, tmp_path, capsys):
    served = serve(script=lambda request: failed(503))
    assert bench(served, "--warmup", "0", "--request-rate", "500", "--json-file", str(tmp_path / "f")) == 1
    assert json.loads((tmp_path / "f").read_text())["errors"] == {"event peer_lost": 6}
    assert "event peer_lost" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "127.0.0.1:1"], "--url"),
        (["--url", "http://127.0.0.1:9"], "nobody answers"),
        (["--url", "http://h", "--request-rate", "3", "--trace", "t"], "leave one out"),
        (["--url", "http://h", "--trace", "/nowhere/t"], "cannot be read"),
        (["--url", "http://h", "--num-requests", "0"], "--num-requests"),
        (["--url", "http://h", "--length-spread", "1"], "--length-spread"),
        (["--url", "http://h", "--timeout", "0"], "--timeout"),
        (["--url", "http://h", "--api", "chat"], "--api chat"),
        (["--url", "http://h", "--goodput", "speed:3"], "--goodput speed:3"),
        (["--url", "http://h", "--html", "/nowhere/x.html"], "does not exist"),
        (["--url", "http://h", "--json-file", "/"], "is a directory"),
        (["--trace", "t"], "--url"),
    ],
)
def test_an_operators_mistake_is_one_line_and_exit_code_2(flags, said, capsys):
    assert run(["bench", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_an_interrupted_bench_prints_what_it_has(serve, tmp_path):
    """The first four requests are answered, the others wait for ever."""
    seen = []

    def script(request):
        seen.append(request)
        return text_outputs("ab", finish="length") if len(seen) <= 4 else [..., *text_outputs("ab")]

    served = serve(script=script)
    command = [sys.executable, "-m", "pdjax.serve.cli", "bench", "--url", served.url, "--vocab-size", "256"]
    command += ["--concurrency", "2", "--warmup", "0", "--json-file", str(tmp_path / "f.json")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    served.engine.wait(lambda: len(served.engine.requests) >= 6)
    deadline = time.monotonic() + 60
    while served.engine.gated() < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "4 of 4" in out and "interrupted" in err and "Traceback" not in err
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["succeeded"] == 4 and any("interrupted" in note for note in figures["notes"])


def test_the_client_needs_no_jax():
    code = "import sys, pdjax.serve.bench; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_lists_every_flag_with_its_default_and_meaning():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = set()
    for spec in dataclasses.fields(BenchArgs):
        default = "required" if spec.default is dataclasses.MISSING else spec.default
        shown = f"{default:g}" if isinstance(default, float) else str(default) or "empty"
        rows.add(f"| `--{spec.metadata['flag']}` | {shown} | {spec.metadata['doc']} |")
    assert set(re.findall(r"^\| `--.*$", page, re.M)) == rows
