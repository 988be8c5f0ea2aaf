"""``pdjax bench`` through both routers and straight to a server, in both dialects."""

import json

import pytest

from pdjax.serve.cli import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.mark.parametrize("api", ["generate", "completions"])
@pytest.mark.parametrize("where", ["rust", "mini", "plain-0"])
def test_bench_through(fleet, tmp_path, capsys, where, api):
    figures_file = tmp_path / "f.json"
    flags = ["--url", fleet.url(where), "--api", api, "--num-requests", "6", "--concurrency", "3"]
    flags += ["--input-len", "20", "--output-len", "5", "--json-file", str(figures_file)]
    assert run(["bench", *flags]) == 0
    figures = json.loads(figures_file.read_text())
    assert (figures["succeeded"], figures["errors"]) == (6, {})
    assert figures["output_tokens"] == 6 * 5
    assert api == "completions" or figures["input_tokens"] == 6 * 20
    assert any("--fresh-connections" in note for note in figures["notes"]) == (where == "rust")
