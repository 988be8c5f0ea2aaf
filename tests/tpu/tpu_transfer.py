"""``jax.experimental.transfer`` between two processes, on one host or on two: the right bytes, and how fast.

One process offers (``serve_offers``), the other asks it over a plain socket and pulls: the engine's own transport does both,
with every part checksummed. The socket speaks JSON lines to whoever connects: only for a network that you trust.
"""

from __future__ import annotations

import json
import queue
import socket
import time
from typing import Any

import jax
import msgspec
import numpy as np
from tpu_bench import Bench
from tpu_hardware import describe

from pdjax.core.budget import Slot
from pdjax.core.errors import ConfigError
from pdjax.core.pools import Part
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Packed
from pdjax.engine.jax_transfer.addresses import join, split
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine
from pdjax.engine.kernels.checksum import checksum
from pdjax.engine.kernels.host_staging import HostStage
from pdjax.engine.ports import PullDone, TransportEvent

PART_BYTES = 1 << 20
TICK_S = 0.25
PULL_TIMEOUT_S = 120.0
PEER_D, PEER_P = "suite-d:1", "suite-p:1"


def parts_of(n_bytes: int) -> tuple[Part, ...]:
    """float32 parts of at most PART_BYTES, as the parts of a hand-off are."""
    sizes = [PART_BYTES] * (n_bytes // PART_BYTES) or [n_bytes]
    return tuple(Part(0, 0, i, i, i + 1, 0, 1, (1, 1, n // 4), "float32", n) for i, n in enumerate(sizes))


# ---------------------------------------------------------------- P


class Offers:
    """P's half: makes arrays, on the device or in a slot of host memory, and offers them."""

    def __init__(self, host: str) -> None:
        settings = PDSettings()
        self._withdrawn_life_s = settings.withdrawn_life_s
        self._engine = JaxTransferKVEngine(settings, host=host)
        self._engine.start(lambda event: None)
        self._stage = HostStage(jax.local_devices()[0])
        self._slots: dict[int, Slot] = {}
        self._uuid = 0

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """One request of D's: "describe", "offer" (bytes, staged) or "withdraw" (uuid)."""
        self._engine.tick()
        if ask["do"] == "describe":
            return {"hardware": json.loads(describe())}
        if ask["do"] == "withdraw":
            self._engine.withdraw(PEER_D, ask["uuid"], self._withdrawn_life_s)
            return {}
        self._uuid += 1
        packed = self._packed(ask["bytes"], ask["staged"])
        self._engine.offer(PEER_D, self._uuid, packed)
        parts = msgspec.to_builtins(packed.parts)
        return {"uuid": self._uuid, "address": self._engine.address_for(PEER_D), "parts": parts}

    def _packed(self, n_bytes: int, staged: bool) -> Packed:
        parts, rng = parts_of(n_bytes), np.random.default_rng(self._uuid)
        content = [rng.standard_normal(part.shape, np.float32) for part in parts]
        arrays = [jax.device_put(values) for values in content]
        if staged:
            slot = self._slots.setdefault(n_bytes, Slot(len(self._slots) + 1, n_bytes))
            arrays = self._stage.copy(arrays, parts, slot)
        stated = tuple(
            msgspec.structs.replace(part, checksum=checksum(values))
            for part, values in zip(parts, content, strict=True)
        )
        return Packed(stated, arrays)

    def close(self) -> None:
        self._engine.close(1.0)


def _listen(where: str) -> socket.socket:
    """Raises ConfigError for what is no "ip:port" of this host."""
    ip, colon, port = where.rpartition(":")
    try:
        # split knows only ports that one can dial.
        ip, number = split(f"{ip}:1" if colon and port == "0" else where)
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        return socket.create_server((ip, 0 if port == "0" else number), family=family)
    except ValueError as error:
        raise ConfigError(f"--offer: {error}") from None
    except OSError as error:
        raise ConfigError(f"--offer {where}: {error.strerror}") from None


def serve_offers(where: str) -> None:
    """Answer one D after the other at "ip:port" (port 0: the kernel chooses; a line of stdout tells it) until one says bye.

    Raises ConfigError.
    """
    with _listen(where) as server:
        ip, port = server.getsockname()[:2]
        offers = Offers(ip)
        print(json.dumps({"listens": join(ip, port)}), flush=True)
        while _serve_one(server, offers):
            pass
    offers.close()


def _serve_one(server: socket.socket, offers: Offers) -> bool:
    connection, _ = server.accept()
    with connection, connection.makefile("rwb") as lines:
        for line in lines:
            ask = json.loads(line)
            if ask["do"] == "bye":
                return False
            lines.write(json.dumps(offers.answer(ask)).encode() + b"\n")
            lines.flush()
    return True


# ---------------------------------------------------------------- D


class Asker:
    """D's half: asks P for offers and pulls them."""

    def __init__(self, peer: str) -> None:
        self._socket = socket.create_connection(split(peer), timeout=PULL_TIMEOUT_S)
        self._lines = self._socket.makefile("rwb")
        self._events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self._engine = JaxTransferKVEngine(PDSettings(), host=self._socket.getsockname()[0])
        self._engine.start(self._events.put)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self._lines.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self._lines.flush()
        answer: dict[str, Any] = json.loads(self._lines.readline() or b"{}")
        return answer

    def pull(self, n_bytes: int, *, staged: bool) -> float:
        """Seconds of one pull of so many bytes, every part of it verified. Raises AssertionError for a wrong or late part."""
        offer = self.ask("offer", bytes=n_bytes, staged=staged)
        parts = msgspec.convert(offer["parts"], tuple[Part, ...])
        self._engine.pull(PEER_P, offer["address"], offer["uuid"], parts)
        done = self._await()
        wrong = [f"part {i}: {error}" for i, error in enumerate(done.errors) if error is not None]
        assert not wrong, f"{len(wrong)} of {len(parts)} parts are wrong, the first is {wrong[0]}"
        self.ask("withdraw", uuid=offer["uuid"])
        return done.seconds

    def _await(self) -> PullDone:
        deadline = time.monotonic() + PULL_TIMEOUT_S
        while time.monotonic() < deadline:
            self._engine.tick()
            try:
                event = self._events.get(timeout=TICK_S)
            except queue.Empty:
                continue
            assert isinstance(event, PullDone)
            return event
        raise AssertionError(f"no pull ended within {PULL_TIMEOUT_S:g} s")

    def close(self) -> None:
        self._lines.write(b'{"do": "bye"}\n')
        self._lines.flush()
        self._engine.close(1.0)
        self._socket.close()


def rate(bench: Bench) -> None:
    """Pulls of several sizes, from the peer's device and from its host slots."""
    asker = Asker(bench.peer)
    try:
        kind = asker.ask("describe")["hardware"]["kind"]
        assert kind == bench.hardware.kind, f"the other process has {kind}, this one {bench.hardware.kind}"
        for staged in (False, True):
            source = "host slot" if staged else "device"
            for n_bytes in bench.sizes.transfer_bytes:
                took = sorted(asker.pull(n_bytes, staged=staged) for _ in range(bench.sizes.rounds))
                median_s = took[len(took) // 2]
                name = f"{n_bytes >> 10} KiB from the {source}"
                bench.figure(f"{name}: time", median_s * 1e3, "ms")
                bench.figure(f"{name}: rate", n_bytes / median_s / 1e9, "GB/s")
    finally:
        asker.close()
