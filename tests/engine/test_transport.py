"""The transport contract on the real transfer library, and what only the real one has."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from contract.transport_contract import TransportContract, TransportPair

from pdjax.core.errors import ConfigError, PDError
from pdjax.core.pools import Part
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Packed
from pdjax.engine.jax_transfer import servers
from pdjax.engine.jax_transfer.addresses import host_address, split
from pdjax.engine.jax_transfer.ports_guard import PortRange
from pdjax.engine.jax_transfer.process import prepare_process
from pdjax.engine.jax_transfer.registrations import Registrations
from pdjax.engine.jax_transfer.servers import ServerPool
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine
from pdjax.engine.jax_transfer.verify import Verify, checksum
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


@pytest.fixture
def pair():
    pair = RealPair()
    yield pair
    pair.close()


class TestJaxTransfer(TransportContract):
    @pytest.fixture
    def pair(self):
        pair = RealPair()
        yield pair
        pair.close()


# ---------------------------------------------------------------- verification


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_every_dtype_of_a_pool_is_verified(pair, dtype):
    uuid, packed = pair.uuid(), packed_arrays(1, [(3, 7), (1, 5, 16)], dtype)
    pair.p.offer("d0", uuid, packed)
    event = pair.done(pair.pull(uuid, packed.parts))
    assert event.errors == (None, None)
    assert [np.asarray(a).tobytes() for a in event.arrays] == [np.asarray(a).tobytes() for a in packed.arrays]
    assert [str(a.dtype) for a in event.arrays] == [dtype] * 2


def test_a_part_of_many_chunks_cut_short_is_found_by_its_checksum(pair):
    """A smaller destination of a source over transfer_size is a silent success of the library."""
    uuid, packed = pair.uuid(), packed_arrays(2, [(3, 1 << 20)])  # 12 MiB, three chunks
    pair.p.offer("d0", uuid, packed)
    short = msgspec.structs.replace(packed.parts[0], shape=(2, 1 << 20), nbytes=8 << 20)
    pair.assert_all_failed(pair.pull(uuid, [short]), 1)


@pytest.mark.parametrize(("check", "n_wrong"), [("off", 0), ("sampled", 2), ("all", 16)])
def test_verify_chooses_which_checksums_are_compared(check, n_wrong):
    pair = RealPair(verify=check)
    try:
        uuid, packed = pair.uuid(), packed_arrays(3, [(2, 4)] * 16)
        pair.p.offer("d0", uuid, packed)
        parts = [msgspec.structs.replace(p, checksum=p.checksum ^ 1) for p in packed.parts]
        event = pair.done(pair.pull(uuid, parts))
        assert sum(error is not None for error in event.errors) == n_wrong
        assert pair.d.counters()["failed_parts"] == n_wrong
    finally:
        pair.close()


def test_parts_without_checksums_are_counted(pair):
    uuid, packed = pair.uuid(), packed_arrays(4, [(2, 4)] * 3)
    pair.p.offer("d0", uuid, packed)
    parts = [msgspec.structs.replace(p, checksum=0) for p in packed.parts]
    assert pair.done(pair.pull(uuid, parts)).errors == (None,) * 3
    assert pair.d.counters()["unverified_parts"] == 3


def test_a_deleted_array_is_refused_and_not_registered(pair):
    packed = packed_arrays(5, [(2, 4)])
    packed.arrays[0].delete()
    with pytest.raises(ValueError, match="deleted"):
        pair.p.offer("d0", pair.uuid(), packed)
    pair.assert_healthy()


# ---------------------------------------------------------------- memory and bounds


def watched_array(n_bytes: int) -> tuple[Packed, weakref.ref[np.ndarray]]:
    """A registered-to-be array over numpy's memory. The reference dies when the library lets go of the buffer."""
    room = np.ones(n_bytes + 64, np.uint8)
    skip = -room.ctypes.data % 64  # XLA borrows only what is aligned
    view = room[skip : skip + n_bytes]
    array = jnp.from_dlpack(view)
    assert array.unsafe_buffer_pointer() == view.ctypes.data
    part = Part(0, 0, 0, 0, 1, 0, 1, (n_bytes,), "uint8", n_bytes, checksum=checksum(array))
    return Packed((part,), [array]), weakref.ref(view)


