"""Load a Hugging Face directory (config.json and safetensors, one file or sharded) or a GGUF file; its fingerprint.

Must never read a file outside the directory (a shard name with a path is refused) and never start with a tensor
missing, left over or of another shape: such a model answers fluently and wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxlib.version
import ml_dtypes
import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Fingerprint, PoolTransferSpec
from pdjax.model.config import ModelConfig, read_config, read_json
from pdjax.model.gguf_header import read_header
from pdjax.model.gguf_model import gguf_config, gguf_tensors, with_rope_factors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # part of the digest: other tokens, other KV
HASH_BLOCK_BYTES = 1 << 24

# Ours → Hugging Face's, below "model.layers.N."; biases and norms of heads only where the model has them.
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class LoadedModel:
    """params: the tree that llama.prefill takes (numpy arrays, [out, in]). digest: of weights and tokenizer."""

    config: ModelConfig
    params: dict[str, Any]
    digest: str


def load_model(path: Path, dtype: np.dtype[Any]) -> LoadedModel:
    """Read config, weights (as ``dtype``) and digest. Raises ConfigError, which names the file or tensor.

    path: of a Hugging Face directory, or of a GGUF file.
    """
    return _load_gguf(path, dtype) if path.is_file() else _load_directory(path, dtype)


def _load_gguf(path: Path, dtype: np.dtype[Any]) -> LoadedModel:
    header = read_header(path)
    plain, _ = gguf_config(header, path)
    cfg = with_rope_factors(header, plain, path)
    tensors = gguf_tensors(header, cfg, expected_tensors(cfg), path)
    found = {name: value.astype(dtype, copy=False) for name, value in tensors}
    return LoadedModel(
        cfg, params_tree(cfg, found), weights_digest(path.parent, [path.name], with_tokenizer=False)
    )


def _load_directory(directory: Path, dtype: np.dtype[Any]) -> LoadedModel:
    cfg = read_config(directory)
    shards = _shards(directory)
    wanted = expected_tensors(cfg)
    found: dict[str, np.ndarray] = {}
    unknown: list[str] = []
    for shard in shards:
        try:
            with safe_open(directory / shard, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if name in wanted:
                        found[name] = _tensor(file.get_tensor(name), name, wanted[name], dtype)
                    elif not _ignorable(name, cfg):
                        unknown.append(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise ConfigError(f"{directory / shard} cannot be read: {error}") from None
    _complain(directory, "is missing", sorted(wanted.keys() - found.keys()))
    _complain(directory, "has tensors that its config.json does not call for:", sorted(unknown))
    return LoadedModel(cfg, params_tree(cfg, found), weights_digest(directory, shards))


def expected_tensors(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name → shape, for every tensor that ``cfg`` calls for."""
    e, i = cfg.hidden_size, cfg.intermediate_size
    q, kv = cfg.n_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    shapes = {
        "q": (q, e),
        "k": (kv, e),
        "v": (kv, e),
        "o": (e, q),
        "gate": (i, e),
        "up": (i, e),
        "down": (e, i),
        "attn_norm": (e,),
        "mlp_norm": (e,),
        **({"q_norm": (cfg.head_dim,), "k_norm": (cfg.head_dim,)} if cfg.qk_norm else {}),
    }
    biased = "qkv" * cfg.qkv_bias + "o" * cfg.o_bias
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (cfg.vocab_size, e),
        "model.norm.weight": (e,),
    }
    if not cfg.tied_head:
        tensors["lm_head.weight"] = (cfg.vocab_size, e)
    for n in range(cfg.n_layers):
        for ours, shape in shapes.items():
            theirs = f"model.layers.{n}.{LAYER_WEIGHTS[ours]}"
            tensors[f"{theirs}.weight"] = shape
            if ours in biased:
                tensors[f"{theirs}.bias"] = shape[:1]
    return tensors


def weights_digest(directory: Path, shards: list[str], *, with_tokenizer: bool = True) -> str:
    """xxh3_128 over names and contents of the weight and tokenizer files: equal files, equal digest.

    with_tokenizer False: the weight file holds it. Then the name does not count, since a client may choose it.

    It guards against a wrong deployment, not against an attacker; half a gigabyte takes a fraction of a second.
    """
    digest = xxhash.xxh3_128()
    for name in [*sorted(shards), *(TOKENIZER_FILES if with_tokenizer else ())]:
        path = directory / name
        if not path.exists():
            continue
        digest.update(f"{name if with_tokenizer else ''}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(HASH_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def fingerprint(
    cfg: ModelConfig,
    weights: str,
    pool: PoolTransferSpec,
    *,
    protocol: int,
    transfer_size: int,
    transport_addresses: int,
    mesh: str = "single",
) -> Fingerprint:
    """What a peer must equal. protocol: the side channel's version. transfer_size in bytes."""
    return Fingerprint(
        protocol=protocol,
        model=cfg.hash,
        weights=weights,
        kv_dtype=pool.dtype,
        page_size=pool.shape[1],
        n_layers=pool.n_layers,
        kv_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        layout=pool.metadata["layout"],
        mesh=mesh,
        transfer_size=transfer_size,
        transport_addresses=transport_addresses,
        jaxlib=jaxlib.version.__version__,
    )


def _shards(directory: Path) -> list[str]:
    """File names of the weights, all directly in ``directory``."""
    if (directory / SINGLE).exists():
        return [SINGLE]
    if not (directory / INDEX).exists():
        raise ConfigError(
            f"{directory} has neither {SINGLE} nor {INDEX}: give a directory with safetensors weights"
        )
    names = read_json(directory / INDEX).get("weight_map", {}).values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{directory / INDEX}: shard name {name!r} must be a plain *.safetensors file name"
            )
    return sorted(set(names))


def _tensor(value: np.ndarray, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if value.shape != shape:
        raise ConfigError(f"tensor {name} is {list(value.shape)} but config.json calls for {list(shape)}")
    if value.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
        raise ConfigError(
            f"tensor {name} is {value.dtype}: only float32, float16 and bfloat16 weights are supported"
        )
    return value.astype(dtype, copy=False)


def _ignorable(name: str, cfg: ModelConfig) -> bool:
    """Saved by some exporters and without effect: the rope buffer, and the copy of a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and cfg.tied_head)


def _complain(directory: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(f"{directory} {what} {', '.join(names[:5])}{more}")


def params_tree(cfg: ModelConfig, found: dict[str, np.ndarray]) -> dict[str, Any]:
    layers = []
    for n in range(cfg.n_layers):
        layer = {}
        for ours, theirs in LAYER_WEIGHTS.items():
            for key, kind in ((ours, "weight"), (f"{ours}_bias", "bias")):
                value = found.get(f"model.layers.{n}.{theirs}.{kind}")
                if value is not None:
                    layer[key] = value
        layers.append(layer)
    tree: dict[str, Any] = {
        "embed": found["model.embed_tokens.weight"],
        "norm": found["model.norm.weight"],
        "layers": layers,
    }
    if not cfg.tied_head:
        tree["head"] = found["lm_head.weight"]
    return tree
