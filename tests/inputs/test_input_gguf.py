"""A hostile GGUF file, all the way that a server takes it: a model and its tokenizer, or one line that refuses it."""

import math
import struct
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from fuzzing import SIZES, keeps_nothing, no_growth, one_line, tries
from gguf_written import Tensor, Written
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core.errors import ConfigError
from pdjax.model.checkpoint import HASH_BLOCK_BYTES, load_model
from pdjax.model.gguf_convert import write_tokenizer
from pdjax.model.gguf_header import read_header
from pdjax.model.settings import RunnerSettings
from pdjax.model.sizes import Sizes
from pdjax.model.tiny import make_tiny_model
from pdjax.model.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from gguf_files import write_gguf

F32 = np.dtype(np.float32)
SMALL = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 300}
FEW = RunnerSettings(num_pages=16, page_size=16, max_batch=2, chunk_tokens=16)
# Of a file of 80 kB: a block for its digest, the names of 4,096 layers that it may state, and weights in blocks of
# 2 bits, 20 times as long in float32. What would follow a number of the header instead is far beyond all that.
KEPT_BYTES, MOST_BYTES = 1 << 20, HASH_BLOCK_BYTES + (16 << 20)
KINDS = [int(kind) for kind in gguf.GGMLQuantizationType]


def take(path, scratch):
    """What ``pdjax serve --model`` does with it before it makes a pool."""
    tokenizer = Tokenizer(path)
    loaded = load_model(path, F32)
    Sizes.of(loaded.config, FEW)
    write_tokenizer(read_header(path).fields, path, scratch)
    assert tokenizer.eos_ids <= set(range(tokenizer.vocab_size))
    tokenizer.decode(tokenizer.encode("Grüße, 12 <|im_end|>"))
    return loaded


class Files:
    """Where a test's file is put, and the whole ones: plain and quantised. Not shown: a failure would print them."""

    def __init__(self, root):
        self.path, self.scratch = root / "fuzz.gguf", root / "scratch"
        self.scratch.mkdir()
        directory = make_tiny_model(root / "hf", **SMALL)
        paths = [write_gguf(root / "plain.gguf", directory)]
        paths += [write_gguf(root / "q8.gguf", directory, kind=gguf.GGMLQuantizationType.Q8_0, bos=True)]
        self.whole = [Written.of(path) for path in paths]

    def __repr__(self):
        return "Files"

    def taken_or_refused(self, content):
        """Whether it is loaded; otherwise it is refused in one line."""
        self.path.write_bytes(content)
        try:
            take(self.path, self.scratch)
        except ConfigError as error:
            one_line(error)
            assert "fuzz.gguf" in str(error)
            return False
        return True

    def taken(self, content):
        """The same, either way for the memory that its bytes are worth."""
        with no_growth(KEPT_BYTES, MOST_BYTES):
            return self.taken_or_refused(content)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = Files(tmp_path_factory.mktemp("gguf"))
    for whole in made.whole:  # imports and caches of their own are no growth
        made.path.write_bytes(whole.bytes())
        assert take(made.path, made.scratch).config.vocab_size == 300
    return made


@given(which=st.integers(0, 1), cut=st.floats(0, 1, exclude_max=True), in_header=st.booleans())
@tries(30)
def test_cut_anywhere_it_is_refused(files, which, cut, in_header):
    whole = files.whole[which]
    content = whole.bytes()
    length = (
        len(whole.header()) if in_header else len(content) - 31
    )  # the last tensor's padding is not needed
    assert not files.taken(content[: int(cut * length)])


@given(
    which=st.integers(0, 1),
    at=st.floats(0, 1, exclude_max=True),
    put=st.one_of(
        st.binary(min_size=1, max_size=1), st.tuples(SIZES, st.sampled_from("BHIQ")).map(lambda a: number(*a))
    ),
)
@tries(80)
def test_a_byte_or_a_number_changed_anywhere_in_the_header(files, which, at, put):
    whole = files.whole[which]
    content, header = bytearray(whole.bytes()), len(whole.header())
    at = int(at * header)
    content[at : at + len(put)] = put
    files.taken(content)


def number(value, form):
    return struct.pack(f"<{form}", value & ((1 << 8 * struct.calcsize(form)) - 1))


