"""JaxRunner as a scheduler and a manager use it: hand-offs bit for bit, no late compile, one thread, clear refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import xxhash
from model_steps import run_decode, run_prefill

from pdjax.core.budget import HostSlots
from pdjax.core.errors import ConfigError
from pdjax.core.pools import packed_bytes, page_bucket, pages_for, plan_parts
from pdjax.engine.base import Packed
from pdjax.engine.kernels.layout import padded_shape
from pdjax.engine.kernels.plan import PlanError
from pdjax.engine.ports import DecodeRow, PrefillChunk, Runner, SampleSpec
from pdjax.model import sizes
from pdjax.model.buckets import Buckets, bucket, make_buckets
from pdjax.model.runner import JaxRunner

MakeRunner = Callable[..., JaxRunner]
GREEDY = SampleSpec()
IDS = [int(t) for t in np.random.default_rng(3).integers(0, 512, 43)]


def prompt(runner: JaxRunner, pages: list[int], sample: SampleSpec = GREEDY) -> int:
    sampled = run_prefill(runner, PrefillChunk(IDS, 0, pages, sample))
    assert sampled is not None
    return sampled.token


def cache_sizes(runner: JaxRunner) -> list[int]:
    """Programs that JAX itself keeps: it may compile anew without tracing anew."""
    programs = runner._programs
    return [
        program._cache_size()
        for program in (programs.prefill, programs.decode, programs.greedy, programs.steer)
    ]


def step(runner: JaxRunner, token: int, position: int, pages: list[int], sample: SampleSpec = GREEDY) -> int:
    [sampled] = run_decode(runner, [DecodeRow(token, position, pages, sample)])
    return sampled.token


def test_it_is_a_runner(make_runner: MakeRunner) -> None:
    runner: Runner = make_runner()
    assert (runner.page_size, runner.num_pages, runner.max_batch) == (8, 64, 4)
    [pool] = runner.pools
    assert pool.shape == (64, 8, 2 * 2 * 16)
    assert (pool.dtype, pool.n_layers, pool.page_bytes) == ("float32", 2, 8 * 64 * 4)


def test_rows_that_are_filled_up_for_a_tpu_change_no_token(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TPU keeps a row of 64 elements as 128. Logits and hand-off are those of plain rows; the fingerprint is not."""
    plain = make_runner()
    monkeypatch.setattr(sizes, "pool_shape", lambda shape, dtype, _: padded_shape(shape, dtype))
    p, d = make_runner(), make_runner()
    [pool] = p.pools
    assert (pool.shape, pool.page_bytes) == ((64, 8, 128), 8 * 128 * 4)
    mine, theirs = [2, 3, 5, 7, 11, 13], [40, 1, 58, 22, 9, 60]
    token = prompt(p, mine)
    assert token == prompt(plain, mine)
    assert np.array_equal(p.last_logits, plain.last_logits)
    d.scatter(theirs, p.gather(mine))
    assert step(d, token, len(IDS), theirs) == step(plain, token, len(IDS), mine)
    assert np.array_equal(d.last_logits, plain.last_logits)
    layouts = [r.fingerprint(protocol=1, transfer_size=1, transport_addresses=1).layout for r in (p, plain)]
    assert layouts[0] == f"{layouts[1]} 128 wide"


@pytest.mark.parametrize("sample", [GREEDY, SampleSpec(0.8, 1234567890123)])
def test_a_hand_off_changes_no_bit(sample: SampleSpec, make_runner: MakeRunner) -> None:
    """Prefill on one runner, decode on another from other pages: logits and tokens equal a run without hand-off."""
    p, d, alone = make_runner(), make_runner(), make_runner()
    mine, theirs = [2, 3, 5, 7, 11, 13, 17], [40, 1, 58, 22, 9, 60, 31]
    token = prompt(p, mine, sample)
    assert token == prompt(alone, mine, sample)
    packed = p.gather(mine[: pages_for(len(IDS), 8)])
    prompt(p, mine[::-1], GREEDY)  # the pages are used again at once
    d.scatter(theirs[: pages_for(len(IDS), 8)], packed)
    handed, plain = [token], [token]
    for i in range(8):
        handed.append(step(d, handed[-1], len(IDS) + i, theirs, sample))
        plain.append(step(alone, plain[-1], len(IDS) + i, mine, sample))
        assert np.array_equal(np.asarray(d.last_logits), np.asarray(alone.last_logits))
    assert handed == plain
    assert len(set(handed)) > 2, "the comparison needs tokens that vary"


