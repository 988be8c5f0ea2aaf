"""Servers that start together do each compile once: who comes second does something else first, and never waits in a ring."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdjax.model.shared_compiles import LOCKS, run_jobs

# Another server: it says which jobs it is at, and stays at each until it is told to go on.
OTHER = """
import sys
from pathlib import Path
from pdjax.model.shared_compiles import run_jobs

def at(name):
    print(name, flush=True)
    sys.stdin.readline()

run_jobs([(name, lambda name=name: at(name)) for name in sys.argv[2:]], Path(sys.argv[1]))
"""


class Other:
    def __init__(self, directory: Path, *names: str) -> None:
        command = [sys.executable, "-c", OTHER, str(directory), *names]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def at(self) -> str:
        """The job that it has begun."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def other(tmp_path: Path):
    started = []

    def start(*names: str) -> Other:
        started.append(Other(tmp_path, *names))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def noted(
    names: str, done: list[str], **then: Callable[[], object]
) -> list[tuple[str, Callable[[], object]]]:
    def job(name: str) -> None:
        done.append(name)
        then.get(name, lambda: None)()

    return [(name, lambda name=name: job(name)) for name in names]


def test_a_program_that_another_server_compiles_is_left_for_later(tmp_path: Path, other) -> None:
    one = other("a")
    assert one.at() == "a"
    done: list[str] = []
    run_jobs(noted("abc", done, c=one.go_on), tmp_path)
    assert done == ["b", "c", "a"], "a waits until the other has it"
    assert one.process.wait(60) == 0


def test_when_others_are_at_everything_one_of_them_is_waited_for(tmp_path: Path, other) -> None:
    first, second = other("a"), other("b")
    assert (first.at(), second.at()) == ("a", "b")
    done: list[str] = []
    run_jobs(noted("cab", done, c=second.go_on, b=first.go_on), tmp_path)
    assert done == ["c", "b", "a"]


def test_a_server_that_dies_leaves_its_program_to_the_others(tmp_path: Path, other) -> None:
    one = other("a")
    assert one.at() == "a"
    done: list[str] = []
    run_jobs(noted("ba", done, b=one.process.kill), tmp_path)
    assert done == ["b", "a"]


def test_a_program_that_is_compiled_is_free_for_others_at_once(tmp_path: Path, other) -> None:
    seen: list[str] = []
    run_jobs(noted("ab", [], b=lambda: seen.append(other("a").at())), tmp_path)
    assert seen == ["a"], "another server takes it from the directory while this one is at the next"


def test_a_compile_that_fails_gives_its_lock_back(tmp_path: Path, other) -> None:
    def broken() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        run_jobs([("a", broken)], tmp_path)
    one = other("a")
    assert one.at() == "a"


@pytest.mark.parametrize("named", [False, True])
def test_without_a_directory_that_can_be_used_each_compiles_for_itself(
    tmp_path: Path, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    done: list[str] = []
    run_jobs(noted("ab", done), tmp_path / "file" / "under-a-file" if named else None)
    assert done == ["a", "b"]
    assert ("are not shared" in caplog.text) is named


def test_the_locks_are_a_file_of_the_directory(tmp_path: Path) -> None:
    run_jobs(noted("a", []), tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCKS]
