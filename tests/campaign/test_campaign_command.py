"""What ``python -m pdjax.campaign`` says to a wrong call: one line, exit 2, and nothing has started."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from pdjax.campaign.__main__ import app


def test_a_file_that_is_wrong_or_not_there_is_named(tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"format": "pdjax.trace/1", "stepz": [], "steps": []}))
    for path, said in ((tmp_path / "nofile.json", "No such file"), (wrong, "stepz: unknown key")):
        told = CliRunner().invoke(app, ["files", str(path)])
        assert told.exit_code == 2, told.output
        assert told.output.startswith(f"{path}: {said}") and told.output.count("\n") == 1


def test_a_directory_without_files_is_no_campaign(tmp_path):
    told = CliRunner().invoke(app, ["files", str(tmp_path)])
    assert told.exit_code == 2 and "there is no *.json" in told.output
