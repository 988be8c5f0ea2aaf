"""Programs made by the real TPU compiler on a machine without a TPU, and what to look for in them.

libtpu compiles for a named topology; nothing is executed. Measured in facts/kernels: the environment below keeps it
silent and lets several processes load it at once.
"""

import importlib.util
import os
import re
from contextlib import contextmanager
from functools import cache

import jax
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

GENERATIONS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
HLO_NAMES = {"bfloat16": "bf16", "float32": "f32", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}
MOVES = {"copy", "copy-start", "copy-done", "transpose"}  # what XLA inserts to change a layout
# A pool may come in, go through a kernel, and go out.
KERNEL_MAY = {"parameter", "custom-call", "get-tuple-element", "tuple"}


@cache
def devices(generation: str) -> list[jax.Device]:
    """Devices of a topology that exists only for the compiler. Fails in CI, and skips elsewhere, without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        reason = "libtpu is not installed: pip install -e '.[tpu]'"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(GENERATIONS[generation], platform="tpu").devices)


def compiled(lowered):
    """The program as the TPU compiler makes it, never from JAX's cache: that keeps it and cannot read it without a TPU."""
    with uncached():
        return lowered.compile()


@contextmanager
def uncached():
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # which else remembers that it is enabled
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def one_device(generation: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(devices(generation)[0])


def struct(shape, dtype, sharding):
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def instructions(hlo: str):
    """(operation, type of its result) of every instruction of a module."""
    for line in hlo.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if found:
            yield found[2], found[1]


def results_of_shape(hlo: str, shape, dtype: str) -> list[str]:
    """Operations whose result is, or contains, an array of this shape, but for those that only pass it on."""
    name = f"{HLO_NAMES[dtype]}[{','.join(map(str, shape))}]"
    return [operation for operation, result in instructions(hlo) if name in result]


def strangers(hlo: str, shape, dtype: str) -> list[str]:
    """What makes or copies a pool beside a kernel that works in place: nothing, if all is well."""
    return [name for name in results_of_shape(hlo, shape, dtype) if name not in KERNEL_MAY]


def relayouts(hlo: str, shape, dtype: str) -> list[str]:
    """Copies and transposes of a whole pool."""
    return [name for name in results_of_shape(hlo, shape, dtype) if name in MOVES]