@pytest.mark.parametrize("how", ["withdraw", "drop_peer", "pull", "expiry", "close"])
def test_the_bytes_that_the_library_holds_are_freed_by(how):
    life_s = 0.2 if how == "expiry" else 300.0
    pair = RealPair(settings=PDSettings(request_timeout_s=life_s, answer_bound_s=0.1))
    try:
        uuid, (packed, held) = pair.uuid(), watched_array(4096)
        parts = packed.parts
        pair.p.offer("d0", uuid, packed)
        del packed
        gc.collect()
        assert held() is not None, "the library keeps its own reference"
        assert pair.p.counters()["registered_bytes"] == 4096
        if how == "withdraw":
            pair.p.withdraw("d0", uuid, 60.0)
        elif how == "drop_peer":
            pair.p.drop_peer("d0")
        elif how == "pull":
            assert pair.done(pair.pull(uuid, parts)).errors == (None,)
        elif how == "close":
            pair.p.close(0.0)
        pair.settle(lambda: pair.p.tick() or held() is None)
        assert pair.p.counters()["registered_bytes"] == (4096 if how == "pull" else 0)
    finally:
        pair.close()


def test_an_offer_that_nobody_ends_expires_by_the_tick():
    settings = PDSettings(request_timeout_s=0.2, answer_bound_s=0.1)
    p = JaxTransferKVEngine(settings)
    try:
        p.offer("d0", 7, packed_arrays(7, [(2, 4)]))
        deadline = time.monotonic() + BOUND_S
        while p.counters()["expired"] == 0:
            assert time.monotonic() < deadline
            p.tick()
        assert p.counters()["registered_bytes"] == 0
        with pytest.raises(ValueError):
            p.offer("d0", 7, packed_arrays(7, [(2, 4)]))
    finally:
        p.close(0.0)


class TestRegistrationTable:
    """The table alone, on a clock of its own."""

    @pytest.fixture
    def now(self):
        return [0.0]

    @pytest.fixture
    def table(self, now):
        pool = ServerPool(host_address("127.0.0.1"), 4, jax.local_devices()[0])
        table = Registrations(pool, life_s=100.0, max_seen=3, clock=lambda: now[0])
        yield table
        table.close()
        table.dispose()

    def test_a_withdrawal_moves_the_deadline_and_only_an_offer_counts_as_expired(self, table, now):
        packed = packed_arrays(1, [(2, 4)])
        table.offer("d0", 1, packed)
        table.offer("d0", 2, packed)
        now[0] = 50.0
        for _ in range(1000):
            table.withdraw("d0", 1, 100.0)
        assert len(table._deadlines) == 2
        now[0] = 100.0
        table.tick()
        assert (list(table._entries), table.counters.expired) == ([1], 1)
        now[0] = 150.0
        table.tick()
        assert (list(table._entries), table.counters.expired, table._deadlines) == ([], 1, [])
        assert table.counters.withdrawn == 1

    def test_remembered_uuids_are_bounded_oldest_first(self, table):
        packed = packed_arrays(1, [(2, 4)])
        for uuid in (1, 2, 3, 4):
            table.offer("d0", uuid, packed)
        for uuid in (2, 3, 4):
            with pytest.raises(ValueError):
                table.offer("d0", uuid, packed)
        assert len(table._seen) == 3

    def test_a_uuid_that_was_never_offered_takes_no_memory(self, table):
        table.address_for("d0")
        table.withdraw("d0", 9, 100.0)
        assert table._entries == {}
        assert table._deadlines == []

    def test_a_dropped_peer_leaves_no_entries(self, table):
        packed = packed_arrays(1, [(2, 4)])
        for peer, uuid in (("d0", 1), ("d0", 2), ("d1", 3)):
            table.offer(peer, uuid, packed)
        table.drop_peer("d0")
        assert list(table._entries) == [3]
        assert table.counters.registered_bytes == packed.parts[0].nbytes


def test_pulled_and_failed_arrays_are_not_kept_by_the_engine(pair):
    uuid, packed = pair.uuid(), packed_arrays(8, [(1 << 18,)] * 4)
    pair.p.offer("d0", uuid, packed)
    event = pair.done(pair.pull(uuid, packed.parts))
    refs = [weakref.ref(array) for array in event.arrays]
    pair.events.clear()
    del event
    pair.settle(lambda: not any(ref() for ref in refs))


def test_the_number_of_peers_is_bounded_on_both_sides():
    pair = RealPair(settings=PDSettings(max_peers=2))
    try:
        packed = packed_arrays(9, [(2, 4)])
        for at in ("d0", "d1"):
            pair.p.address_for(at)
        for call in (lambda: pair.p.address_for("d2"), lambda: pair.p.offer("d2", pair.uuid(), packed)):
            with pytest.raises(PDError, match="max-peers"):
                call()
        for peer in ("p0", "p1"):
            pair.pull(pair.uuid(), packed.parts, peer=peer)
        refused = pair.assert_all_failed(pair.pull(pair.uuid(), packed.parts, peer="p2"), 1)
        assert "max-peers" in refused.errors[0]
        pair.d.drop_peer("p0")
        pair.p.drop_peer("d0")
        pair.assert_healthy(at="d3", peer="p3")
    finally:
        pair.close()


