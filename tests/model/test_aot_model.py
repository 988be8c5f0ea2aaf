"""The model's steps compiled for TPUs: pools are written in place, none is copied to another layout. Nothing is executed."""

from math import prod

import aot_programs
import jax.numpy as jnp
import pytest
from aot_programs import compiled, one_device, struct

from pdjax.engine.kernels.layout import pool_shape
from pdjax.model.checkpoint import expected_tensors, params_tree
from pdjax.model.config import parse_config
from pdjax.model.programs import Programs

NUM_PAGES, PAGE_SIZE = 4096, 16
TABLE = 16  # pages of the longest request
# Real rows of KV in a model whose weights are small: those decide how long a compile takes, and nothing that is looked at.
HEADS = {"whole tiles": (8, 128), "padded": (3, 96)}  # heads, elements of each: rows of 2048 and of 576


def make_config(name: str, n_layers: int):
    heads, head_dim = HEADS[name]
    return parse_config(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": head_dim,
            "num_hidden_layers": n_layers,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
    )


def compiled_step(step: str, name: str, n_layers: int, generation: str, platform: str = "tpu"):
    """(compiled step, shape of a layer's pool). platform: whose pools are made."""
    cfg, device = make_config(name, n_layers), one_device(generation)
    tensors = {key: struct(shape, jnp.bfloat16, device) for key, shape in expected_tensors(cfg).items()}
    shape = pool_shape((NUM_PAGES, PAGE_SIZE, cfg.kv_width), jnp.bfloat16, platform)
    pools = [struct(shape, jnp.bfloat16, device) for _ in range(n_layers)]

    def ints(*size):
        return struct(size, jnp.int32, device)

    rest = {
        "prefill": (ints(64), ints(), ints(), ints(TABLE)),
        "decode": (ints(8), ints(9), ints(8), ints(8), ints(8, TABLE)),
    }[step]
    program = getattr(Programs(cfg), step)
    return compiled(program.lower(params_tree(cfg, tensors), pools, *rest)), shape


# Every step on every generation, and 28 layers once: they take half a minute of a core.
CASES = [
    ("prefill", "whole tiles", 2, "v5e"),
    ("decode", "padded", 2, "v5e"),
    ("prefill", "padded", 2, "v5p"),
    ("decode", "whole tiles", 2, "v5p"),
    ("prefill", "padded", 2, "v6e"),
    ("decode", "whole tiles", 28, "v6e"),
    ("prefill", "whole tiles", 2, "tpu7x"),
    ("decode", "padded", 2, "tpu7x"),
]


@pytest.mark.timeout(600)  # 28 layers take 17 s of a core, which others may want, too
@pytest.mark.parametrize(("step", "name", "n_layers", "generation"), CASES)
def test_a_step_writes_the_pools_in_place(step, name, n_layers, generation):
    program, shape = compiled_step(step, name, n_layers, generation)
    memory, layer_bytes = program.memory_analysis(), 2 * prod(shape)
    assert memory.alias_size_in_bytes == n_layers * layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes // 4, "what it computes with is small, a pool would not be"
    assert aot_programs.relayouts(program.as_text(), shape, "bfloat16") == []


def test_rows_that_do_not_fill_tiles_would_be_copied():
    """The negative control: the same model with pools as a CPU has them."""
    program, shape = compiled_step("decode", "padded", 1, "v6e", platform="cpu")
    assert shape[2] == 576
    assert aot_programs.relayouts(program.as_text(), shape, "bfloat16") != []