def test_a_wrong_page_would_be_noticed(make_runner: MakeRunner) -> None:
    """The control of the test above."""
    p, d = make_runner(), make_runner()
    token = prompt(p, [1, 2, 3, 4, 5, 6])
    d.scatter([1, 2, 3, 4, 6, 5], p.gather([1, 2, 3, 4, 5, 6]))
    for runner in (p, d):
        step(runner, token, len(IDS), [1, 2, 3, 4, 5, 6])
    assert not np.array_equal(np.asarray(d.last_logits), np.asarray(p.last_logits))


def test_checksums_are_of_the_bytes(make_runner: MakeRunner) -> None:
    runner = make_runner(verify="all")
    prompt(runner, [1, 2, 3, 4, 5, 6])
    packed = runner.gather([1, 2, 3])
    assert [msgspec.structs.replace(part, checksum=0) for part in packed.parts] == list(
        plan_parts(runner.pools, 3)
    )
    for part, array in zip(packed.parts, packed.arrays, strict=True):
        assert part.checksum == xxhash.xxh3_64_intdigest(np.asarray(array).tobytes()) != 0
    assert all(part.checksum == 0 for part in make_runner(verify="off").gather([1, 2, 3]).parts)
    assert sum(part.checksum != 0 for part in make_runner(verify="sampled").gather([1, 2, 3]).parts) == 1


def test_scatter_refuses_what_does_not_fit_and_leaves_the_pools(make_runner: MakeRunner) -> None:
    runner = make_runner()
    prompt(runner, [1, 2, 3, 4, 5, 6])
    packed = runner.gather([1, 2, 3, 4, 5, 6])
    before = [np.array(pool) for pool in runner._kv]
    wrong = Packed(parts=packed.parts, arrays=[np.zeros((2, 6, 8, 65), np.float32)])
    for pages, given in [
        ([7], packed),
        ([7, 7, 8, 9, 10, 11], packed),
        ([0, 1, 2, 3, 4, 5], packed),
        ([64, 1, 2, 3, 4, 5], packed),
        ([7, 8, 9, 10, 11, 12], wrong),
        ([7, 8, 9, 10, 11, 12], Packed(parts=packed.parts, arrays=[])),
    ]:
        with pytest.raises(PlanError):
            runner.scatter(pages, given)
    assert all(np.array_equal(was, np.asarray(now)) for was, now in zip(before, runner._kv, strict=True))
    with pytest.raises(PlanError, match="source page 64 is out of range"):
        runner.gather([64])


def test_warmup_leaves_nothing_to_compile(make_runner: MakeRunner) -> None:
    """After warmup no request of any size within its limit compiles, and nothing was compiled twice."""
    runner = make_runner(chunk_tokens=32, context_tokens=40, max_batch=2, num_pages=61)
    assert runner.warmup(40) == len(runner.compiles) > 0
    assert runner.warmup(40) == 0
    before = [np.array(pool)[1:] for pool in runner._kv]
    assert not any(pool.any() for pool in before), "warmup writes to the reserved page only"
    compiled = runner.compiles
    sizes = cache_sizes(runner)
    pages = list(range(1, 6))
    for n in range(1, 41):
        start = 0
        while start < n:
            count = min(32, n - start)
            last = start + count == n
            run_prefill(
                runner, PrefillChunk([1] * count, start, pages[: pages_for(n, 8)], GREEDY if last else None)
            )
            start += count
        run_decode(runner, [DecodeRow(1, n - 1, pages, SampleSpec(float(n % 2), n))] * (1 + n % 2))
    for n in range(1, pages_for(40, 8) + 1):
        runner.scatter(pages[:n], runner.gather(pages[:n]))
    assert runner.compiles == compiled and set(compiled.values()) == {1}
    assert cache_sizes(runner) == sizes


