"""config.json of transformers 4 and 5, and a refusal in one line of what is not implemented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdjax.core.errors import ConfigError
from pdjax.model.config import Rope, parse_config, read_config
from pdjax.model.tiny import TINY_CONFIG

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**overrides: Any) -> dict[str, Any]:
    return {k: v for k, v in {**TINY_CONFIG, **overrides}.items() if v is not ...}


@pytest.mark.parametrize(
    ("v4", "v5", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, Rope(5e5)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            Rope(1e4, "linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_both_generations_of_rope_keys_are_read(v4: dict[str, Any], v5: dict[str, Any], rope: Rope) -> None:
    old = parse_config(config(**v4))
    new = parse_config(config(rope_theta=..., rope_parameters=v5))
    assert old.rope == new.rope == rope
    assert old == new and old.hash == new.hash


def test_defaults_follow_hugging_face() -> None:
    cfg = parse_config(config(head_dim=..., num_key_value_heads=None, tie_word_embeddings=...))
    assert (cfg.head_dim, cfg.kv_heads, cfg.tied_head) == (16, 4, False)
    assert cfg.kv_width == 2 * 4 * 16


def test_the_hash_tells_models_apart() -> None:
    hashes = {parse_config(config(**o)).hash for o in ({}, {"rope_theta": 2e4}, {"num_hidden_layers": 3})}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            r"architectures=\['MistralForCausalLM'\] is not supported",
        ),
        ({"architectures": ...}, r"architectures=\[\] is not supported"),
        ({"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias=true is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' needs low_freq_factor"),
        ({"vocab_size": ...}, "vocab_size=None must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a positive integer"),
        ({"hidden_size": "64"}, "hidden_size='64' must be a positive integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
    ],
)
def test_what_is_not_implemented_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(config(**overrides))
    assert "\n" not in str(caught.value)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": ...}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def test_what_tells_qwen_from_llama() -> None:
    llama, qwen2, qwen3 = (parse_config(config(**o)) for o in ({}, QWEN2, QWEN3))
    assert [(c.qkv_bias, c.o_bias, c.qk_norm) for c in (llama, qwen2, qwen3)] == [
        (False, False, False),
        (True, False, False),
        (False, False, True),
    ]
    assert [c.model_type for c in (llama, qwen2, qwen3)] == ["llama", "qwen2", "qwen3"]
    assert len({c.hash for c in (llama, qwen2, qwen3)}) == 3, "the fingerprint tells them apart"
    biased = parse_config(config(**QWEN3, attention_bias=True))
    assert biased.qkv_bias and biased.o_bias and biased.hash != qwen3.hash


def test_qwen3_has_a_head_size_of_its_own() -> None:
    assert parse_config(config(**QWEN3, head_dim=...)).head_dim == 128
    assert parse_config(config(**QWEN2, head_dim=...)).head_dim == 16


def test_the_window_that_qwen_files_name_is_off_unless_they_say_so() -> None:
    for qwen in (QWEN2, QWEN3):
        assert parse_config(config(**qwen, sliding_window=4096)) == parse_config(config(**qwen))
        with pytest.raises(ConfigError, match="sliding_window=4096 is not supported"):
            parse_config(config(**qwen, sliding_window=4096, use_sliding_window=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, r"'Qwen3MoeForCausalLM'\] is not supported: use one of"),
        ({**QWEN3, "num_experts": 8}, "num_experts=8 is not supported"),
        ({**QWEN2, "rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope scaling 'mrope' is not"),
        ({**QWEN2, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({**QWEN2, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types has"),
    ],
)
def test_what_qwen_can_be_and_is_not_implemented(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(config(**overrides))
    assert "\n" not in str(caught.value)


def test_an_unused_sliding_window_is_no_obstacle() -> None:
    assert parse_config(config(sliding_window=4096, use_sliding_window=False)) == parse_config(config())


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_config(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object, not a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(tmp_path)
