"""Convert a Llama GGUF file to a Hugging Face directory, once, so that nothing else needs to know GGUF.

Dequantised weights are written as float32, which holds them exactly. Must never guess: a file of another
architecture, tokenizer or with a tensor that has no place is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from pdjax.core.errors import ConfigError
from pdjax.model.checkpoint import SINGLE, expected_tensors
from pdjax.model.config import parse_config
from pdjax.model.tiny import write_json

BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DERIVED = {"rope_freqs.weight"}  # follows from the rope scaling
NORMAL, CONTROL = 1, 3  # token types of the GGUF format


def convert(gguf_path: Path, directory: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    from gguf import GGUFReader  # a slow import that only the conversion needs

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ConfigError(
            f"{gguf_path} is of architecture {fields.get('general.architecture')!r}: only 'llama' is supported"
        )
    tensors = _tensors(reader)
    config = _config(fields, tied_head="lm_head.weight" not in tensors)
    expected = expected_tensors(parse_config(config, str(gguf_path)))
    if expected != {name: value.shape for name, value in tensors.items()}:
        different = sorted(expected.items() ^ {(name, value.shape) for name, value in tensors.items()})
        raise ConfigError(f"{gguf_path} has not the tensors of its own configuration: {different[:4]}")
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json",
        {k: v for k, v in config.items() if k.endswith("_token_id") and v is not None},
    )
    make_tokenizer(fields).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", _tokenizer_config(fields))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ConfigError when it has none."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in BLOCK:
        return f"model.layers.{block[1]}.{BLOCK[block[2]]}.{kind}"
    raise ConfigError(f"GGUF tensor {name!r} has no place in a Llama model")


def unpermute(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo the row order that GGUF gives q and k of a Llama (interleaved rope pairs): halves, as Hugging Face has it."""
    out, width = weight.shape
    pairs = weight.reshape(n_heads, out // n_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(out, width)


def _tensors(reader: Any) -> dict[str, np.ndarray]:
    """Hugging Face name → float32 array [out, in]."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name in DERIVED:
            continue
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads and value.ndim == 2:
            value = unpermute(value, heads[kind])
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(value)
    return tensors


def _config(fields: dict[str, Any], *, tied_head: bool) -> dict[str, Any]:
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise ConfigError(
            "a GGUF file with rope scaling is not supported: use the Hugging Face directory of the model"
        )
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields.get("llama.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(fields["llama.context_length"]),
        # The file keeps a float32, as 9.99999975e-06: seven digits give back the decimal that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied_head,
        "attention_bias": False,
        "torch_dtype": "float32",
        **{f"{name}_token_id": _special_id(fields, name) for name in ("bos", "eos", "pad")},
    }


def _special_id(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(
        {"pad": "tokenizer.ggml.padding_token_id"}.get(name, f"tokenizer.ggml.{name}_token_id")
    )
    return None if value is None else int(value)


def make_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with every digit on its own: what ``tokenizer.ggml.pre`` = smollm means (facts/model §1)."""
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"GGUF tokenizer {kind} is not supported: only ('gpt2', 'smollm') is")
    if fields.get("tokenizer.ggml.add_bos_token"):
        raise ConfigError("a GGUF tokenizer that adds a beginning-of-text token is not supported")
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    if set(kinds) - {NORMAL, CONTROL}:
        raise ConfigError(f"GGUF token types {sorted(set(kinds) - {NORMAL, CONTROL})} are not supported")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    named = {}
    for name in ("bos", "eos", "pad"):
        value = _special_id(fields, name)
        if value is not None:
            named[f"{name}_token"] = tokens[value]
    return {
        **named,
        "add_bos_token": False,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
