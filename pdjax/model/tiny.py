"""A tiny random Llama with a tokenizer, made on the spot: for tests and for trying the servers out.

Its answers are nonsense and repeat exactly: the same seed gives the same files. It must never need a download.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from pdjax.model.checkpoint import SINGLE, expected_tensors
from pdjax.model.config import parse_config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def make_tiny_model(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write the model into ``directory`` (made if need be) and return it.

    Another seed gives other weights. overrides: keys of config.json, such as eos_token_id or num_hidden_layers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    raw = {**TINY_CONFIG, **overrides}
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(expected_tensors(parse_config(raw)).items()):
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + np.float32(0.1) * noise  # not 1, so that a norm left out shows
        elif name.endswith(".bias"):
            tensors[name] = np.float32(0.1) * noise
        else:
            tensors[name] = noise / np.float32(np.sqrt(shape[-1]))
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    write_json(directory / "config.json", raw)
    write_json(
        directory / "generation_config.json",
        {k: raw[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    byte_tokenizer(raw["vocab_size"]).save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "chat_template": CHAT_TEMPLATE,
            "eos_token": SPECIAL[2],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return directory


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: special tokens, the 256 bytes, then two-letter merges, vocab_size tokens at most.

    Every text round-trips, and every token stands for some text.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pairs = [*product(consonants, vowels), *product(vowels, consonants)]
    pairs += [("Ġ", letter) for letter in (vowels + consonants + upper)]
    merges = pairs[: max(0, vocab_size - len(SPECIAL) - len(symbols))]
    tokens = [*SPECIAL, *symbols, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
