"""A GGUF file answers as the Hugging Face directory of the same weights does, loaded directly or converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write_gguf
from model_steps import run_decode, run_prefill
from model_variants import QWEN
from safetensors.numpy import load_file, save_file

from pdjax.core.errors import ConfigError
from pdjax.engine.ports import DecodeRow, PrefillChunk, SampleSpec
from pdjax.model.checkpoint import SINGLE, load_model
from pdjax.model.config import read_config
from pdjax.model.fetch import resolve_model, tokenizer_directory
from pdjax.model.gguf_convert import convert
from pdjax.model.gguf_model import hf_name
from pdjax.model.runner import JaxRunner
from pdjax.model.tiny import make_tiny_model
from pdjax.model.tokenizer import Tokenizer
from pdjax.serve.args import ServeArgs
from pdjax.serve.loading import load

MakeRunner = Callable[..., JaxRunner]
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, **QWEN}
F32 = np.dtype(np.float32)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tokens_of(runner: JaxRunner, n: int = 8) -> list[tuple[int, float]]:
    pages = [9, 3, 21, 14, 7, 30]
    ids = [int(t) for t in np.random.default_rng(1).integers(0, 512, 33)]
    drawn = [run_prefill(runner, PrefillChunk(ids, 0, pages, SampleSpec()))]
    while len(drawn) < n:
        row = DecodeRow(drawn[-1].token, len(ids) + len(drawn) - 1, pages, SampleSpec())
        drawn += run_decode(runner, [row])
    return [(one.token, one.logprob) for one in drawn]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_loaded_as_the_directory_is(family: str, tmp_path: Path, make_runner: MakeRunner) -> None:
    directory = make_tiny_model(tmp_path / "hf", **FAMILIES[family])
    path = write_gguf(tmp_path / "m.gguf", directory)
    direct, whole = load_model(path, F32), load_model(directory, F32)
    assert direct.config == whole.config
    assert tokens_of(make_runner(path)) == tokens_of(make_runner(directory))
    convert(path, tmp_path / "back")
    assert read_config(tmp_path / "back") == whole.config
    before, after = (load_file(d / SINGLE) for d in (directory, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_tokenizer_is_in_the_file(tiny_dir: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_dir)
    old, new = Tokenizer(tiny_dir), Tokenizer(path)
    messages = [{"role": "user", "content": "Grüße, 你好"}]
    assert new.encode_chat(messages) == old.encode_chat(messages)
    assert new.render_chat(messages) == old.render_chat(messages)
    assert (new.eos_ids, new.vocab_size) == (old.eos_ids, old.vocab_size) == ({2}, 512)
    assert len(new.encode("1234")) == 4, "every digit on its own"
    made = tokenizer_directory(path, "d1", tmp_path / "cache")
    assert tokenizer_directory(tiny_dir, "d1") == tiny_dir
    convert(path, tmp_path / "hf")
    for directory in (made, tmp_path / "hf"):
        (directory / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
        again = Tokenizer(directory)
        assert again.encode_chat(messages) == new.encode_chat(messages) and again.eos_ids == new.eos_ids


def test_how_a_text_is_cut_follows_the_name_in_the_file(tiny_dir: Path, tmp_path: Path) -> None:
    def cuts(pre: str, text: str, **changes: Any) -> list[str]:
        tokenizer = Tokenizer(write_gguf(tmp_path / f"{pre}.gguf", tiny_dir, pre=pre, **changes))
        return [piece for piece, _ in tokenizer._hf.pre_tokenizer.pre_tokenize_str(text)]

    assert cuts("smollm", "ab 123") == ["ab", "Ġ", "1", "2", "3"]
    assert cuts("gpt-2", "ab 1234") == ["ab", "Ġ1234"]
    assert cuts("llama-bpe", "it's 1234\n\n") == ["it", "'s", "Ġ", "123", "4", "ĊĊ"]
    assert cuts("qwen2", "it's 12\n\n") == ["it", "'s", "Ġ", "1", "2", "ĊĊ"]
    tokenizer = Tokenizer(tmp_path / "qwen2.gguf")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é"), "Qwen composes characters"


def test_a_text_begins_with_bos_where_the_file_says_so(tiny_dir: Path, tmp_path: Path) -> None:
    plain, bos = (Tokenizer(write_gguf(tmp_path / f"{b}.gguf", tiny_dir, bos=b)) for b in (False, True))
    assert bos.encode("ab") == [1, *plain.encode("ab")]
    messages = [{"role": "user", "content": "ab"}]
    assert bos.encode_chat(messages) == plain.encode_chat(messages), "the template writes its own"


def test_the_end_of_a_turn_ends_a_generation(tiny_dir: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_dir, fields={"tokenizer.ggml.eot_token_id": 7})
    assert Tokenizer(path).eos_ids == {2, 7}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantised_weights_are_what_gguf_py_makes_of_them(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    loaded = load_model(write_gguf(tmp_path / "m.gguf", tiny_dir, kind=quant), F32)
    value = load_model(tiny_dir, F32).params["layers"][1]["down"]
    exact = gguf.quants.dequantize(gguf.quants.quantize(value, quant), quant)
    assert np.array_equal(loaded.params["layers"][1]["down"], exact)
    assert not np.array_equal(exact, value)


def test_rope_factors_of_the_file_are_the_scaling_of_the_directory(
    tmp_path: Path, make_runner: MakeRunner
) -> None:
    """Llama 3's files state its scaling as a tensor: without it the answer is fluent and wrong."""
    scaled = make_tiny_model(tmp_path / "scaled", rope_scaling=LLAMA3)
    plain = make_tiny_model(tmp_path / "plain")
    inv = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    turns = 64 * inv / (2 * np.pi)
    share = np.clip((turns - 1) / 3, 0, 1)
    factors = 1 / (share + (1 - share) / 8)
    path = write_gguf(tmp_path / "m.gguf", plain, extra={"rope_freqs.weight": factors.astype(np.float32)})
    ours, theirs = tokens_of(make_runner(path)), tokens_of(make_runner(scaled))
    assert [t for t, _ in ours] == [t for t, _ in theirs]
    np.testing.assert_allclose([p for _, p in ours], [p for _, p in theirs], atol=1e-5)
    assert load_model(path, F32).config.hash != load_model(plain, F32).config.hash
    with pytest.raises(ConfigError, match=r"no config\.json can say"):
        convert(path, tmp_path / "hf")
    ones = write_gguf(tmp_path / "ones.gguf", plain, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert load_model(ones, F32).config == load_model(plain, F32).config


def test_linear_scaling_is_read(tiny_dir: Path, tmp_path: Path) -> None:
    fields = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0}
    rope = load_model(write_gguf(tmp_path / "m.gguf", tiny_dir, fields=fields), F32).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_the_digest_is_of_the_content(tiny_dir: Path, tmp_path: Path) -> None:
    """P and D may keep the file under different names."""
    a, b = (load_model(write_gguf(tmp_path / f"{name}.gguf", tiny_dir), F32) for name in "ab")
    other = load_model(write_gguf(tmp_path / "c.gguf", tiny_dir, pre="gpt-2"), F32)
    assert a.digest == b.digest != other.digest


