"""A GGUF file written from a tiny model converts back to exactly that model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from pdjax.core.errors import ConfigError
from pdjax.model.config import read_config
from pdjax.model.gguf_convert import convert, hf_name
from pdjax.model.tiny import CHAT_TEMPLATE, SPECIAL, TINY_CONFIG
from pdjax.model.tokenizer import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in GGUF's order: i, i + half, i + 1, i + 1 + half, …"""
    half = weight.shape[0] // heads // 2
    order = [h * 2 * half + i + k * half for h in range(heads) for i in range(half) for k in (0, 1)]
    return weight[order]


def write_gguf(path: Path, directory: Path, **changes: Any) -> None:
    """The model in ``directory`` as GGUF. changes: architecture, pre, drop (a tensor), kind (of every token)."""
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    cfg = TINY_CONFIG
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_head_count(cfg["num_attention_heads"])
    writer.add_head_count_kv(cfg["num_key_value_heads"])
    writer.add_key_length(cfg["head_dim"])
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_rope_freq_base(cfg["rope_theta"])
    if changes.get("scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    bpe = json.loads((directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([changes.get("kind", 3 if token in SPECIAL else 1) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_chat_template(CHAT_TEMPLATE)
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")(cfg[f"{name}_token_id"])
    writer.add_add_bos_token(changes.get("bos", False))
    for name, value in load_file(directory / "model.safetensors").items():
        heads = {"q_proj": cfg["num_attention_heads"], "k_proj": cfg["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        if name != changes.get("drop"):
            writer.add_tensor(gguf_name(name), interleave(value, heads) if heads else value)
    if "extra" in changes:
        writer.add_tensor(changes["extra"], np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_survives_the_round_trip(tiny_dir: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_dir, extra="rope_freqs.weight")
    convert(tmp_path / "m.gguf", tmp_path / "hf")
    assert read_config(tmp_path / "hf") == read_config(tiny_dir)
    before, after = (load_file(d / "model.safetensors") for d in (tiny_dir, tmp_path / "hf"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.array_equal(value, after[name]), name
    old, new = Tokenizer(tiny_dir), Tokenizer(tmp_path / "hf")
    messages = [{"role": "user", "content": "Grüße, 你好"}]
    assert new.encode_chat(messages) == old.encode_chat(messages)
    assert new.eos_ids == old.eos_ids == {2}
    assert len(new.encode("1234")) == 4, "every digit on its own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "is of architecture 'qwen2'"),
        ({"pre": "llama-bpe"}, r"tokenizer \('gpt2', 'llama-bpe'\) is not supported"),
        ({"kind": 6}, r"token types \[6\] are not supported"),
        ({"bos": True}, "adds a beginning-of-text token"),
        ({"scaling": True}, "rope scaling is not supported"),
        ({"drop": "model.norm.weight"}, r"has not the tensors .*model\.norm\.weight"),
        ({"extra": "blk.0.attn_sinks.weight"}, r"'blk\.0\.attn_sinks\.weight' has no place"),
        ({"extra": "blk.0.attn_q.bias"}, r"has not the tensors .*q_proj\.bias"),
    ],
)
def test_what_has_no_place_is_refused(
    changes: dict[str, Any], message: str, tiny_dir: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_dir, **changes)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "hf")


def test_an_untied_head_has_a_name() -> None:
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
