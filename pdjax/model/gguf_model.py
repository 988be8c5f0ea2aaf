"""A GGUF file as a model: its metadata as a config, its tensors under Hugging Face's names, in float32 or as asked.

Must never guess: an architecture, a setting that changes the numbers or a tensor that has no place is refused, since
such a model answers fluently and wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdjax.core.errors import ConfigError
from pdjax.model.config import ARCHITECTURES, ModelConfig, Rope, parse_config
from pdjax.model.gguf_header import GgufHeader, TensorInfo

BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"  # what each frequency is divided by (Llama 3)
HF_NAMES = {model_type: name for name, model_type in ARCHITECTURES.items()}
# Settings of other models under the same architecture names; they would change the numbers.
REFUSED = ("attention.sliding_window", "expert_count", "attention.scale", "logit_scale")


def gguf_config(header: GgufHeader, path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's config, and the same as a config.json. Raises ConfigError for what is not implemented."""
    fields = header.fields
    arch = fields.get("general.architecture")
    if arch not in HF_NAMES:
        raise ConfigError(f"{path} is of architecture {arch!r}: use one of {sorted(HF_NAMES)}")
    tied = not any(tensor.name == "output.weight" for tensor in header.tensors)
    raw = _raw(fields, arch, path, tied_head=tied)
    cfg = parse_config(raw, str(path))
    rotated = fields.get(f"{arch}.rope.dimension_count", cfg.head_dim)
    if rotated != cfg.head_dim:
        raise ConfigError(f"{path}: a rope over {rotated} of {cfg.head_dim} elements is not supported")
    return cfg, raw


def _raw(fields: dict[str, Any], arch: str, path: Path, *, tied_head: bool) -> dict[str, Any]:
    for name in REFUSED:
        if fields.get(f"{arch}.{name}"):
            raise ConfigError(f"{path}: {arch}.{name}={fields[f'{arch}.{name}']} is not supported")

    def need(name: str) -> Any:
        if f"{arch}.{name}" not in fields:
            raise ConfigError(f"{path} does not state {arch}.{name}: it is no whole {arch} model")
        return fields[f"{arch}.{name}"]

    heads = need("attention.head_count")
    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    return {
        "architectures": [HF_NAMES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{arch}.attention.head_count_kv", heads),
        # Without a length of its own it follows from the hidden size, also for Qwen3.
        "head_dim": fields.get(f"{arch}.attention.key_length", _quotient(need("embedding_length"), heads)),
        "max_position_embeddings": need("context_length"),
        # The file keeps a float32, as 9.99999975e-06: seven digits give back the decimal that was meant.
        "rms_norm_eps": float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fields.get(f"{arch}.rope.freq_base", 10000.0)),
        **(
            {"rope_scaling": {"rope_type": scaling, "factor": fields.get(f"{arch}.rope.scaling.factor", 1.0)}}
            if scaling != "none"
            else {}
        ),
        "tie_word_embeddings": tied_head,
        "attention_bias": False,
        "torch_dtype": "float32",
        **{f"{name}_token_id": special_id(fields, name) for name in ("bos", "eos", "pad")},
    }


def _quotient(width: Any, heads: Any) -> Any:
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def special_id(fields: dict[str, Any], name: str) -> int | None:
    key = {"pad": "padding"}.get(name, name)
    return fields.get(f"tokenizer.ggml.{key}_token_id")


def hf_name(name: str, path: Path) -> str:
    """The Hugging Face name of a tensor of the file ``path``. Raises ConfigError when it has none."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in BLOCK:
        return f"model.layers.{block[1]}.{BLOCK[block[2]]}.{kind}"
    raise ConfigError(f"{path}: GGUF tensor {name!r} has no place in a model of this kind")


def unpermute(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo the row order that GGUF gives q and k of a Llama (interleaved rope pairs): halves, as Hugging Face has it."""
    out, width = weight.shape
    pairs = weight.reshape(n_heads, out // n_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(out, width)


def gguf_tensors(
    header: GgufHeader, cfg: ModelConfig, wanted: dict[str, tuple[int, ...]], path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 [out, in]) of each wanted tensor, one at a time.

    wanted: name → shape. Raises ConfigError before the first one if the file has others, or types that cannot be read.
    """
    named = {hf_name(t.name, path): t for t in header.tensors if t.name != ROPE_FACTORS}
    different = sorted(wanted.items() ^ {(name, tensor.shape) for name, tensor in named.items()})
    if different:
        raise ConfigError(f"{path} has not the tensors of its own configuration: {different[:4]}")
    permuted = {"q_proj": cfg.n_heads, "k_proj": cfg.kv_heads} if cfg.model_type == "llama" else {}
    content = np.memmap(path, np.uint8, mode="r")
    for name, tensor in named.items():
        value = _dequantized(content, tensor, path)
        heads = permuted.get(name.split(".")[-2])
        yield name, unpermute(value, heads) if heads and value.ndim == 2 else value


def with_rope_factors(header: GgufHeader, cfg: ModelConfig, path: Path) -> ModelConfig:
    """The config with the frequency factors that the file holds as a tensor, if it does."""
    found = next((tensor for tensor in header.tensors if tensor.name == ROPE_FACTORS), None)
    if found is None:
        return cfg
    wrong = ConfigError(f"{path}: {ROPE_FACTORS} must hold {cfg.head_dim // 2} positive factors")
    if found.shape != (cfg.head_dim // 2,):
        raise wrong
    factors = _dequantized(np.memmap(path, np.uint8, mode="r"), found, path)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise wrong
    if (factors == 1).all():
        return cfg
    return replace(cfg, rope=Rope(theta=cfg.rope.theta, kind="factors", factors=tuple(factors.tolist())))


def _dequantized(content: np.ndarray, tensor: TensorInfo, path: Path) -> np.ndarray:
    from gguf.quants import dequantize  # a slow import that only such a file needs

    raw = np.ascontiguousarray(content[tensor.start : tensor.start + tensor.n_bytes])
    try:
        with np.errstate(all="ignore"):  # a block's scale may be no number: the file's own affair
            value = dequantize(raw.reshape(tensor.byte_shape), tensor.kind)
    except NotImplementedError:
        raise ConfigError(
            f"{path}: tensor {tensor.name!r} is of type {tensor.kind.name}, which cannot be read: use another quantisation"
        ) from None
    return np.asarray(value, np.float32).reshape(tensor.shape)
