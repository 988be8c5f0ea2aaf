"""The copy into host slots, compiled by the real TPU compiler: in place, and without a second copy on either side."""

import jax
import numpy as np
import pytest
from aot_programs import GENERATIONS, compiled, devices, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.core.pools import PoolTransferSpec, packed_bytes, plan_parts
from pdjax.engine.kernels.host_staging import HOST_KIND, HostStage

POOL = PoolTransferSpec("kv", "kv", "bfloat16", (4096, 16, 2048), 28, 64 << 10)
N_PAGES = 256


def placed(device, **memory):
    """Of one device, by name: a sharding without a mesh does not say in an array's type that it lies on the host."""
    return NamedSharding(Mesh(np.array([device]), ("chip",)), PartitionSpec(), **memory)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_28_layers_go_into_a_slot_in_place(generation):
    device = devices(generation)[0]
    parts = plan_parts([POOL], N_PAGES)
    slot = [struct(part.shape, part.dtype, placed(device, memory_kind=HOST_KIND)) for part in parts]
    packed = [struct(part.shape, part.dtype, placed(device)) for part in parts]
    memory = compiled(HostStage(device)._copy.lower(slot, packed)).memory_analysis()
    n_bytes = packed_bytes([POOL], N_PAGES)
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes == n_bytes
    assert (memory.host_temp_size_in_bytes, memory.temp_size_in_bytes) == (0, 0)


def test_a_copy_into_memory_that_is_not_donated_would_allocate():
    """The negative control of the check above."""
    device = devices("v5e")[0]
    parts = plan_parts([POOL], N_PAGES)
    packed = [struct(part.shape, part.dtype, placed(device)) for part in parts]
    move = jax.jit(lambda arrays: [jax.device_put(a, jax.memory.Space.Host) for a in arrays])
    memory = compiled(move.lower(packed)).memory_analysis()
    assert memory.host_alias_size_in_bytes == 0
    assert memory.host_output_size_in_bytes == packed_bytes([POOL], N_PAGES)