NOTHING = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, r"tokenizer \('gpt2', 'tekken'\) is not supported"),
        ({"token_type": 6}, r"token types \[6\]"),
        ({"fields": {"ARCH.rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"fields": {"ARCH.attention.sliding_window": 512}}, r"llama\.attention\.sliding_window=512 is not"),
        ({"fields": {"ARCH.expert_count": 8}}, r"llama\.expert_count=8 is not supported"),
        ({"fields": {"ARCH.rope.dimension_count": 8}}, "a rope over 8 of 16 elements"),
        ({"drop": "model.norm.weight"}, r"has not the tensors .*model\.norm\.weight"),
        ({"extra": {"blk.0.attn_sinks.weight": NOTHING}}, r"'blk\.0\.attn_sinks\.weight' has no place"),
        ({"extra": {"blk.0.attn_q.bias": NOTHING}}, r"has not the tensors .*q_proj\.bias"),
        ({"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "must hold 8 positive factors"),
    ],
)
def test_what_has_no_place_is_refused(
    changes: dict[str, Any], message: str, tiny_dir: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_dir, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(path, F32)
        Tokenizer(path)
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "hf", model_type="gemma")
    path = write_gguf(tmp_path / "m.gguf", directory)
    with pytest.raises(
        ConfigError, match=r"of architecture 'gemma': use one of \['llama', 'qwen2', 'qwen3'\]"
    ):
        load_model(path, F32)


def test_a_quantisation_that_the_library_cannot_read_is_named(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_dir, kind=gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.delitem(gguf.quants._type_traits, gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(ConfigError, match="of type Q8_0, which cannot be read: use another quantisation"):
        load_model(path, F32)


def test_names(tmp_path: Path) -> None:
    assert hf_name("output.weight", tmp_path) == "lm_head.weight"
    assert hf_name("blk.12.attn_output.weight", tmp_path) == "model.layers.12.self_attn.o_proj.weight"
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    assert resolve_model(path) == path
    with pytest.raises(ConfigError, match=r"neither a directory, a \.gguf file nor one of"):
        resolve_model(tmp_path / "other.gguf")


def test_an_untied_head_and_a_changed_weight_count(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "hf", tie_word_embeddings=False)
    whole = load_model(write_gguf(tmp_path / "m.gguf", directory), F32)
    assert not whole.config.tied_head and whole.params["head"].shape == (512, 64)
    tensors = load_file(directory / SINGLE)
    save_file({**tensors, "lm_head.weight": 2 * tensors["lm_head.weight"]}, directory / SINGLE)
    changed = load_model(write_gguf(tmp_path / "n.gguf", directory), F32)
    assert np.array_equal(changed.params["head"], 2 * whole.params["head"])


def test_a_server_is_loaded_from_a_file(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(JaxRunner, "__init__", lambda self, model, settings: None)
    path = write_gguf(tmp_path / "m.gguf", tiny_dir)
    model = load(ServeArgs(model=str(path)))
    assert model.info["model_type"] == "llama" and model.tokenizer.vocab_size == 512
    assert (Path(model.info["tokenizer_path"]) / "tokenizer.json").exists(), "where the rust router looks"