def test_a_staged_hand_off_changes_no_bit(make_runner: MakeRunner) -> None:
    """Host staging (RFC-2 §5.5 mode B): the same parts, checksums and bytes, from slots that are used again and again."""
    p, d = make_runner(), make_runner()
    prompt(p, [1, 2, 3, 4, 5, 6])
    slots = HostSlots(1 << 20)
    for pages in ([1, 2, 3], [6, 5, 4], [2, 6, 1, 4]):
        plain = p.gather(pages)
        slot = slots.take(sum(part.nbytes for part in plain.parts))
        staged = p.gather(pages, slot)
        assert staged.parts == plain.parts
        for one, other in zip(staged.arrays, plain.arrays, strict=True):
            assert one.sharding.memory_kind == "pinned_host" != other.sharding.memory_kind
            assert np.array_equal(one, other)
        d.scatter(pages, staged)
        slots.give_back(slot, quiet=True)
    assert slots.made == 2
    for layer in range(len(p._kv)):
        assert np.array_equal(np.asarray(d._kv[layer])[1:7], np.asarray(p._kv[layer])[1:7])


def test_warmup_leaves_no_staging_to_compile(make_runner: MakeRunner) -> None:
    runner, slots = make_runner(num_pages=56, context_tokens=40), HostSlots(1 << 18)
    assert runner.warmup(prefill=False, decode=False, scatter=False, stage=True) == len(runner.compiles)
    sizes = runner.hand_off_bytes()
    fresh = slots.fill(sizes)
    runner.prepare(fresh)
    assert {slot.n_bytes for slot in fresh} == set(sizes) and all(slot.arrays for slot in fresh)
    compiled = runner.compiles
    assert {name for name, *_ in compiled} == {"gather", "stage"}
    for n in range(1, pages_for(40, 8) + 1):
        runner.gather(list(range(1, n + 1)), slots.take(packed_bytes(runner.pools, n)))
    assert slots.made == len(fresh), "no request had to allocate"
    assert runner.compiles == compiled and set(compiled.values()) == {1}


def test_warmup_compiles_what_a_role_needs(make_runner: MakeRunner) -> None:
    prefill, decode = make_runner(max_batch=2, num_pages=59), make_runner(max_batch=2, num_pages=58)
    prefill.warmup(16, decode=False, scatter=False)
    decode.warmup(16, prefill=False, gather=False)
    assert {name for name, *_ in prefill.compiles} == {"prefill", "gather"}
    assert {name for name, *_ in decode.compiles} == {"decode", "scatter"}


def test_runners_of_equal_sizes_share_their_programs(make_runner: MakeRunner) -> None:
    first, second = make_runner(num_pages=57), make_runner(num_pages=57)
    for runner in (first, second):
        prompt(runner, [1, 2, 3, 4, 5, 6])
    assert second.compiles == {("prefill", 64, 8): 1}


