"""The transport contract on the real transfer library, and what only the real one has."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from contract.real_transport import BOUND_S, RealPair, packed_arrays
from contract.transport_contract import TransportContract

from pdjax.core.errors import PDError
from pdjax.core.pools import Part
from pdjax.core.settings import PDSettings
from pdjax.engine.base import Packed
from pdjax.engine.jax_transfer import servers
from pdjax.engine.jax_transfer.addresses import split
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine
from pdjax.engine.jax_transfer.verify import checksum


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
        left = 4096 if how == "pull" else 0  # the engine is not told of D's done
        pair.settle(lambda: pair.p.tick() or pair.p.counters()["registered_bytes"] == left)
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

    pair.idle()  # old enough in truth, so that a disposal would be seen
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
