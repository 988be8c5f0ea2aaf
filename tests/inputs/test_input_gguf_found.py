"""What fuzzing found in the loading of GGUF files, one by one: each was another exception, a hang or a memory without end."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from fuzzing import MAX_ERROR_CHARS, no_growth, one_line
from gguf_written import Tensor, Written

from pdjax.core.errors import ConfigError
from pdjax.model.checkpoint import HASH_BLOCK_BYTES, load_model
from pdjax.model.tiny import make_tiny_model
from pdjax.model.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from gguf_files import write_gguf

F32 = np.dtype(np.float32)
TOKENS, MERGES, KINDS = (f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type"))
EOS, BOS = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "bos"))
SMALL = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 300}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("found")


@pytest.fixture(scope="module")
def whole(root):
    directory = make_tiny_model(root / "hf", **SMALL)
    q8 = gguf.GGMLQuantizationType.Q8_0
    return Written.of(write_gguf(root / "whole.gguf", directory, kind=q8, bos=True))


def refused(root, content):
    path = root / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer(path)
        load_model(path, F32)
    one_line(caught.value)
    assert "m.gguf" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("general.architecture", [["llama"]], "general.architecture is no text"),
        (TOKENS, [7], f"{TOKENS} is no list of texts"),
        (TOKENS, ["abc"], f"{TOKENS} is no list of texts"),
        (TOKENS, [[1, 2]], f"{TOKENS} is no list of texts"),
        (TOKENS, [[b"\xff"] * 3], f"{TOKENS} is no list of texts"),
        (MERGES, [[1, 2]], f"{MERGES} is no list of texts"),
        (MERGES, ["a b"], f"{MERGES} is no list of texts"),
        (KINDS, [1], f"{KINDS} is no list of integers"),
        (KINDS, [[1.5] * 300], f"{KINDS} is no list of integers"),
        (EOS, ["2"], f"{EOS} is none of its 300 tokens"),
        (EOS, [[2]], f"{EOS} is none of its 300 tokens"),
        (EOS, [300], f"{EOS} is none of its 300 tokens"),
        (BOS, [-1], f"{BOS} is none of its 300 tokens"),
        (BOS, [True], f"{BOS} is none of its 300 tokens"),
        ("llama.attention.layer_norm_rms_epsilon", ["x"], "layer_norm_rms_epsilon is no number"),
        ("llama.attention.layer_norm_rms_epsilon", [[1.0]], "layer_norm_rms_epsilon is no number"),
        ("llama.rope.freq_base", ["x"], "llama.rope.freq_base is no number"),
        ("tokenizer.ggml.model", [["gpt2"]], "tokenizer.ggml.model is no text"),
        ("tokenizer.ggml.pre", [["smollm"]], "tokenizer.ggml.pre is no text"),
        ("tokenizer.chat_template", [5], "tokenizer.chat_template is no text"),
        ("tokenizer.chat_template", [b"\xff"], "tokenizer.chat_template is no text"),
        ("tokenizer.chat_template", ["{% for a in b %}" * 25 + "{% endfor %}" * 25], "nested blocks"),
        ("tokenizer.chat_template", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"], "maximum recursion"),
        ("tokenizer.chat_template", ["{{ " + "9" * 5000 + " }}"], "Exceeds the limit"),
        ("llama.context_length", [2048, 4096], "'llama.context_length' is stated twice"),
    ],
)
def test_a_field(root, whole, name, values, message):
    assert message in refused(root, whole.with_field(name, *values).bytes())


def test_a_text_that_cannot_begin_with_its_first_token(root, whole):
    """The tokenizer library reads such a text as a template of its own."""
    tokens = list(dict(whole.fields)[TOKENS])
    tokens[1] = "$x:y"
    made = whole.with_field(TOKENS, tokens)
    assert "cannot begin with the token '$x:y'" in refused(root, made.bytes())
    assert "does not name" in refused(root, whole.with_field(BOS).bytes())


def test_an_error_does_not_quote_a_whole_file(root, whole):
    message = refused(root, whole.with_field("general.architecture", "x" * 100_000).bytes())
    assert len(message) < MAX_ERROR_CHARS


def test_many_layers_over_one_tensor(root, whole):
    """Their content is one, so that a file of 100 kB would come to 30 MB and a larger one to all memory."""
    layer = [t for t in whole.tensors if t.name.startswith(b"blk.0.")]
    rest = [t for t in whole.tensors if not t.name.startswith(b"blk.")]
    layers = [replace(t, name=t.name.replace(b"blk.0", b"blk.%d" % n)) for n in range(250) for t in layer]
    made = replace(whole.with_field("llama.block_count", 250), tensors=(*rest, *layers))
    with no_growth(4 << 20, HASH_BLOCK_BYTES):  # the error that is looked at holds the header
        assert "overlap" in refused(root, made.bytes())


def test_two_tensors_in_one_place(root, whole):
    first, second, *rest = whole.tensors
    made = replace(whole, tensors=(first, replace(second, offset=first.offset), *rest))
    assert "overlap" in refused(root, made.bytes())


def of_kind(whole, kind, data):
    """blk.0.ffn_down with these bytes over and over as blocks."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    dims = (SMALL["intermediate_size"], SMALL["hidden_size"])
    n_bytes = math.prod(dims) // block * size
    i = next(i for i, tensor in enumerate(whole.tensors) if tensor.name == b"blk.0.ffn_down.weight")
    made = whole.with_tensor(i, Tensor(whole.tensors[i].name, dims, kind, len(whole.data)))
    return replace(made, data=whole.data + (data * n_bytes)[:n_bytes]).bytes()


def test_a_type_that_cannot_be_read_is_told_with_the_file(root, whole):
    assert "of type I16, which cannot be read" in refused(
        root, of_kind(whole, gguf.GGMLQuantizationType.I16, b"x")
    )


@pytest.mark.parametrize("kind", ["Q4_K", "Q2_K"])
def test_blocks_whose_scale_is_no_number_are_read_without_a_warning(root, whole, kind):
    path = root / "m.gguf"
    path.write_bytes(of_kind(whole, gguf.GGMLQuantizationType[kind], b"\xff\x7c\x01\xfe\x7f"))
    assert load_model(path, F32).params["layers"][0]["down"].shape == (32, 256)


def test_rope_factors_without_end(root, whole):
    factors = np.full(8, np.inf, np.float32).tobytes()
    tensor = Tensor(b"rope_freqs.weight", (8,), 0, len(whole.data))
    made = replace(whole, tensors=(*whole.tensors, tensor), data=whole.data + factors)
    assert "must hold 8 positive factors" in refused(root, made.bytes())


@pytest.mark.parametrize("constant", ["'a' * 10**8", "'a'|center(10**8)"])
def test_a_template_is_not_computed_when_the_server_starts(root, whole, constant):
    """Jinja folds constants while it compiles: a text of ten bytes took the whole memory."""
    path = root / "m.gguf"
    path.write_bytes(whole.with_field("tokenizer.chat_template", "x{{ " + constant + " }}").bytes())
    with no_growth(1 << 20, 8 << 20):
        Tokenizer(path)
