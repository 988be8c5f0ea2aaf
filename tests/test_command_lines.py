"""A wrong call of any command is one line that a terminal can show, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TOO_LONG = "x" * 300
ODD = "a\x1b[31mb\nc"
COMMANDS = {
    "pdjax": ["pdjax.serve.cli"],
    "sim": ["pdjax.sim"],
    "campaign": ["pdjax.campaign"],
    "demo": ["pdjax.serve.demo"],
}
SIM = "from pdjax.sim.cli import main; main()"  # as the console script does


def called(command, *words):
    program = ["-c", SIM] if command == "sim" else ["-m", *COMMANDS[command]]
    return subprocess.run(
        [sys.executable, *program, *words],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sim", ["replay", ODD]),
        ("sim", ["check-log", ODD]),
        ("sim", ["import", ODD, "--out", "/nowhere/x"]),
        ("sim", ["check", ODD]),
        ("sim", ["no-such-command"]),
        ("sim", ["fuzz", "--seeds", "many"]),
        ("campaign", ["aborts", ODD]),
        ("campaign", ["matrix", "--no-such-option"]),
        ("campaign", ["files", TOO_LONG]),
        ("demo", [f"--bogus{ODD}"]),
        ("pdjax", ["bootstrap", "--port", "0", "--host", TOO_LONG]),
        ("pdjax", ["serve", "--model", f"/{TOO_LONG}"]),
    ],
    ids=lambda value: " ".join(value).split(ODD)[0].split(TOO_LONG)[0] if isinstance(value, list) else value,
)
def test_a_wrong_call_is_one_line_and_2(command, words):
    done = called(command, *words)
    assert done.returncode == 2, (done.stdout, done.stderr)
    *before, line = done.stderr.removesuffix("\n").split("\n")
    assert line and line.isprintable() and done.stdout == "", (done.stdout, done.stderr)
    assert all('"event": "loading"' in each for each in before), "what a server logs is no error"


@pytest.mark.parametrize("command", ["sim", "campaign"])
def test_without_words_there_is_help(command):
    done = called(command)
    assert (
        done.returncode == 2
        and "Usage" in done.stdout + done.stderr
        and "replay" in called("sim", "--help").stdout
    )
