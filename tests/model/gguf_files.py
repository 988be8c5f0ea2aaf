"""Write a tiny model's directory as a GGUF file, with gguf-py's own writer: the other side of the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from pdjax.model.tiny import CHAT_TEMPLATE, SPECIAL

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in GGUF's order: i, i + half, i + 1, i + 1 + half, …"""
    half = weight.shape[0] // heads // 2
    order = [h * 2 * half + i + k * half for h in range(heads) for i in range(half) for k in (0, 1)]
    return weight[order]


def write_gguf(
    path: Path,
    directory: Path,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
    fields: dict[str, Any] | None = None,
    pre: str = "smollm",
    bos: bool = False,
    token_type: int | None = None,
) -> Path:
    """kind: of every matrix (None: float32). fields: further metadata, "ARCH." standing for the architecture."""
    cfg = json.loads((directory / "config.json").read_text())
    arch = cfg["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_head_count(cfg["num_attention_heads"])
    writer.add_head_count_kv(cfg["num_key_value_heads"])
    writer.add_key_length(cfg["head_dim"])
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_rope_freq_base(cfg["rope_theta"])
    for name, value in (fields or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(name.replace("ARCH.", f"{arch}."), value)
    _add_tokenizer(writer, directory, cfg, pre, bos, token_type)
    for name, value in load_file(directory / "model.safetensors").items():
        heads = {"q_proj": cfg["num_attention_heads"], "k_proj": cfg["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        if name == drop:
            continue
        value = interleave(value, heads) if heads and arch == "llama" else value
        if kind is not None and value.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(
    writer: gguf.GGUFWriter, directory: Path, cfg: dict[str, Any], pre: str, bos: bool, token_type: int | None
) -> None:
    bpe = json.loads((directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([token_type or (3 if token in SPECIAL else 1) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_chat_template(CHAT_TEMPLATE)
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")(cfg[f"{name}_token_id"])
    writer.add_add_bos_token(bos)
