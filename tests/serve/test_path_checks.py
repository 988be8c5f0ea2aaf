"""Paths that a server opens late are refused with its flags: nothing is made by looking."""

import os
import socket

import pytest

from pdjax.core.errors import ConfigError
from pdjax.serve.path_checks import check_appendable, check_socket_path


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    (tmp_path / "file").write_text("old")
    (tmp_path / "directory").mkdir()
    return tmp_path


def test_what_can_be_opened_is_taken_and_nothing_is_made(place):
    for path in ("", "file", "new", "directory", "directory/new", "/dev/null"):
        check_appendable("f", path)
    with socket.socket(socket.AF_UNIX) as life_before:
        life_before.bind("socket")
        before = sorted(os.listdir())
        for path in ("", "socket", "new", "directory/new"):
            check_socket_path("f", path)
    assert sorted(os.listdir()) == before and (place / "file").read_text() == "old"


@pytest.mark.parametrize(
    ("check", "path", "says"),
    [
        (check_appendable, "none/new", "none is no directory"),
        (check_appendable, "file/new", "file is no directory"),
        (check_socket_path, "none/new", "none is no directory"),
        (check_socket_path, "file", "is no socket"),
        (check_socket_path, "directory", "is no socket"),
        (check_socket_path, "x" * 108, "longer than 107 bytes"),
    ],
)
def test_what_cannot_be_opened_is_one_line(place, check, path, says):
    with pytest.raises(ConfigError) as told:
        check("flag", path)
    assert says in str(told.value) and str(told.value).startswith("--flag ") and "\n" not in str(told.value)


@pytest.mark.parametrize("check", [check_appendable, check_socket_path])
def test_a_directory_that_may_not_be_written_is_refused(place, monkeypatch, check):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="no file can be made in directory"):
        check("flag", "directory/new")
