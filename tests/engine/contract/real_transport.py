"""The real transport in one process, P and D side by side, for the contract and for other tests of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from contract.transport_contract import TransportPair
from pdjax.core.pools import Part
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Packed
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine
from pdjax.engine.kernels.checksum import Verify, checksum
from pdjax.engine.ports import TransportEvent

BOUND_S = 30.0


def packed_arrays(seed: int, shapes: Sequence[tuple[int, ...]], dtype: str = "float32") -> Packed:
    rng = np.random.default_rng([seed, len(shapes)])
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype=dtype) for shape in shapes]
    parts = tuple(
        Part(0, 0, i, i, i + 1, 0, 1, a.shape, str(a.dtype), a.nbytes, checksum=checksum(a))
        for i, a in enumerate(arrays)
    )
    return Packed(parts, arrays)


class RealPair(TransportPair):
    def __init__(
        self,
        verify: Verify = "all",
        settings: PDSettings | None = None,
        engine: JaxTransferKVEngine | None = None,
    ) -> None:
        settings = settings or PDSettings()
        self.p = engine or JaxTransferKVEngine(settings)
        self.d = JaxTransferKVEngine(settings, verify=verify)
        self.events: list[TransportEvent] = []
        self._arrived = threading.Event()
        self.p.start(self._unexpected)
        self.d.start(self._sink)

    def _unexpected(self, event: TransportEvent) -> None:
        raise AssertionError(f"P pulls nothing: {event}")

    def _sink(self, event: TransportEvent) -> None:
        self.events.append(event)
        self._arrived.set()

    def arrays(self, seed: int, shapes: Sequence[tuple[int, ...]]) -> Packed:
        return packed_arrays(seed, shapes)

    def equal(self, array: object, packed: Packed, index: int) -> bool:
        return np.array_equal(np.asarray(array), np.asarray(packed.arrays[index]))

    def settle(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not until():
            assert time.monotonic() < deadline, f"nothing in {BOUND_S} s; events so far: {self.events}"
            self._arrived.wait(0.05)
            self._arrived.clear()

    def idle(self) -> None:
        """Long enough for a prompt error (about 1 ms here) even on a loaded machine."""
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            self.p.tick()
            self._arrived.wait(0.05)
            self._arrived.clear()

    def close(self) -> None:
        self.d.close(0.0)
        self.p.close(0.0)


def free_base(n_ports: int) -> int:
    """The first of n_ports free ports in a row, below the kernel's ephemeral ones."""
    for base in range(20000, 32000, 100):
        held = []
        try:
            for port in range(base, base + n_ports):
                held.append(socket.socket())
                held[-1].bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
        finally:
            for sock in held:
                sock.close()
    raise AssertionError("no free ports in a row")
