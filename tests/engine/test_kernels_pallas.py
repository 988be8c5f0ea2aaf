"""The Pallas kernels on CPU: interpreted with every copy done at once and as late as possible, races looked for.

A copy that is done at once hides a missing wait from the data, a late one hides it from the race detector, so every case
runs both ways (facts/kernels §4). Nothing here says how a TPU executes them.
"""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Part, page_bucket
from pdjax.engine.kernels import pallas
from pdjax.engine.kernels.pallas import PallasMover
from pdjax.engine.kernels.plan import RESERVED_PAGE, PlanError, gather_ids, scatter_ids

NUM_PAGES = 12
LAYERS = 2
TURNS = 3  # a layer of a part each: see cut_parts
DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
MODES = ("eager", "on_wait")
LEFT_OVER = "non-zero count"  # JAX prints it of a semaphore with bytes that nobody has waited for
TAILS = {"flat": (8, 128), "heads": (4, 4, 128), "latent": (16, 640)}


def make_mover(mode: str, depth: int = 2) -> PallasMover:
    """vector_clock_size: copies that share an entry of a clock look ordered, and JAX has two by default."""
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, vector_clock_size=128)
    return PallasMover(depth=depth, interpret=params)


@pytest.fixture(autouse=True)
def every_copy_was_waited_for(capsys: Any) -> Any:
    yield
    pltpu.reset_tpu_interpret_mode_state()
    assert LEFT_OVER not in capsys.readouterr().out


def raced() -> bool:
    """Whether the latest kernel had a race: JAX tells it nowhere else (the text goes to standard output)."""
    return interpret_pallas_call.races.races_found


