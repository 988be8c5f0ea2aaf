"""Files that nobody checked before: traces, GGUF and safetensors. Read, or refused in one line; no crash, no hang, no growth."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzzing import no_growth, tries
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core import conform
from pdjax.core.errors import ConfigError
from pdjax.model.checkpoint import load_model
from pdjax.model.gguf_header import read_header
from pdjax.model.tiny import make_tiny_model
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import loads, parse

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from gguf_files import write_gguf

GROWTH_BYTES = 8 << 20
F32 = np.dtype(np.float32)
TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*.json"))
SIZES = st.sampled_from([0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])


def one_line(error):
    assert str(error) and str(error).isprintable()


# ---------------------------------------------------------------- traces and logs

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def texts():
    return [path.read_text() for path in TRACES[::16]]


def read_trace(text):
    try:
        parse(loads(text))
    except TraceError as error:
        one_line(error)


@given(which=st.integers(0, 99), cut=st.integers(0, 4000), put=st.text(max_size=6), value=JSON)
@tries(40)
def test_a_trace_cut_changed_or_invented(texts, which, cut, put, value):
    whole = texts[which % len(texts)]
    at = cut % len(whole)
    for text in (whole[:at], whole[:at] + put + whole[at + 1 :], json.dumps(value)):
        read_trace(text)


@given(which=st.integers(0, 99), where=st.lists(st.integers(0, 99), min_size=1, max_size=5), value=JSON)
@tries(60)
def test_a_trace_with_another_value_somewhere(texts, which, where, value):
    raw = json.loads(texts[which % len(texts)])
    inner = raw
    for i in where:
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        if not keys:
            break
        key = keys[i % len(keys)]
        if i == where[-1] or not isinstance(inner[key], (dict, list)):
            inner[key] = value
            break
        inner = inner[key]
    read_trace(json.dumps(raw))


@given(
    lines=st.lists(st.one_of(st.binary(max_size=60), JSON.map(lambda v: json.dumps(v).encode())), max_size=5)
)
@tries(60)
def test_lines_of_an_event_log(lines):
    """check-log says what is wrong with each."""
    for finding in conform.check(lines, complete=True):
        assert str(finding)


# ---------------------------------------------------------------- model files


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture(scope="module")
def gguf(model, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model).read_bytes()


def refused_or_read(read, path):
    with no_growth(GROWTH_BYTES):
        try:
            read(path)
        except ConfigError as error:
            one_line(error)


@given(
    cut=st.integers(0, 30_000), at=st.integers(0, 20_000), number=SIZES, width=st.sampled_from(["<Q", "<I"])
)
@tries(80)
def test_a_gguf_header_cut_or_with_another_number(gguf, tmp_path_factory, cut, at, number, width):
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    content = bytearray(gguf)
    put = struct.pack(width, number & ((1 << 8 * struct.calcsize(width)) - 1))
    content[at : at + len(put)] = put
    path.write_bytes(content[:cut] if cut % 3 == 0 else content)
    refused_or_read(read_header, path)


@given(data=st.binary(max_size=400), n_tensors=SIZES, n_fields=SIZES)
@tries(60)
def test_a_gguf_header_that_lies(tmp_path_factory, data, n_tensors, n_fields):
    path = tmp_path_factory.getbasetemp() / "lies.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_fields) + data)
    refused_or_read(read_header, path)


class Directory:
    """A model's directory, whose weights and config a test may replace. Not shown: a failure would print the weights."""

    def __init__(self, path):
        self.path, self.weights = path, (path / "model.safetensors").read_bytes()
        self.config = json.loads((path / "config.json").read_text())

    def __repr__(self):
        return "Directory"

    def load(self, weights=None, **config):
        """Read, or refused in one line."""
        (self.path / "model.safetensors").write_bytes(self.weights if weights is None else weights)
        (self.path / "config.json").write_text(json.dumps({**self.config, **config}))
        try:
            load_model(self.path, F32)
        except ConfigError as error:
            one_line(error)


@pytest.fixture(scope="module")
def directory(model):
    return Directory(model)


@given(
    cut=st.integers(0, 40_000),
    at=st.integers(0, 3_000),
    bit=st.integers(0, 7),
    length=SIZES,
    kind=st.integers(0, 2),
)
@tries(40)
def test_safetensors_cut_changed_or_with_another_length(directory, cut, at, bit, length, kind):
    content = bytearray(directory.weights)
    if kind == 0:
        content = content[:cut]
    elif kind == 1:
        content[at] ^= 1 << bit
    else:
        content[:8] = struct.pack("<Q", length)
    directory.load(bytes(content))


@given(
    header=JSON,
    start=SIZES,
    stop=SIZES,
    shape=st.lists(SIZES, max_size=4),
    kind=st.sampled_from(["F32", "I8", "X"]),
)
@tries(40)
def test_safetensors_whose_header_lies(directory, header, start, stop, shape, kind):
    tensor = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
    for told in (header, {"model.norm.weight": tensor}, {"__metadata__": header, "x": tensor}):
        text = json.dumps(told).encode()
        directory.load(struct.pack("<Q", len(text)) + text + b"\0" * 64)


@given(value=JSON, which=st.integers(0, 99))
@tries(60)
def test_a_config_with_another_value_somewhere(directory, value, which):
    directory.load(**{list(directory.config)[which % len(directory.config)]: value})
