"""One P or D process for tests: the real side channel and transport, driven by JSON lines on its standard input.

    python peer_process.py prefill p0:1 [PORT_BASE]        python peer_process.py decode d0:1

P answers each "want" frame of a D with the parts that it has registered for it. D's commands: fetch, abandon, drop, counters.
P's: drop, counters. Both: leave. Every line on standard output is one JSON object with "what".
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from pdjax.core.pools import Part
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Packed
from pdjax.engine.jax_transfer.channel import ZmqSideChannel
from pdjax.engine.jax_transfer.process import leave, prepare_process
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine
from pdjax.engine.jax_transfer.verify import checksum
from pdjax.engine.ports import FrameIn, PullDone, Refused, TransportEvent


class Want(msgspec.Struct):
    """D asks for n_parts arrays of random KV. register: False makes P state parts that it never registers."""

    sender: str
    tag: int
    seed: int
    n_parts: int
    part_bytes: int
    register: bool = True


class Ready(msgspec.Struct):
    tag: int
    uuid: int
    address: str
    parts: tuple[Part, ...]
    offered: float  # monotonic seconds, one clock for all processes of the machine


def random_kv(want: Want) -> list[np.ndarray]:
    rng = np.random.default_rng(want.seed)
    shape = (want.part_bytes // 1536, 384)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(want.n_parts)]


class Peer:
    def __init__(self, name: str, port_base: int | None = None) -> None:
        settings = PDSettings()
        self.name = name
        self.engine = JaxTransferKVEngine(settings, verify="all", port_base=port_base)
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.channel = self.make_channel()
        self.engine.start(self._sink)
        threading.Thread(target=self._read, daemon=True).start()

    def make_channel(self) -> ZmqSideChannel:
        raise NotImplementedError

    def _sink(self, event: TransportEvent) -> None:
        self.events.put(event)
        self.channel.wake()

    def _read(self) -> None:
        for line in sys.stdin:
            self.commands.put(json.loads(line))
            self.channel.wake()
        self.commands.put({"cmd": "leave", "code": 3})  # the test is gone
        self.channel.wake()

    def say(self, what: str, **fields: Any) -> None:
        print(json.dumps({"what": what, **fields}), flush=True)

    def run(self) -> None:
        while True:
            self.channel.wait(0.2)
            self.engine.tick()
            for event in self.channel.receive():
                if isinstance(event, Refused):
                    self.say("refused", address=event.address)
                else:
                    self.frame(event)
            while not self.events.empty():
                self.ended(self.events.get())
            while not self.commands.empty():
                command = self.commands.get()
                self.command(command.pop("cmd"), command)

    def command(self, name: str, args: dict[str, Any]) -> None:
        if name == "counters":
            self.say("counters", **self.engine.counters())
        elif name == "drop":
            start = time.monotonic()
            self.engine.drop_peer(args["peer"])
            self.say("dropped", ms=(time.monotonic() - start) * 1e3)
        elif name == "leave":
            self.engine.close(args.get("wait_s", 0.2))
            self.channel.close()
            self.say("leaving")
            leave(args["code"])
        else:
            raise ValueError(name)

    def frame(self, event: FrameIn) -> None:
        raise NotImplementedError

    def ended(self, event: TransportEvent) -> None:
        raise NotImplementedError


class PrefillPeer(Peer):
    next_uuid = 1 << 50

    def make_channel(self) -> ZmqSideChannel:
        return ZmqSideChannel.bind("127.0.0.1")

    def frame(self, event: FrameIn) -> None:
        want = msgspec.msgpack.decode(event.frame, type=Want)
        arrays = [jnp.asarray(kv) for kv in random_kv(want)]
        parts = tuple(
            Part(0, 0, i, i, i + 1, 0, 1, a.shape, "float32", a.nbytes, checksum=checksum(a))
            for i, a in enumerate(arrays)
        )
        self.next_uuid += 1
        address = self.engine.address_for(want.sender)
        offered = time.monotonic()
        if want.register:
            self.engine.offer(want.sender, self.next_uuid, Packed(parts, arrays))
        ready = Ready(want.tag, self.next_uuid, address, parts, offered)
        assert self.channel.send(event.address, msgspec.msgpack.encode(ready))


class DecodePeer(Peer):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.wants: dict[int, tuple[Want, str]] = {}
        self.pulls: dict[int, tuple[Want, Ready]] = {}

    def make_channel(self) -> ZmqSideChannel:
        return ZmqSideChannel.dealer()

    def command(self, name: str, args: dict[str, Any]) -> None:
        if name == "fetch":
            address, peer = args.pop("address"), args.pop("peer")
            want = Want(self.name, **args)
            self.wants[want.tag] = (want, peer)
            assert self.channel.send(address, msgspec.msgpack.encode(want))
        elif name == "abandon":
            for pull_id, (want, _) in self.pulls.items():
                if want.tag == args["tag"]:
                    self.engine.abandon(pull_id)
        else:
            super().command(name, args)

    def frame(self, event: FrameIn) -> None:
        ready = msgspec.msgpack.decode(event.frame, type=Ready)
        want, peer = self.wants[ready.tag]
        pull_id = self.engine.pull(peer, ready.address, ready.uuid, ready.parts)
        self.pulls[pull_id] = (want, ready)
        self.say("pulling", tag=ready.tag)

    def ended(self, event: TransportEvent) -> None:
        now = time.monotonic()
        want, ready = self.pulls.pop(event.pull_id)
        if not isinstance(event, PullDone):
            self.say("settled", tag=want.tag)
            return
        truth = random_kv(want)
        good = [i for i, error in enumerate(event.errors) if error is None]
        right = all(np.array_equal(np.asarray(event.arrays[i]), truth[i]) for i in good)
        errors = sorted({error for error in event.errors if error is not None})
        self.say(
            "done", tag=want.tag, good=len(good), bad=want.n_parts - len(good), right=right, errors=errors,
            offer_to_done_ms=(now - ready.offered) * 1e3, pull_ms=event.seconds * 1e3,
        )  # fmt: skip


if __name__ == "__main__":
    prepare_process()
    peer = {"prefill": PrefillPeer, "decode": DecodePeer}[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
    peer.say("up", address=peer.channel.address)
    peer.run()