def test_a_server_dropped_at_once_is_disposed_of_later(pair, monkeypatch):
    """In its first moments it would leak its listening socket (facts/peer-servers §1)."""
    ip, port = split(pair.p.address_for("d0"))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((ip, port)) == 0

    with monkeypatch.context() as patch:
        patch.setattr(servers, "MIN_LIFE_S", 3600.0)
        pair.p.drop_peer("d0")
        pair.p.tick()
        pair.idle()
        assert listens()
    pair.settle(lambda: pair.p.tick() or not listens())


def test_servers_made_and_dropped_leave_no_descriptors(pair):

    def cycle() -> None:
        pair.p.address_for("d9")
        pair.p.drop_peer("d9")

    def descriptors() -> int:
        pair.p.tick()
        return len(os.listdir("/proc/self/fd"))

    cycle()
    before = descriptors()
    for _ in range(60):
        cycle()
    pair.settle(lambda: descriptors() <= before)


# ---------------------------------------------------------------- connections, threads, counters


def test_a_new_address_of_the_same_peer_gets_a_new_connection(pair):
    """P dropped its server for this D (say, its lease ended) and serves it again on another."""
    pair.assert_healthy()
    pair.p.drop_peer("d0")
    pair.assert_healthy()
    assert pair.d.counters()["reconnects"] == 1


def test_a_dropped_peer_gets_a_new_server_and_connection(pair):
    pair.assert_healthy()
    assert pair.d.counters()["pulling_peers"] == 1
    pair.d.drop_peer("p0")
    assert pair.d.counters()["pulling_peers"] == 0
    pair.assert_healthy()
    assert pair.d.counters()["pulling_peers"] == 1
    pair.p.drop_peer("d0")
    assert pair.p.counters()["serving_peers"] == 0


def test_close_of_p_tells_a_connected_d_at_once(pair):
    uuid, packed = pair.uuid(), packed_arrays(1, [(2, 4)] * 3)
    pair.assert_healthy()
    pair.p.offer("d0", uuid, packed)
    address = pair.p.address_for("d0")
    pair.p.close(0.0)
    pair.assert_all_failed(pair.d.pull("p0", address, uuid, packed.parts), 3)


def test_a_sink_that_fails_does_not_stop_the_poller():
    seen = []

    def sink(event) -> None:
        seen.append(event)
        raise RuntimeError("sink")

    d = JaxTransferKVEngine(PDSettings())
    d.start(sink)
    try:
        for n in (1, 2):
            d.pull("p0", "nonsense", n, packed_arrays(1, [(2, 4)]).parts)
            deadline = time.monotonic() + BOUND_S
            while len(seen) < n or d.counters()["sink_errors"] < n:
                assert time.monotonic() < deadline
    finally:
        d.close(0.0)


def test_the_poller_sleeps_when_nothing_is_outstanding_and_stops_at_close(pair):
    names = [t.name for t in threading.enumerate()]
    assert names.count("pdjax-transfer-poll") == 2
    assert all(t.daemon for t in threading.enumerate() if t.name == "pdjax-transfer-poll")
    pair.assert_healthy()
    pair.close()
    assert "pdjax-transfer-poll" not in [t.name for t in threading.enumerate()]


def test_close_waits_for_a_pull_in_flight(pair):
    uuid, packed = pair.uuid(), packed_arrays(10, [(1 << 20,)] * 16)
    pair.p.offer("d0", uuid, packed)
    pull_id = pair.pull(uuid, packed.parts)
    pair.d.close(BOUND_S)
    pair.assert_right(pull_id, packed)


