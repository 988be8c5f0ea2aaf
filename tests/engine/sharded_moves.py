"""Run by test_kernels_sharded in a process of its own, which has four devices: moves of a pool that is spread over them.

Prints one line for each case that was right, and ends with an error at the first that was not.
"""

import itertools

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.core.pools import PoolTransferSpec, plan_parts
from pdjax.engine.kernels.pallas import PallasMover
from pdjax.engine.kernels.plan import gather_ids, scatter_ids
from pdjax.engine.kernels.xla import XlaMover

NUM_PAGES, LAYERS, DEVICES = 8, 2, 4
TAILS = {"flat": (8, 512), "heads": (8, 8, 128)}
SOURCE, TARGET = [2, 3, 6], [5, 1, 4]


def main() -> None:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("tp",))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
    rng = np.random.default_rng(1)
    movers = {
        f"pallas {mode}": PallasMover(
            interpret=pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, vector_clock_size=128)
        )
        for mode in ("eager", "on_wait")
    }
    for (name, mover), (tail, shape) in itertools.product(
        {**movers, "xla": XlaMover("cpu")}.items(), TAILS.items()
    ):
        full = (NUM_PAGES, *shape)
        spec = PoolTransferSpec("kv", "kv", "float32", full, LAYERS, int(np.prod(shape)) * 4)
        before, after = (rng.standard_normal((LAYERS, *full), np.float32) for _ in range(2))
        source, target = ([jax.device_put(layer, sharding) for layer in pool] for pool in (before, after))
        parts = plan_parts([spec], len(SOURCE))
        packed = mover.gather([source], gather_ids(SOURCE, NUM_PAGES), parts)
        for _ in range(2):  # the second call has the pools that the first returned
            [target] = mover.scatter([target], packed, scatter_ids(TARGET, NUM_PAGES), parts)
        assert all(layer.sharding == sharding for layer in target), "the pool has moved"
        after[:, TARGET] = before[:, SOURCE]
        assert np.array_equal(after, np.stack([np.asarray(layer) for layer in target])), (name, tail)
        assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found
        print("right:", name, tail, flush=True)
    for mover in movers.values():
        compiles = mover.compiles
        assert set(compiles.values()) == {1}, compiles
        assert sum(program._cache_size() for program in mover.programs()) == len(compiles)


if __name__ == "__main__":
    main()