SCALAR = st.one_of(
    *(st.booleans(), st.floats(), st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-1, 400), SIZES),
    *(st.text(max_size=8), st.binary(max_size=4)),
    st.sampled_from(
        ["llama", "qwen2", "gpt2", "gpt-2", "llama-bpe", "linear", "none", "a b", "{{ x }}", "{%"]
    ),
)
LISTS = st.one_of(
    *(st.lists(st.integers(0, 9), max_size=4), st.lists(st.floats(), max_size=3), st.lists(st.booleans(), max_size=3)),
    st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=3)), max_size=4),
    *(st.sampled_from([["x"] * 300, [1] * 300, [3] * 300, [4] * 300, [float("nan")] * 300]),),
    st.lists(st.text(max_size=3), min_size=300, max_size=300, unique=True),
)  # fmt: skip
FURTHER = [
    *("general.alignment", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"),
    *("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.dimension_count", "llama.expert_count"),
]  # fmt: skip


@given(which=st.integers(0, 1), field=st.integers(0, 99), values=st.lists(SCALAR | LISTS, max_size=2))
@tries(100)
def test_a_field_of_another_type_missing_or_twice(files, which, field, values):
    whole = files.whole[which]
    names = [*(name for name, _ in whole.fields), *FURTHER]
    files.taken(whole.with_field(names[field % len(names)], *values).bytes())


@given(
    which=st.integers(0, 1),
    base=st.sampled_from([b"blk.0.attn_q.weight", b"output.weight", b"rope_freqs.weight", b"blk.9.ffn_up.weight", b"\xff"]),
    changed=st.fixed_dictionaries(
        {},
        optional={
            "name": st.one_of(st.integers(0, 20), st.binary(max_size=8)),
            "dims": st.lists(SIZES | st.integers(1, 4).map(lambda n: 8 << n), max_size=5),
            "kind": st.sampled_from(KINDS) | SIZES.map(lambda n: n & 0xFFFFFFFF),
            "offset": SIZES | st.integers(0, 20).map(lambda i: -i),
        },
    ),
    i=st.integers(0, 20),
    how=st.sampled_from(["instead", "beside", "gone"]),
)  # fmt: skip
@tries(100)
def test_a_tensor_that_lies(files, which, base, changed, i, how):
    """Of another type, shape or place, with a name or a place that is another's, missing, doubled or beyond the file."""
    whole = files.whole[which]
    i %= len(whole.tensors)
    tensor = whole.tensors[i]
    if isinstance(changed.get("name"), int):
        changed["name"] = whole.tensors[changed["name"] % len(whole.tensors)].name
    if changed.get("offset", 0) < 0:
        changed["offset"] = whole.tensors[-changed["offset"] % len(whole.tensors)].offset
    other = replace(tensor if how == "instead" else replace(tensor, name=base), **changed)
    others = {"instead": [other], "beside": [tensor, other], "gone": []}[how]
    files.taken(whole.with_tensor(i, *map(plain_dims, others)).bytes())


def plain_dims(tensor: Tensor):
    return replace(tensor, dims=tuple(tensor.dims))


@given(data=st.binary(max_size=400), n_tensors=SIZES, n_fields=SIZES)
@tries(30)
def test_counts_that_lie(files, data, n_tensors, n_fields):
    assert not files.taken(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_fields) + data)


@given(kind=st.sampled_from(KINDS), seed=st.binary(min_size=1, max_size=64))
@tries(40)
def test_any_bytes_as_blocks_of_any_type(files, kind, seed):
    """Scales that are no numbers, and blocks that no quantisation would write: read, without a warning."""
    whole = files.whole[0]
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    dims = (SMALL["intermediate_size"], SMALL["hidden_size"])
    n_bytes = math.prod(dims) // block * size
    i = next(i for i, tensor in enumerate(whole.tensors) if tensor.name == b"blk.0.ffn_down.weight")
    made = whole.with_tensor(i, Tensor(whole.tensors[i].name, dims, kind, len(whole.data)))
    files.taken(replace(made, data=whole.data + (seed * n_bytes)[:n_bytes]).bytes())


def test_the_same_files_again_keep_nothing(files):
    whole = files.whole[0]
    inputs = [whole.bytes(), whole.bytes()[:9000], whole.with_field("tokenizer.ggml.tokens", 7).bytes()]
    keeps_nothing(files.taken_or_refused, inputs, times=8)
