"""The header of a GGUF file: its metadata, and where each tensor lies.

The file is untrusted: every count and offset is checked against the bytes that are there before anything is
allocated for it, so a broken or hostile header costs one line, not the memory. Must never import JAX or read a
tensor's content.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdjax.core.errors import ConfigError
from pdjax.model.gguf_fields import wrong_field

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the same layout; 3 may also be big-endian, which reads as another version
ALIGNMENT = 32  # of the tensors' bytes, where the file does not state another one
MAX_HEADER_BYTES = 256 << 20  # thirty times the header of a model with 150,000 tokens
MAX_DIMS = 4
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LEAST_FIELD_BYTES, LEAST_TENSOR_BYTES, LEAST_STRING_BYTES = 13, 24, 8


@dataclass(frozen=True)
class TensorInfo:
    """shape: [out, in], as numpy has it (the file states it reversed). start: of its bytes in the file.

    byte_shape: of its bytes, a row of quantised blocks in the last axis.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    byte_shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.byte_shape)


@dataclass(frozen=True)
class GgufHeader:
    fields: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> GgufHeader:
    """Raises ConfigError, which names the file, for anything that is not a whole GGUF header."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data, path).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
        raise ConfigError(f"{path} cannot be read as GGUF: {error}") from None


class _Walk:
    """One pass over the bytes, from the first to the end of the header."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0
        self._end = min(len(data), MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise self._broken("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise self._broken(f"version {version} is not one of {VERSIONS}, little-endian")
        n_tensors = self._count(LEAST_TENSOR_BYTES, "tensors")
        n_fields = self._count(LEAST_FIELD_BYTES, "metadata fields")
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            name = self._string()
            if name in fields:
                raise self._broken(f"{name!r} is stated twice")
            fields[name] = self._value(self._number("I"), nested=False)
        stated = [self._tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._broken(f"alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(self._placed(start, *tensor) for tensor in stated)
        self._check_apart(tensors)
        wrong = wrong_field(fields)
        if wrong:
            raise self._broken(wrong)
        return GgufHeader(fields, tensors)

    # ------------------------------------------------------------ pieces

    def _take(self, n_bytes: int) -> bytes:
        stop = self._at + n_bytes
        if stop > self._end:
            raise self._broken(f"it ends within its header, or that is longer than {MAX_HEADER_BYTES} bytes")
        piece, self._at = self._data[self._at : stop], stop
        return piece

    def _number(self, form: str) -> Any:
        form = f"<{form}"
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _count(self, least_bytes: int, what: str) -> int:
        n: int = self._number("Q")
        if n * least_bytes > self._end - self._at:
            raise self._broken(f"it states {n} {what}, more than its bytes can hold")
        return n

    def _string(self) -> str:
        return self._take(self._count(1, "bytes of a text")).decode("utf-8", "surrogateescape")

    def _value(self, kind: int, *, nested: bool) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY or nested:
            raise self._broken(f"metadata of type {kind}" + " inside an array" * nested)
        of: int = self._number("I")
        if of in NUMBERS:
            size = struct.calcsize(f"<{NUMBERS[of]}")
            n = self._count(size, "elements of an array")
            return list(struct.unpack(f"<{n}{NUMBERS[of]}", self._take(n * size)))
        n = self._count(LEAST_STRING_BYTES, "elements of an array")
        return [self._value(of, nested=True) for _ in range(n)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self._string(), self._number("I")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._broken(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(n_dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, data_start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorInfo:
        from gguf.constants import (
            GGML_QUANT_SIZES,
            GGMLQuantizationType,
        )  # slow, and only such a file needs it

        try:
            quant = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[quant]
        except (ValueError, KeyError):
            raise self._broken(f"tensor {name!r} is of the unknown type {kind}") from None
        if not math.prod(shape) or shape[-1] % block:
            raise self._broken(f"tensor {name!r} of type {quant.name} has the shape {list(shape)}")
        rows = (*shape[:-1], shape[-1] // block * size)
        tensor = TensorInfo(name, shape, quant, data_start + offset, rows)
        if tensor.start + tensor.n_bytes > len(self._data):
            raise self._broken(f"tensor {name!r} ends behind the end of the file")
        return tensor

    def _check_apart(self, tensors: tuple[TensorInfo, ...]) -> None:
        """No two of one name or with common bytes: a small file of many layers over one tensor would fill the memory."""
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise self._broken("a tensor is listed twice")
        for before, after in itertools.pairwise(sorted(tensors, key=lambda tensor: tensor.start)):
            if before.start + before.n_bytes > after.start:
                raise self._broken(f"tensors {before.name!r} and {after.name!r} overlap")

    def _broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path} cannot be read as GGUF: {what}; fetch the file again")
