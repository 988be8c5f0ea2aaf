"""Write a GGUF file out as a Hugging Face directory: loading that one is several times faster (facts/model §1).

Dequantised weights are written as float32, which holds them exactly. Must never write what the file does not say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from pdjax.core.errors import ConfigError
from pdjax.model.checkpoint import SINGLE, expected_tensors
from pdjax.model.gguf_header import read_header
from pdjax.model.gguf_model import gguf_config, gguf_tensors, special_id, with_rope_factors
from pdjax.model.gguf_tokenizer import eos_ids, make_tokenizer, tokenizer_settings
from pdjax.model.tiny import write_json


def convert(path: Path, directory: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    header = read_header(path)
    cfg, raw = gguf_config(header, path)
    if with_rope_factors(header, cfg, path) != cfg:
        raise ConfigError(
            f"{path} scales its rope by a tensor, which no config.json can say: serve the file itself"
        )
    tensors = dict(gguf_tensors(header, cfg, expected_tensors(cfg), path))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    write_json(directory / "config.json", raw)
    write_tokenizer(header.fields, path, directory)


def write_tokenizer(fields: dict[str, Any], path: Path, directory: Path) -> None:
    """The files that a tokenizer is read from, which a router also looks for."""
    ends = eos_ids(fields)
    ids = {
        "bos_token_id": special_id(fields, "bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": special_id(fields, "pad"),
    }
    write_json(directory / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
    make_tokenizer(fields, path).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_settings(fields))
