"""One P or one D with everything real but the HTTP layer and the model: manager, transport, side channel, registry.

The pools are those of the facts (30 layers × [pages, 16, 384] float32). ``Half`` is driven by one thread that plays the
scheduler: it sleeps until the manager wakes it, as a node's scheduler thread does. Must never be used by two threads.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdjax.core.identity import make_epoch
from pdjax.core.pools import KVArgs, plan_parts
from pdjax.core.settings import PDSettings
from pdjax.core.wire import PROTOCOL_VERSION
from pdjax.engine.base import KVEvent, Leg, Packed
from pdjax.engine.bootstrap.client import HttpRegistryClient
from pdjax.engine.bootstrap.registration import registration
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.jax_transfer.manager import JaxTransferKVManager
from pdjax.engine.jax_transfer.servers import TRANSFER_SIZE, TRANSPORT_ADDRESSES
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine
from pdjax.engine.kernels.checksum import Verify
from pdjax.engine.manager import Ports
from pdjax.model.checkpoint import load_model
from pdjax.model.runner import JaxRunner
from pdjax.model.settings import RunnerSettings
from pdjax.model.tiny import make_tiny_model

LAYERS = 30
PAGE_SIZE = 16  # tokens
KV_WIDTH = 384  # float32 a token and layer
PAGE_BYTES = LAYERS * PAGE_SIZE * KV_WIDTH * 4
HOST = "127.0.0.1"
WAIT_S = 60.0


def make_runner(num_pages: int, verify: Verify) -> JaxRunner:
    """Pools of the facts' shape around a model whose weights are next to nothing."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(
            Path(directory),
            num_hidden_layers=LAYERS,
            num_key_value_heads=3,
            num_attention_heads=3,
            head_dim=64,
        )
        return JaxRunner(
            load_model(model, dtype=np.float32),
            RunnerSettings(
                num_pages=num_pages, page_size=PAGE_SIZE, max_batch=2, chunk_tokens=PAGE_SIZE, verify=verify
            ),
        )


@dataclass
class Half:
    """role: prefill or decode. runner: whose pages are moved."""

    role: str
    name: str
    bootstrap_port: int
    runner: JaxRunner
    verify: Verify

    def __post_init__(self) -> None:
        settings = PDSettings()
        epoch = make_epoch(time.time(), secrets.randbits(32))
        prints = self.runner.fingerprint(
            protocol=PROTOCOL_VERSION, transfer_size=TRANSFER_SIZE, transport_addresses=TRANSPORT_ADDRESSES
        )
        args = KVArgs(list(self.runner.pools), PAGE_SIZE, prints, self.name, f"http://{HOST}:1")
        channel = ZmqSideChannel.bind(HOST) if self.role == "prefill" else ZmqSideChannel.dealer()
        registry = HttpRegistryClient(HOST, self.bootstrap_port, fingerprint=prints)
        self.woken = threading.Event()
        self.manager = JaxTransferKVManager(
            args,
            f"{HOST}:{self.bootstrap_port}",
            role=self.role,
            settings=settings,
            ports=Ports(JaxTransferKVEngine(settings, verify=self.verify), channel, registry, time.monotonic),
            epoch=epoch,
            budget_bytes=1 << 40,
            on_event=self.woken.set,
        )
        self.manager.register_runner(self.runner)
        self.manager.start()
        registry.announce(registration(args, self.role, epoch, zmq_addr=channel.address or ""))

    def claim(self, room: int, n_pages: int) -> None:
        self.manager.claim(Leg(room, f"r{room}", "d", n_pages * PAGE_SIZE, HOST, self.bootstrap_port))

    def events(self) -> list[KVEvent]:
        """The manager's next events; sleeps until there are some."""
        while not (events := self.manager.take_events()):
            if not self.woken.wait(WAIT_S):
                raise TimeoutError(f"{self.role}: nothing has happened for {WAIT_S:g} s")
            self.woken.clear()
        return events

    def await_free(self) -> None:
        """Until the last hand-off is acknowledged and nothing of it is held."""
        deadline = time.monotonic() + WAIT_S
        while any(self.manager.quiescent().values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.role} still holds {self.manager.quiescent()}")
            time.sleep(0.0005)

    def fill(self, pages: list[int], seed: int) -> None:
        """Random content in these pages, all layers."""
        parts = plan_parts(self.runner.pools, len(pages))
        rng = np.random.default_rng(seed)
        arrays = [rng.standard_normal(part.shape, dtype=np.float32) for part in parts]
        self.runner.scatter(pages, Packed(parts, arrays))

    def stop(self) -> None:
        self.manager.stop(1.0)