def random_array(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> jax.Array:
    """Random bits: a copy must keep every one, whatever number they are."""
    bits = rng.integers(0, 256, (*shape, np.dtype(jax.numpy.dtype(dtype)).itemsize), np.uint8)
    return jax.device_put(bits.view(jax.numpy.dtype(dtype))[..., 0], jax.devices()[0])


def bits_of(array: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def make_pool(dtype: str, tail: tuple[int, ...], rng: np.random.Generator) -> list[jax.Array]:
    return [random_array((NUM_PAGES, *tail), dtype, rng) for _ in range(LAYERS)]


def cut_parts(dtype: str, tail: tuple[int, ...], bucket: int) -> list[Part]:
    """A part of the first layer, and two of the other one, which is cut along its pages."""
    itemsize = jax.numpy.dtype(dtype).itemsize
    page_bytes = int(np.prod(tail)) * itemsize
    half = max(bucket // 2, 1)
    places = [
        (0, 1, 0, bucket),
        *((1, LAYERS, page, min(page + half, bucket)) for page in range(0, bucket, half)),
    ]
    return [
        Part(
            0,
            0,
            i,
            a,
            b,
            page,
            stop,
            (b - a, stop - page, *tail),
            dtype,
            (b - a) * (stop - page) * page_bytes,
        )
        for i, (a, b, page, stop) in enumerate(places)
    ]


def expected_parts(pool: list[np.ndarray], ids: np.ndarray, parts: list[Part]) -> list[np.ndarray]:
    return [
        np.stack(
            [pool[layer][ids[part.page : part.page_stop]] for layer in range(part.layer, part.layer_stop)]
        )
        for part in parts
    ]


PLANS = {
    "contiguous": [3, 4, 5, 6, 7],
    "permuted": [5, 3, 4, 7, 6],
    "backwards": [9, 8, 7, 6, 5],
    "scattered": [1, 11, 4, 9, 6],
}


def check_move(mover: PallasMover, dtype: str, tail: tuple[int, ...], pages: list[int], seed: int) -> None:
    """Gather and scatter of these pages, bit for bit against numpy on fresh data, without a race."""
    rng = np.random.default_rng(seed)
    source, target = make_pool(dtype, tail, rng), make_pool(dtype, tail, rng)
    before, untouched = [bits_of(a) for a in source], [bits_of(a).copy() for a in target]
    parts = cut_parts(dtype, tail, page_bucket(len(pages)))
    ids = gather_ids(pages, NUM_PAGES)
    packed = mover.gather([source], ids, parts)
    got = [bits_of(a) for a in packed]
    assert not raced()
    for want, one in zip(expected_parts(before, ids, parts), got, strict=True):
        assert np.array_equal(want, one), "a row does not hold the page that the plan names"
    to = random.Random(seed).sample(range(1, NUM_PAGES), len(pages))
    [written] = mover.scatter([target], packed, scatter_ids(to, NUM_PAGES), parts)
    now = [bits_of(a) for a in written]
    assert not raced()
    for layer, old in enumerate(untouched):
        old[to] = before[layer][pages]
        assert np.array_equal(old, now[layer]), "a page is wrong, or one that is no destination changed"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_arrive_bit_for_bit_without_a_race(dtype: str, mode: str) -> None:
    pages = random.Random(dtype).sample(range(1, NUM_PAGES), 4)
    check_move(
        make_mover(mode), dtype, TAILS["flat"], [*pages, *set(range(1, NUM_PAGES)) - set(pages)][:5], 1
    )


@pytest.mark.parametrize("mode", MODES)
def test_plans_of_one_bucket_share_a_program(mode: str) -> None:
    mover = make_mover(mode)
    for seed, pages in enumerate(PLANS.values()):
        check_move(mover, "float32", TAILS["flat"], pages, seed)
    assert sorted(mover.compiles.values()) == [1, 1]
    assert [program._cache_size() for program in mover.programs()] == [1, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tail", "depth"), [("heads", 1), ("latent", 8)])
def test_other_shapes_and_any_number_of_layers_at_once(tail: str, depth: int, mode: str) -> None:
    check_move(make_mover(mode, depth), "bfloat16", TAILS[tail], [7, 3, 4], 1)


def test_every_page_of_a_pool_and_none() -> None:
    mover = make_mover("on_wait")
    check_move(mover, "float32", TAILS["flat"], list(range(NUM_PAGES - 1, 0, -1)), 3)
    rng = np.random.default_rng(4)
    pool = make_pool("float32", TAILS["flat"], rng)
    before = [bits_of(a) for a in pool]
    parts = cut_parts("float32", TAILS["flat"], NUM_PAGES)
    packed = [random_array(part.shape, part.dtype, rng) for part in parts]
    [written] = mover.scatter([pool], packed, np.full(NUM_PAGES, RESERVED_PAGE, np.int32), parts)
    assert all(np.array_equal(a, bits_of(b)) for a, b in zip(before, written, strict=True))
    assert not raced()


def forgetting(turn: int) -> Any:
    """_wait without the waits of one layer."""
    turns = iter(range(TURNS))
    wait = pallas._wait

    def forgetful(*args: Any) -> None:
        if next(turns) != turn:
            wait(*args)

    return forgetful


# With a semaphore for each layer, and with one that a later layer uses again: its wait then takes the bytes of the
# forgotten copy for its own, and what is left over tells it.
@pytest.mark.parametrize(("depth", "turn"), [(TURNS, 0), (TURNS, 2), (2, 0)])
def test_a_kernel_that_forgets_a_wait_is_caught(depth: int, turn: int, monkeypatch: Any, capsys: Any) -> None:
    """The negative control: copies that are done at once end in a race, late ones in wrong data."""
    pool = make_pool("float32", TAILS["flat"], np.random.default_rng(6))
    parts = cut_parts("float32", TAILS["flat"], 4)
    ids = gather_ids([4, 9, 2, 1], NUM_PAGES)
    want = expected_parts([bits_of(a) for a in pool], ids, parts)
    for mode in MODES:
        with monkeypatch.context() as patched:
            patched.setattr(pallas, "_wait", forgetting(turn))
            packed = make_mover(mode, depth).gather([pool], ids, parts)
            right = all(np.array_equal(bits_of(a), b) for a, b in zip(packed, want, strict=True))
        assert (LEFT_OVER in capsys.readouterr().out) == (mode == "eager")
        assert right == (mode == "eager")
        assert raced() == (mode == "eager" and depth == TURNS)
        pltpu.reset_tpu_interpret_mode_state()


def test_a_pool_that_would_be_copied_is_refused() -> None:
    mover = make_mover("on_wait")
    rng = np.random.default_rng(7)
    for dtype, tail, message in (
        ("bfloat16", (16, 576), r"make it as \[12, 16, 640\]"),
        ("bfloat16", (16, 2, 64), r"make it as \[12, 16, 2, 128\]"),
        ("int8", (16, 8, 2, 128), r"make it as \[12, 16, 8, 4, 128\]"),
        ("bfloat16", (3, 128), "page_size=3 does not fit"),
    ):
        pool = make_pool(dtype, tail, rng)
        parts = cut_parts(dtype, tail, 2)
        with pytest.raises(ConfigError, match=message):
            mover.gather([pool], gather_ids([1, 2], NUM_PAGES), parts)
        packed = [random_array(part.shape, dtype, rng) for part in parts]
        with pytest.raises(ConfigError, match=message):
            mover.scatter([pool], packed, scatter_ids([1, 2], NUM_PAGES), parts)
        assert not any(layer.is_deleted() for layer in pool)


def test_arrays_that_are_not_their_parts_are_refused_before_any_write() -> None:
    pool = make_pool("float32", TAILS["flat"], np.random.default_rng(8))
    parts = cut_parts("float32", TAILS["flat"], 2)
    arrays = [np.zeros(part.shape, np.float32) for part in parts]
    mover = make_mover("on_wait")
    with pytest.raises(PlanError, match="is stated as"):
        mover.scatter([pool], [*arrays[:-1], arrays[-1][:, :, 1:]], scatter_ids([1, 2], NUM_PAGES), parts)
    with pytest.raises(PlanError, match="the plan has 3 pages but the packed arrays carry 2"):
        mover.scatter([pool], arrays, scatter_ids([1, 2, 3], NUM_PAGES), parts)
    assert not any(layer.is_deleted() for layer in pool)
