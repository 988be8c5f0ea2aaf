"""What a Hugging Face config.json says of a Llama, Qwen2 or Qwen3 model, and a refusal of everything that is not implemented.

A setting that changes the numbers and is not implemented must stop the start, never be skipped: a model that runs
with the wrong mask or rope answers fluently and wrongly.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pdjax.core.errors import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}  # model_type
SCALINGS = {  # of rope, and the numbers that each needs
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
MAX_SIZE = 1 << 28  # of any size: what is larger is no model, and a list of its tensors would fill the memory
MAX_LAYERS = 4096
MAX_NUMBER = 1e30
QWEN3_HEAD_DIM = 128  # transformers' default; the others derive it from the hidden size


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. kind "linear" uses factor, "factors" divides each frequency by its own (only GGUF states
    them); "llama3" uses all the others (lengths in tokens)."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. Sizes count elements; max_position counts tokens.

    qkv_bias, o_bias: the attention's projections add one. qk_norm: each head's query and key is normed before the rope.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int
    rope: Rope
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool

    @property
    def model_type(self) -> str:
        return ARCHITECTURES[self.architecture]

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys and values in one layer: K0 V0 K1 V1 … flattened."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def hash(self) -> str:
        """Equal on two sides exactly when the model's shape and numerics are configured equally (fingerprint)."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()


def read_config(directory: Path) -> ModelConfig:
    """Parse ``directory``/config.json. Raises ConfigError when it is missing, broken or not supported."""
    return parse_config(read_json(directory / "config.json"), str(directory / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ConfigError, which names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: give a directory with a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def parse_config(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """A ModelConfig from the keys of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    _refuse(raw, where)
    heads = _positive(raw, "num_attention_heads", where)
    hidden = _positive(raw, "hidden_size", where)
    kv_heads = _positive(raw, "num_key_value_heads", where, default=heads)
    architecture: str = raw["architectures"][0]
    own_head_dim = QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden // heads
    head_dim = _positive(raw, "head_dim", where, default=own_head_dim)
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"{where}: head_dim={head_dim} must be even for the rotary embedding")
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", where),
        n_layers=_positive(raw, "num_hidden_layers", where, most=MAX_LAYERS),
        n_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=_number(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        max_position=_positive(raw, "max_position_embeddings", where, default=2048),
        rope=_rope(raw, where),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        o_bias=bias and architecture != "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _refuse(raw: dict[str, Any], where: str) -> None:
    """Raise ConfigError for what would change the numbers and is not implemented."""
    architectures = raw.get("architectures") or []
    if architectures not in [[one] for one in ARCHITECTURES]:
        raise ConfigError(
            f"{where}: architectures={architectures!r} is not supported: use one of {list(ARCHITECTURES)}"
        )
    # Qwen's files name a window that is off unless use_sliding_window says otherwise; others have no such switch.
    windowed = raw.get("use_sliding_window", not architectures[0].startswith("Qwen"))
    if raw.get("sliding_window") is not None and windowed:
        raise ConfigError(
            f"{where}: sliding_window={raw['sliding_window']!r} is not supported: use a model with full attention"
        )
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ConfigError(f"{where}: layer_types={layer_types!r} must be a list")
    other_layers = [one for one in layer_types if one != "full_attention"]
    if other_layers:
        raise ConfigError(f"{where}: layer_types has {other_layers}: only full_attention is supported")
    if raw.get("quantization_config") is not None:
        raise ConfigError(f"{where}: quantization_config is not supported: use the unquantized model")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act={raw['hidden_act']!r} is not supported: only 'silu' is")
    experts = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(k)), None)
    if experts:
        raise ConfigError(
            f"{where}: {experts}={raw[experts]!r} is not supported: use a model without experts"
        )
    if raw.get("mlp_bias", False):
        raise ConfigError(f"{where}: mlp_bias=true is not supported")


def _rope(raw: dict[str, Any], where: str) -> Rope:
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: {name}={given!r} must be an object")
        scaling.update(given)
    theta = _number(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)), "rope_theta", where)
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor={partial!r} is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    needed = SCALINGS.get(kind) if isinstance(kind, str) else None
    if needed is None:
        raise ConfigError(f"{where}: rope scaling {kind!r} is not supported: use default, linear or llama3")
    for name in needed:
        if name not in scaling:
            raise ConfigError(f"{where}: rope scaling {kind!r} needs {name}")
    numbers = {name: _number(scaling[name], name, where) for name in needed}
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=numbers["factor"])
    return Rope(
        theta=theta,
        kind="llama3",
        factor=numbers["factor"],
        low_freq_factor=numbers["low_freq_factor"],
        high_freq_factor=numbers["high_freq_factor"],
        original_max_position=int(numbers["original_max_position_embeddings"]),
    )


def _number(value: Any, key: str, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MAX_NUMBER:
        raise ConfigError(f"{where}: {key}={value!r} must be a positive number")
    return float(value)


def _positive(
    raw: dict[str, Any], key: str, where: str, default: int | None = None, most: int = MAX_SIZE
) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{where}: {key}={value!r} must be a positive integer, at most {most}")
    return value
