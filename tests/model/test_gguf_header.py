"""Broken and hostile GGUF headers: one line, and no memory for what is not there."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf_files import write_gguf

from pdjax.core.errors import ConfigError
from pdjax.model import gguf_header
from pdjax.model.gguf_header import read_header

HUGE = (1 << 63) + 5


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(n_tensors: int = 0, n_fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_fields) + rest


def field(kind: int, value: bytes) -> bytes:
    return header(0, 1, text(b"a") + struct.pack("<I", kind) + value)


def tensor(dims: list[int], kind: int = 0, offset: int = 0, data: bytes = b"") -> bytes:
    stated = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return header(1, 0, text(b"t") + stated) + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as GGUF"),
        (b"GG", "ends within its header"),
        (b"safe" * 10, "does not begin with GGUF"),
        (header(version=1), r"version 1 is not one of \(2, 3\)"),
        (header(version=3 << 24), "version 50331648"),
        (header(n_tensors=HUGE), f"states {HUGE} tensors"),
        (header(n_fields=HUGE), f"states {HUGE} metadata fields"),
        (header(0, 1, struct.pack("<Q", HUGE) + b"x" * 8), f"states {HUGE} bytes of a text"),
        (field(99, b""), "metadata of type 99"),
        (field(9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 0)), "metadata of type 9 inside an array"),
        (field(9, struct.pack("<IQ", 0, HUGE)), f"states {HUGE} elements of an array"),
        (field(9, struct.pack("<IQ", 8, HUGE)), f"states {HUGE} elements of an array"),
        (field(9, struct.pack("<IQ", 4, 3) + b"\0" * 8), "states 3 elements of an array"),
        (tensor([]), "has 0 dimensions"),
        (tensor([1] * 5), "has 5 dimensions"),
        (tensor([4], kind=200), "of the unknown type 200"),
        (tensor([0]), r"has the shape \[0\]"),
        (tensor([33], kind=8), r"of type Q8_0 has the shape \[33\]"),
        (tensor([HUGE, HUGE, HUGE]), "ends behind the end of the file"),
        (tensor([4], offset=HUGE), "ends behind the end of the file"),
        (tensor([4], data=b"\0" * 8), "ends behind the end of the file"),
    ],
)
def test_a_broken_header_is_told_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and "m.gguf" in str(caught.value)


def test_a_tensor_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    one = text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)
    path.write_bytes(header(2, 0, one + one) + b"\0" * 64)
    with pytest.raises(ConfigError, match="a tensor is listed twice"):
        read_header(path)


def test_a_header_has_a_limit(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_dir)
    assert read_header(path).tensors
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"more than its bytes can hold|longer than 1000 bytes"):
        read_header(path)


def test_a_whole_file_cut_or_changed_anywhere_is_read_or_refused(tiny_dir: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", tiny_dir).read_bytes()
    path = tmp_path / "n.gguf"
    rng = random.Random(0)
    refused = 0
    for i in range(300):
        content = bytearray(whole[: rng.randrange(20_000)] if i % 2 else whole[:20_000])
        if not i % 2:  # 20,000 bytes end within the tensors: every one of these must be refused, too
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            read_header(path)
        except ConfigError as error:
            refused += "\n" not in str(error)
    assert refused == 300
