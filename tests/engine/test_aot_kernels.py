"""The page movers' programs compiled for TPUs: in place, no temporary, no copy of a pool. Nothing is executed.

A compile that succeeds says little: XLA copies a pool that it stores otherwise than a kernel needs it, without a word.
So the memory analysis and the instructions of what was compiled are looked at, and a layout that would copy is the
negative control (facts/kernels, "the trap").
"""

from functools import partial
from math import prod

import aot_programs
import jax
import numpy as np
import pytest
from aot_programs import GENERATIONS, compiled, devices, one_device, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.core.errors import ConfigError
from pdjax.core.pools import PoolTransferSpec, plan_parts
from pdjax.engine.kernels.layout import check_pool, packed_sharding, padded_shape
from pdjax.engine.kernels.pallas import PallasMover, scatter_pages
from pdjax.engine.kernels.plan import MAX_BUCKET, layout_of

LAYERS = 28
NUM_PAGES = 4096
WIDE = (16, 2048)  # 64 KiB a page in bfloat16, 268 MB a layer
MOVES = ("gather", "scatter")


def programs(shape, dtype, sharding, n_pages, layers=LAYERS):
    """(gather, scatter) of n_pages of a pool, lowered for the devices of its sharding."""
    page_bytes = prod(shape[1:]) * np.dtype(jax.numpy.dtype(dtype)).itemsize
    parts = plan_parts([PoolTransferSpec("kv", "kv", dtype, shape, layers, page_bytes)], n_pages)
    layout = layout_of(parts)
    words = struct([3 * max(part.page_stop for part in parts) + 2 * len(parts)], "int32", whole(sharding))
    pool = [struct(shape, dtype, sharding) for _ in range(layers)]
    for layer in pool:
        check_pool(layer)
    packed = [struct(part.shape, dtype, packed_sharding(sharding)) for part in parts]
    mover = PallasMover()
    return {
        "gather": lambda: compiled(mover.gather_program(sharding, layout).lower(words, pool)),
        "scatter": lambda: compiled(mover.scatter_program(sharding, layout).lower(words, pool, packed)),
    }


def whole(sharding):
    """Where the plan of a pool lives: on each of its devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def check_in_place(program, move, shape, dtype, layers=LAYERS):
    """shape: of a layer on one device."""
    memory = program.memory_analysis()
    pool_bytes = layers * prod(shape) * np.dtype(jax.numpy.dtype(dtype)).itemsize
    assert memory.alias_size_in_bytes == (pool_bytes if move == "scatter" else 0)
    assert memory.temp_size_in_bytes == 0
    assert aot_programs.strangers(program.as_text(), shape, dtype) == []


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_28_layers_move_in_place(generation, move):
    shape = (NUM_PAGES, *WIDE)
    program = programs(shape, "bfloat16", one_device(generation), 256)[move]()
    check_in_place(program, move, shape, "bfloat16")


SHAPES = {
    "flat": lambda page: (page, 2048),
    "heads": lambda page: (page, 16, 128),
    "heads of 64": lambda page: (page, 16, 64),
    "keys beside values": lambda page: (page, 8, 2, 128),
    "latent": lambda page: (page, 576),
}
DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
PAGE_SIZES = (16, 64, 128)
# Every dtype with every page size, shapes and generations in turn.
CASES = [
    (list(GENERATIONS)[(i + k) % 4], dtype, page_size, list(SHAPES)[(i + 2 * j + k) % 5])
    for i, dtype in enumerate(DTYPES)
    for j, page_size in enumerate(PAGE_SIZES)
    for k in range(2)
]


@pytest.mark.parametrize(("generation", "dtype", "page_size", "name"), CASES)
def test_types_page_sizes_and_shapes(generation, dtype, page_size, name):
    shape = padded_shape((NUM_PAGES * 16 // page_size, *SHAPES[name](page_size)), dtype)
    for move, compile_it in programs(shape, dtype, one_device(generation), 24, layers=4).items():
        check_in_place(compile_it(), move, shape, dtype, layers=4)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_pool_spread_over_four_devices(generation, move):
    mesh = Mesh(np.array(devices(generation)[:4]), ("tp",))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
    program = programs((NUM_PAGES, *WIDE), "bfloat16", sharding, 64)[move]()
    check_in_place(program, move, (NUM_PAGES, WIDE[0], WIDE[1] // 4), "bfloat16")


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_largest_plan_fits_into_scalar_memory(generation):
    shape = (2 * MAX_BUCKET, 16, 128)
    programs(shape, "bfloat16", one_device(generation), MAX_BUCKET, layers=1)["scatter"]()


COPIED = {
    "heads of 64": ((NUM_PAGES, 64, 16, 64), "bfloat16"),
    "latent": ((NUM_PAGES, 64, 576), "bfloat16"),
    "packed int8": ((NUM_PAGES, 64, 8, 2, 128), "int8"),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_pool_that_is_not_padded_would_be_copied_and_is_refused(name):
    """The negative control of every check above."""
    shape, dtype = COPIED[name]
    sharding = one_device("v6e")
    layout = ((0, 1, 0, 16),)
    pool, packed = [struct(shape, dtype, sharding)], [struct((1, 16, *shape[1:]), dtype, sharding)]
    words = struct([3 * 16 + 2], "int32", sharding)
    program = jax.jit(partial(scatter_pages, layout=layout), donate_argnums=1)
    made = compiled(program.lower(words, pool, packed))
    assert made.memory_analysis().temp_size_in_bytes > prod(shape) // 2
    assert aot_programs.strangers(made.as_text(), shape, dtype) != []
    with pytest.raises(ConfigError, match="would be copied by every program on a TPU"):
        check_pool(pool[0])


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_of_padding_is_the_compilers_own(generation, dtype):
    """Exactly the shapes that need no padding are stored row by row."""
    shapes = [
        (NUM_PAGES, *tail)
        for tail in (
            (16, 2048),
            (64, 384),
            (64, 576),
            (128, 640),
            (64, 16, 128),
            (64, 16, 64),
            (64, 8, 2, 128),
        )
    ]
    arrays = [struct(shape, dtype, one_device(generation)) for shape in shapes]
    read = jax.jit(lambda pools: [pool.ravel()[0] for pool in pools])
    [formats], _ = compiled(read.lower(arrays)).input_formats
    row_by_row = [
        format.layout.major_to_minor == tuple(range(len(s)))
        for format, s in zip(formats, shapes, strict=True)
    ]
    assert row_by_row == [padded_shape(shape, dtype) == shape for shape in shapes]
