"""A P and a D manager over ports of the test's own, joined by channels in memory; nothing settles by itself."""

from pdjax.core.pools import Fingerprint, KVArgs, PoolTransferSpec, packed_bytes, plan_parts
from pdjax.core.settings import PDSettings
from pdjax.core.trace import EventLog
from pdjax.engine.base import FirstToken, Leg, Packed
from pdjax.engine.manager import KVManager, Ports
from pdjax.engine.ports import Entry, FrameIn, LookupDone, PullSettled

POOL = PoolTransferSpec("kv", "kv", "uint64", (64, 4, 2), 2, 64)
PRINT = Fingerprint(1, "m", "w", "uint64", 4, 2, 1, 1, "flat", "single", 0, 1, "j")
SECONDS = 1_700_000_000


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Channel:
    """Frames to the channel whose name is the address; a D's frames come from the D's own name."""

    def __init__(self, wires, name, address=None):
        self.wires, self.name, self.address = wires, name, address
        self.inbox, self.sent_bytes, self.forgotten = [], [], []
        wires[address or name] = self

    def send(self, address, frame):
        self.sent_bytes.append(len(frame))
        other = self.wires.get(address)
        if other is not None:
            other.inbox.append(FrameIn(self.address or self.name, frame))
        return other is not None

    def receive(self):
        got, self.inbox = self.inbox, []
        return got

    def wake(self):
        pass

    def forget(self, address):
        self.forgotten.append(address)

    def close(self):
        pass


class Transport:
    """Nothing settles by itself."""

    def __init__(self):
        self.offers, self.pulls, self.dropped = {}, {}, []

    def start(self, sink):
        self.sink = sink

    def offer(self, peer, uuid, packed):
        self.offers[uuid] = peer

    def address_for(self, peer):
        return "127.0.0.1:1"

    def withdraw(self, peer, uuid, life_s):
        self.offers.pop(uuid, None)

    def pull(self, peer, address, uuid, parts):
        self.pulls[len(self.pulls) + 1] = (peer, parts)
        return len(self.pulls)

    def abandon(self, pull_id):
        pass

    def drop_peer(self, peer):
        self.dropped.append(peer)
        for pull_id, (owner, _) in self.pulls.items():
            if owner == peer:
                self.sink(PullSettled(pull_id))

    def tick(self):
        pass

    def close(self, wait_s):
        pass


class Registry:
    def __init__(self):
        self.entries, self.rejected = (), {}

    def start(self, sink):
        self.sink = sink

    def lookup(self, tag, host, port):
        self.sink(LookupDone(tag, tuple(self.entries), self.rejected, None))

    def close(self):
        pass


class Runner:
    slots = ()  # that hand-offs were staged in, in their order

    def gather(self, pages, slot=None):
        parts = plan_parts([POOL], len(pages))
        self.slots = (*self.slots, slot)
        return Packed(parts, [object()] * len(parts))


class World:
    def __init__(self, budget_bytes=1 << 30, **settings):
        self.clock, self.wires, self.epochs, self.budget_bytes = Clock(), {}, 0, budget_bytes
        self.log_lines = []  # of every manager's event log
        self.settings = PDSettings(**settings)
        self.p = self.manager("prefill", "p0", "127.0.0.1:7")

    def manager(self, role, name, address=None):
        self.epochs += 1
        ports = Ports(Transport(), Channel(self.wires, name, address), Registry(), self.clock)
        manager = KVManager(
            KVArgs([POOL], 4, PRINT, name),
            "",
            role=role,
            settings=self.settings,
            ports=ports,
            epoch=(SECONDS + self.epochs) << 32,
            budget_bytes=self.budget_bytes,
            log=EventLog(name, (SECONDS + self.epochs) << 32, self.clock, len, self.log_lines.append),
        )
        manager.register_runner(Runner())
        if role == "decode":
            ports.registry.entries = [Entry("p0", self.p.epoch, "127.0.0.1:7", "")]
        return manager

    def run(self, *managers, seconds=0.5, step_s=0.05):
        for _ in range(round(seconds / step_s)):
            for m in managers:
                m.turn()
            self.clock.now += step_s

    def offer(self, room, n_pages=1):
        """P's half up to kv_ready, as its scheduler does it."""
        self.p.claim(leg(room, 4 * n_pages))
        sender = self.p.create_sender(room)
        assert sender.admit(packed_bytes([POOL], n_pages))
        self.offer_admitted(sender, n_pages)

    def offer_admitted(self, sender, n_pages=1):
        assert sender.send(list(range(1, n_pages + 1)), FirstToken(7))


def leg(room, n_prompt=4):
    return Leg(room, f"r{room}", "digest", n_prompt, "p", None)
