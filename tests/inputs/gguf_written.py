"""A GGUF file as parts that a test may change, and its bytes again: also such as no writer would write."""

import struct
from dataclasses import dataclass, replace

from pdjax.model.gguf_header import read_header

STRING, ARRAY, ALIGNMENT = 8, 9, 32


@dataclass(frozen=True)
class Tensor:
    """As the file states it: dims reversed, offset from the start of the tensors."""

    name: bytes
    dims: tuple
    kind: int
    offset: int


@dataclass(frozen=True)
class Written:
    """fields: (name, value) pairs, so that a name may stand twice; bytes are a text too. data: of all tensors."""

    fields: tuple
    tensors: tuple
    data: bytes

    def __repr__(self):
        return f"Written({len(self.fields)} fields, {len(self.tensors)} tensors)"

    @classmethod
    def of(cls, path):
        header = read_header(path)
        start = min(tensor.start for tensor in header.tensors)
        tensors = tuple(
            Tensor(t.name.encode(), t.shape[::-1], int(t.kind), t.start - start) for t in header.tensors
        )
        return cls(tuple(header.fields.items()), tensors, path.read_bytes()[start:])

    def with_field(self, name, *values):
        """Instead of the one that it has; none takes it out, two make it stand twice."""
        rest = tuple(pair for pair in self.fields if pair[0] != name)
        return replace(self, fields=(*rest, *((name, value) for value in values)))

    def with_tensor(self, i, *others):
        return replace(self, tensors=(*self.tensors[:i], *others, *self.tensors[i + 1 :]))

    def header(self):
        content = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.fields))
        content += b"".join(text(name) + value_of(value) for name, value in self.fields)
        for tensor in self.tensors:
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            content += text(tensor.name) + dims + struct.pack("<IQ", tensor.kind, tensor.offset)
        return content + bytes(-len(content) % ALIGNMENT)

    def bytes(self):
        return self.header() + self.data


def text(value):
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def number_kind(value):
    """(GGUF's type, struct's form) of a number."""
    if isinstance(value, bool):
        return 7, "?"
    if isinstance(value, float):
        return 12, "d"
    return (11, "q") if value < 0 else (10, "Q")


def value_of(value):
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", STRING) + text(value)
    if not isinstance(value, list):
        kind, form = number_kind(value)
        return struct.pack(f"<I{form}", kind, value)
    if value and isinstance(value[0], (str, bytes)):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
    kind, form = number_kind(value[0] if value else 0)
    return struct.pack(f"<IIQ{len(value)}{form}", ARRAY, kind, len(value), *value)