def test_a_closed_transport_refuses_work(pair):
    packed = packed_arrays(11, [(2, 4)])
    address = pair.p.address_for("d0")
    pair.close()
    for call in (
        lambda: pair.p.offer("d0", pair.uuid(), packed),
        lambda: pair.p.address_for("d0"),
        lambda: pair.d.pull("p0", address, 1, packed.parts),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_uuids_out_of_range_are_refused(pair):
    packed = packed_arrays(12, [(2, 4)])
    for uuid in (0, -1, 1 << 64):
        with pytest.raises(ValueError):
            pair.p.offer("d0", uuid, packed)
    for uuid in (-1, 1 << 64):
        pair.assert_all_failed(pair.pull(uuid, packed.parts), 1)
    largest = (1 << 64) - 1
    pair.p.offer("d0", largest, packed)
    pair.assert_right(pair.pull(largest, packed.parts), packed)


def test_counters_tell_what_happened(pair):
    uuid, packed = pair.uuid(), packed_arrays(13, [(2, 4)] * 3)
    pair.p.offer("d0", uuid, packed)
    pair.assert_right(pair.pull(uuid, packed.parts), packed)
    buried = pair.pull(uuid, packed.parts)
    for _ in range(2):
        pair.d.abandon(buried)
    d = pair.d.counters()
    assert (d["pulls"], d["pulls_live"], d["pulled_bytes"], d["failed_parts"]) == (2, 0, 96, 0)
    assert (d["abandoned"], d["graveyard"], d["graveyard_bytes"], d["pulling_peers"]) == (1, 1, 96, 1)
    pair.p.withdraw("d0", uuid, 60.0)
    pair.p.withdraw("d0", uuid, 60.0)
    pair.assert_settled(buried)
    d = pair.d.counters()
    assert (d["settled"], d["graveyard"], d["graveyard_bytes"]) == (1, 0, 0)
    p = pair.p.counters()
    assert (p["registered"], p["withdrawn"], p["registered_bytes"], p["serving_peers"]) == (1, 1, 0, 1)


# ---------------------------------------------------------------- addresses and fixed ports


@pytest.mark.parametrize(
    "options",
    [
        {"host": "localhost"},
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"advertise": "eth0"},
        {"advertise": "::"},
        {"verify": "on"},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        JaxTransferKVEngine(PDSettings(), **options)


def test_an_ip_of_another_machine_is_a_config_error():
    engine = JaxTransferKVEngine(PDSettings(), host="192.0.2.1")
    try:
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
            engine.address_for("d0")
    finally:
        engine.close(0.0)


def test_a_wildcard_host_advertises_the_ip_given():
    engine = JaxTransferKVEngine(PDSettings(), host="0.0.0.0", advertise="127.0.0.1")
    try:
        assert engine.address_for("d0").startswith("127.0.0.1:")
    finally:
        engine.close(0.0)


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


def test_fixed_ports_are_shared_by_no_two_engines():
    base, settings = free_base(6), PDSettings(max_peers=3)
    a, b = (JaxTransferKVEngine(settings, port_base=base) for _ in range(2))
    d = RealPair(engine=a)
    try:
        assert a.address_for("d0") == f"127.0.0.1:{base}"
        assert b.address_for("d0") == f"127.0.0.1:{base + 2}"
        assert a.address_for("d1") == f"127.0.0.1:{base + 4}"
        with pytest.raises(PDError, match="port"):
            b.address_for("d1")
        d.assert_healthy()
        a.drop_peer("d1")
        d.settle(lambda: _served(a, b))
        assert b.address_for("d1") == f"127.0.0.1:{base + 4}"
    finally:
        d.close()
        b.close(0.0)


def _served(dropper: JaxTransferKVEngine, taker: JaxTransferKVEngine) -> bool:
    """Whether the pair that the dropper gave up is free, which its native threads do a moment later."""
    dropper.tick()
    try:
        return bool(taker.address_for("d1"))
    except PDError:
        return False


def test_a_pair_is_held_before_anybody_listens():
    base = free_base(4)
    a, b = (PortRange(host_address("127.0.0.1"), base, 2) for _ in range(2))
    taken = [a.take(), b.take()]
    try:
        assert [pair.control for pair in taken] == [base, base + 2]
        assert a.take() is None
        b.give_back(taken.pop())
        taken.append(a.take())
        assert taken[1].control == base + 2
    finally:
        for pair in taken:
            pair.release()


def test_a_fixed_port_held_by_a_plain_listener_is_passed_over():
    base = free_base(4)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", base + 1))
        holder.listen()
        engine = JaxTransferKVEngine(PDSettings(max_peers=2), port_base=base)
        try:
            assert engine.address_for("d0") == f"127.0.0.1:{base + 2}"
            assert engine.counters()["port_pairs_skipped"] == 1
        finally:
            engine.close(0.0)


@pytest.mark.parametrize("base", [80, 65100])
def test_a_port_range_that_does_not_fit_is_a_config_error(base):
    with pytest.raises(ConfigError, match="port_base"):
        JaxTransferKVEngine(PDSettings(), port_base=base)


def test_prepare_process_sets_the_switch_interval():
    before = sys.getswitchinterval()
    try:
        prepare_process()
        assert sys.getswitchinterval() == pytest.approx(5e-4)
    finally:
        sys.setswitchinterval(before)


LEAVER = """
import logging, sys, threading
from pdjax.engine.jax_transfer.ports_guard import PortRange
from pdjax.engine.jax_transfer.process import leave
threading.Thread(target=threading.Event().wait).start()  # holds the interpreter for ever
logging.basicConfig(stream=sys.stderr)
logging.getLogger().addHandler(logging.FileHandler(sys.argv[1]))
logging.warning("logged")
sys.stdout.write("printed")
leave(5)
"""


def test_leave_flushes_and_ends_the_process_whatever_else_runs(tmp_path):
    log = tmp_path / "log"
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", LEAVER, str(log)],
        cwd=root, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (5, "printed")
    assert "logged" in done.stderr
    assert log.read_text() == "logged\n"
