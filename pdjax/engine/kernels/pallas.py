"""Gather and scatter of KV pages as Pallas TPU kernels: copies from HBM to HBM, all layers of a pool in one call.

The plan of a move (``plan.copy_plan``) lies in scalar memory; a run of neighbouring pages is one copy of dynamic length
along the page axis. Each layer has a semaphore while it moves, and DEPTH layers move at once, so that layer l + 1 is issued
while l is under way (RFC-2 §5.2, multi_layer_copy). A scatter works in place: pools are donated and aliased.
Must never start a copy that nobody waits for (neither compiler nor hardware notices), and never see an unchecked id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from pdjax.core.pools import Part
from pdjax.engine.kernels.layout import check_pool, packed_sharding, placed
from pdjax.engine.kernels.mover import CompileKey
from pdjax.engine.kernels.plan import Ids, Layout, by_pool, check_arrays, copy_plan, layout_of

DEPTH = 4  # layers that move at once; which is best only a TPU can tell
Pool = list[jax.Array]
_struct: Any = jax.ShapeDtypeStruct
_spec: Any = PartitionSpec


@dataclass(frozen=True)
class _Runs:
    """The plan as a kernel sees it: CopyPlan.words in scalar memory."""

    words: Any
    layout: Layout

    @property
    def bucket(self) -> int:
        return (int(self.words.shape[0]) - 2 * len(self.layout)) // 3

    def of(self, part: int) -> tuple[Any, Any]:
        """First run of a part, and the one after its last."""
        at = 3 * self.bucket + part
        return self.words[at], self.words[at + len(self.layout)]

    def run(self, k: Any, part: int) -> tuple[Any, Any]:
        """Slices of run k: of the pages of a layer, and of the rows of a part."""
        n = self.words[2 * self.bucket + k]
        row = self.words[self.bucket + k] - self.layout[part][2]
        return pl.ds(self.words[k], n), pl.ds(row, n)


def _layers(layout: Layout) -> list[tuple[int, int, int]]:
    """(part, index in it, layer of the pool) of each layer of each part, in the order in which they move."""
    return [
        (part, layer - first, layer)
        for part, (first, stop, _, _) in enumerate(layout)
        for layer in range(first, stop)
    ]


def _each_run(runs: _Runs, part: int, act: Callable[[Any], None]) -> None:
    first, stop = runs.of(part)

    def body(k: Any, carry: Any) -> Any:
        act(k)
        return carry

    lax.fori_loop(first, stop, body, 0)


def _move(runs: _Runs, pools: Sequence[Any], packed: Sequence[Any], sems: Any, *, gather: bool) -> None:
    """All copies of a kernel: layer after layer, as many at once as there are semaphores."""
    order = _layers(runs.layout)
    depth = sems.shape[0]

    def copy(turn: int, k: Any) -> Any:
        part, row, layer = order[turn]
        pages, rows = runs.run(k, part)
        ends = (pools[layer].at[pages], packed[part].at[row, rows])
        source, target = ends if gather else ends[::-1]
        return pltpu.make_async_copy(source, target, sems.at[turn % depth])

    for turn in range(len(order)):
        if turn >= depth:
            _wait(runs, order[turn - depth][0], partial(copy, turn - depth))
        _start(runs, order[turn][0], partial(copy, turn))
    for turn in range(max(0, len(order) - depth), len(order)):
        _wait(runs, order[turn][0], partial(copy, turn))


def _start(runs: _Runs, part: int, copy: Callable[[Any], Any]) -> None:
    _each_run(runs, part, lambda k: copy(k).start())


def _wait(runs: _Runs, part: int, copy: Callable[[Any], Any]) -> None:
    """Until every copy of one layer of a part has arrived. The same descriptors say how many bytes that is."""
    _each_run(runs, part, lambda k: copy(k).wait())


def _call(
    kernel: Any, operands: Sequence[Any], out_shape: Any, aliases: dict[int, int], depth: int, **how: Any
) -> list[jax.Array]:
    """One kernel over arrays in HBM, the first operand being the plan in scalar memory."""
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[hbm] * (len(operands) - 1),
        out_specs=[hbm] * len(out_shape),
        scratch_shapes=[pltpu.SemaphoreType.DMA((depth,))],
    )
    call: Any = pl.pallas_call(
        kernel, out_shape=out_shape, grid_spec=grid, input_output_aliases=aliases, **how
    )
    # A list, as pools are: a program that is given a tuple the next time compiles once more.
    return list(call(*operands))


def gather_pages(
    words: jax.Array, pool: Pool, *, layout: Layout, depth: int = DEPTH, interpret: Any = False
) -> Pool:
    """The parts of ``layout``, each (layers, pages, page_size, *tail), packed from the pages that the plan names.

    words: CopyPlan.words, int32 [3·bucket + 2·parts]. pool: a layer each, (num_pages, page_size, *tail), row by row in
    HBM (layout.check_pool). Runs on one device, or inside shard_map on each.
    """
    tail, dtype = pool[0].shape[1:], pool[0].dtype
    shapes = [
        _struct((stop - layer, page_stop - page, *tail), dtype) for layer, stop, page, page_stop in layout
    ]

    def kernel(plan: Any, *refs: Any) -> None:
        pools, packed, sems = refs[: len(pool)], refs[len(pool) : -1], refs[-1]
        _move(_Runs(plan, layout), pools, packed, sems, gather=True)

    return _call(kernel, [words, *pool], shapes, {}, depth, interpret=interpret, name="gather_pages")


def scatter_pages(
    words: jax.Array, pool: Pool, packed: Pool, *, layout: Layout, depth: int = DEPTH, interpret: Any = False
) -> Pool:
    """The pool with the packed parts written into the pages that the plan names, in place when it is donated.

    Shapes as in gather_pages. Pages that the plan does not name keep their content.
    """
    shapes = [_struct(layer.shape, layer.dtype) for layer in pool]
    before = 1 + len(packed)  # operands in front of the pool

    def kernel(plan: Any, *refs: Any) -> None:
        parts, pools, sems = refs[: len(packed)], refs[-1 - len(pool) : -1], refs[-1]
        _move(_Runs(plan, layout), pools, parts, sems, gather=False)

    aliases = {before + i: i for i in range(len(pool))}
    return _call(
        kernel, [words, *packed, *pool], shapes, aliases, depth, interpret=interpret, name="scatter_pages"
    )


class PallasMover:
    """Page mover of a TPU; one serves any number of pools and owners. See mover.PageMover.

    interpret: pltpu.InterpretParams runs the kernels on a CPU, for tests; depth: layers that move at once.
    """

    def __init__(self, *, depth: int = DEPTH, interpret: Any = False) -> None:
        self.compiles: Counter[CompileKey] = Counter()
        how: dict[str, Any] = {"depth": depth, "interpret": interpret}
        self._gather_pages = partial(gather_pages, **how)
        self._scatter_pages = partial(scatter_pages, **how)
        self._programs: dict[tuple[str, Sharding, Layout], Any] = {}

    def gather(self, pools: list[Pool], ids: Ids, parts: Sequence[Part]) -> Pool:
        """As XlaMover.gather; each pool is one kernel. Raises ConfigError for a pool that would be copied."""
        arrays: Pool = []
        for pool, group in by_pool(parts):
            layers = _checked(pools[pool])
            plan = copy_plan(ids, group, keep_reserved=True)
            arrays += self.gather_program(layers[0].sharding, layout_of(group))(plan.words, layers)
        return arrays

    def scatter(
        self, pools: list[Pool], arrays: Sequence[Any], ids: Ids, parts: Sequence[Part]
    ) -> list[Pool]:
        """As XlaMover.scatter; each pool is one kernel. Raises ConfigError for a pool that would be copied."""
        check_arrays(parts, arrays)
        written, rest = list(pools), list(arrays)
        moves = []
        for pool, group in by_pool(parts):
            layers = _checked(pools[pool])
            target = packed_sharding(layers[0].sharding)
            packed = [placed(rest.pop(0), target) for _ in group]
            plan = copy_plan(ids, group, keep_reserved=False)
            moves.append(
                (pool, self.scatter_program(layers[0].sharding, layout_of(group)), plan.words, packed)
            )
        for pool, program, words, packed in moves:  # nothing is written before everything is checked
            written[pool] = program(words, pools[pool], packed)
        return written

    def gather_program(self, sharding: Sharding, layout: Layout) -> Any:
        """jit of (CopyPlan.words, layers) → packed parts, for pools with this sharding."""
        return self._program("gather", sharding, layout, self._gather_pages, packed_sharding(sharding))

    def scatter_program(self, sharding: Sharding, layout: Layout) -> Any:
        """jit of (CopyPlan.words, layers, packed parts) → layers, for pools with this sharding, which are donated."""
        # The pools' own sharding, to the letter: a spec that XLA has normalised would compile the next call anew.
        return self._program("scatter", sharding, layout, self._scatter_pages, sharding)

    def programs(self) -> list[Any]:
        """Every jit that was made so far."""
        return list(self._programs.values())

    def _program(self, name: str, sharding: Sharding, layout: Layout, move: Any, out: Sharding) -> Any:
        key = (name, sharding, layout)
        if key not in self._programs:
            counted = self._counted(name, _on_each(partial(move, layout=layout), sharding, name), layout)
            donated = (1,) if name == "scatter" else ()
            self._programs[key] = jax.jit(counted, donate_argnums=donated, out_shardings=out)
        return self._programs[key]

    def _counted(self, name: str, move: Any, layout: Layout) -> Any:
        """``move``, which counts how often it is traced: once a compile."""

        def traced(words: jax.Array, layers: Pool, *packed: Any) -> Any:
            bucket = max(page_stop for *_, page_stop in layout)
            self.compiles[name, bucket, ((len(layers), layers[0].shape, str(layers[0].dtype)),)] += 1
            return move(words, layers, *packed)

        return traced


def _on_each(move: Any, sharding: Sharding, name: str) -> Any:
    """``move`` on each device's own shard: XLA cannot divide a kernel by itself."""
    if not isinstance(sharding, NamedSharding) or sharding.num_devices == 1:
        return move
    whole, spec, packed = _spec(), sharding.spec, _spec(None, *sharding.spec)
    in_specs, out_specs = ((whole, spec), packed) if name == "gather" else ((whole, spec, packed), spec)
    return jax.shard_map(move, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _checked(layers: Pool) -> Pool:
    # One speaks for all: the layers of a pool are made alike, and each would cost 12 µs of the scheduler's thread.
    check_pool(layers[0])
    return layers