def test_a_second_thread_is_refused(make_runner: MakeRunner) -> None:
    runner = make_runner()
    runner.warmup(8, decode=False, gather=False, scatter=False)
    caught: list[BaseException] = []

    def scheduler() -> None:
        prompt(runner, [1, 2, 3, 4, 5, 6])  # warmup by the starting thread does not count

    def intruder(call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            caught.append(error)

    calls = [
        lambda: prompt(runner, [1, 2, 3, 4, 5, 6]),
        lambda: step(runner, 1, 3, [1]),
        lambda: runner.gather([1]),
        lambda: runner.scatter([1], Packed((), ())),
    ]
    for work in (scheduler, *(lambda c=c: intruder(c) for c in calls)):
        thread = threading.Thread(target=work)
        thread.start()
        # The next thread could be given the id of a dead one, so the owner stays alive in this test as it does in life.
        if work is scheduler:
            thread.join()
            runner._owner = threading.get_ident()
        else:
            thread.join()
    assert len(caught) == 4 and all("owned by another thread" in str(error) for error in caught)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 1}, "num_pages=1 must be at least 2"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"dtype": "float64"}, "dtype='float64' must be one of"),
        ({"verify": "some"}, "verify='some' must be one of"),
        ({"max_batch": 0}, "max_batch=0 must be at least 1"),
        ({"chunk_tokens": 0}, "chunk_tokens=0 must be at least 1"),
        ({"context_tokens": 4096}, "more than the model's max_position_embeddings=2048"),
        ({"context_tokens": 1000}, "does not fit: 63 pages hold 504 tokens"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str, make_runner: MakeRunner) -> None:
    with pytest.raises(ConfigError, match=message):
        make_runner(**settings)


def test_sizes_beyond_the_buckets_are_refused(make_runner: MakeRunner) -> None:
    runner = make_runner(context_tokens=64)
    with pytest.raises(ValueError, match="no prefill or decode call"):
        _ = runner.last_logits
    with pytest.raises(ValueError, match="tokens of a chunk: 65 is not between 1 and 64"):
        run_prefill(runner, PrefillChunk([1] * 65, 0, list(range(1, 10)), GREEDY))
    with pytest.raises(ValueError, match="tokens of a chunk: 0"):
        run_prefill(runner, PrefillChunk([], 0, [1], GREEDY))
    with pytest.raises(ValueError, match="pages of a request: 9 is not between 1 and 8"):
        run_prefill(runner, PrefillChunk([1], 64, list(range(1, 10)), GREEDY))
    with pytest.raises(ValueError, match="17 tokens need 3 pages but the page table has 2"):
        run_prefill(runner, PrefillChunk([1], 16, [1, 2], GREEDY))
    with pytest.raises(ValueError, match="rows of a decode step: 5"):
        run_decode(runner, [DecodeRow(1, 0, [1], GREEDY)] * 5)


def test_the_compilation_cache_is_used(make_runner: MakeRunner, tmp_path: Path) -> None:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in names}
    try:
        make_runner(compilation_cache=str(tmp_path), page_size=7).gather([1, 2])
        assert list(tmp_path.iterdir()), "a compiled program was kept"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_buckets_cover_every_size_with_few_shapes() -> None:
    buckets = make_buckets(chunk_tokens=500, max_batch=16, max_pages=100)
    assert buckets == Buckets((16, 32, 64, 128, 256, 500), (8, 32, 100), (2, 4, 8, 16))
    assert make_buckets(chunk_tokens=4, max_batch=1, max_pages=5) == Buckets((16,), (5,), (2,))
    assert [bucket((2, 4, 8), n, "x") for n in (1, 2, 3, 8)] == [2, 2, 4, 8]
    assert buckets.transfer_shapes(16 * 20, 16) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    for most in (1, 15, 16, 17, 130, 513, 1600):
        shapes = set(buckets.prefill_shapes(most, 16))
        steps = set(buckets.decode_shapes(most, 16))
        for n in range(1, most + 1):
            for count in {min(n, 500), n % 500 or 500, 1}:
                assert (
                    bucket(buckets.tokens, count, ""),
                    bucket(buckets.pages, pages_for(n, 16), ""),
                ) in shapes
            assert {(b, bucket(buckets.pages, pages_for(n, 16), "")) for b in buckets.batch} <= steps
        assert page_bucket(pages_for(most, 16)) in buckets.transfer_shapes(most, 16)
