"""Traces, event logs, safetensors and configs that nobody checked before: read, or refused in one line; no crash or growth."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from fuzzing import SIZES, keeps_nothing, no_growth, one_line, tries
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core import conform
from pdjax.core.errors import ConfigError
from pdjax.model.checkpoint import HASH_BLOCK_BYTES, load_model
from pdjax.model.tiny import make_tiny_model
from pdjax.sim.schema import TraceError
from pdjax.sim.trace_file import loads, parse

F32 = np.dtype(np.float32)
TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*.json"))
# Traces of 3 kB, lines of 60 bytes and weights of 500 kB: each may be held in several forms at once while it is read.
KEPT_BYTES, MOST_TEXT_BYTES, MOST_WEIGHT_BYTES = 1 << 20, 4 << 20, HASH_BLOCK_BYTES + (16 << 20)


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


def read_log(lines):
    for finding in conform.check(lines, complete=True):
        assert str(finding)


@given(which=st.integers(0, 99), cut=st.integers(0, 4000), put=st.text(max_size=6), value=JSON)
@tries(40)
def test_a_trace_cut_changed_or_invented(texts, which, cut, put, value):
    whole = texts[which % len(texts)]
    at = cut % len(whole)
    for text in (whole[:at], whole[:at] + put + whole[at + 1 :], json.dumps(value)):
        with no_growth(KEPT_BYTES, MOST_TEXT_BYTES):
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
    with no_growth(KEPT_BYTES, MOST_TEXT_BYTES):
        read_trace(json.dumps(raw))


@given(
    lines=st.lists(st.one_of(st.binary(max_size=60), JSON.map(lambda v: json.dumps(v).encode())), max_size=5)
)
@tries(60)
def test_lines_of_an_event_log(lines):
    """check-log says what is wrong with each."""
    with no_growth(KEPT_BYTES, MOST_TEXT_BYTES):
        read_log(lines)


def test_the_same_texts_again_keep_nothing(texts):
    keeps_nothing(read_trace, [*texts, *(text[:500] for text in texts), '{"never": [1]}', "["])
    keeps_nothing(read_log, [[b"{}", b"[", b'{"event": "x", "room": 1}'], [b"\xff"], []])


# ---------------------------------------------------------------- model files


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("whole") / "tiny")


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
        with no_growth(KEPT_BYTES, MOST_WEIGHT_BYTES):
            self.read()

    def read(self, _=None):
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


def test_the_same_weights_again_keep_nothing(directory):
    directory.load()
    keeps_nothing(directory.read, [None])
    for broken in ({"weights": directory.weights[:5000]}, {"hidden_size": 99}):
        directory.load(**broken)
        keeps_nothing(directory.read, [None])
