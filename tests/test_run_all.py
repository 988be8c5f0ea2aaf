"""`make test` leaves no test out, and a part that fails makes it fail."""

import sys

import pytest
import run_all


def test_every_test_is_in_one_part():
    """What no part names is in the one that names nothing."""
    named = [name for part in run_all.PARTS for name in part]
    assert len(set(named)) == len(named) and all((run_all.TESTS / name).is_dir() for name in named)
    assert run_all.PARTS.count(()) == 1
    assert run_all.arguments(()) == [
        str(run_all.TESTS), *(f"--ignore={run_all.TESTS / name}" for name in named)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "chosen", "expected"), [("pass", "it", 0), ("assert False", "it", 1), ("pass", "nothing", 5)]
)
def test_its_code_is_that_of_its_parts(tmp_path, monkeypatch, capfd, line, chosen, expected):
    """As pytest's own: a part without a chosen test is no failure, all of them are."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "test_one.py").write_text(f"def test_it():\n    {line}\n")
    monkeypatch.setattr(run_all, "TESTS", tmp_path)
    monkeypatch.setattr(run_all, "PARTS", [("one",), ()])
    monkeypatch.setattr(sys, "argv", ["run_all.py", "-p", "no:cacheprovider", "-k", chosen])
    assert run_all.main() == expected
    said = capfd.readouterr().out
    assert ("1 passed" in said, "1 failed" in said) == (expected == 0, expected == 1)
    assert said.endswith("== failed (their output is above): tests/one\n") == (expected == 1)
