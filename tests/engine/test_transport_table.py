"""The parts of the transport that need no pull: registration table, addresses, fixed ports, start and end of a process."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from contract.real_transport import BOUND_S, RealPair, free_base, packed_arrays

from pdjax.core.errors import ConfigError, PDError
from pdjax.core.pools import PoolTransferSpec, plan_parts
from pdjax.core.settings import PDSettings
from pdjax.engine.jax_transfer.addresses import host_address
from pdjax.engine.jax_transfer.ports_guard import PortRange
from pdjax.engine.jax_transfer.process import prepare_process
from pdjax.engine.jax_transfer.puller import POLL_MAX_S, POLL_MIN_S, Puller, _Pull
from pdjax.engine.jax_transfer.registrations import Registrations
from pdjax.engine.jax_transfer.servers import ServerPool
from pdjax.engine.jax_transfer.transport import JaxTransferKVEngine


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

    def test_a_withdrawal_for_another_peer_changes_nothing(self, table):
        table.offer("d0", 1, packed_arrays(1, [(2, 4)]))
        table.address_for("d1")
        table.withdraw("d1", 1, 100.0)
        assert table.counters.withdrawn == 0
        assert table.counters.registered_bytes == 32

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


FAULTS = """
import resource, sys
import numpy as np
from pdjax.engine.jax_transfer.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def hand_off():
    return [np.ones(1 << 20, np.uint8) for _ in range(48)] is None
hand_off()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    hand_off()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_freed_by_a_hand_off_is_not_faulted_in_again():
    faults = {
        how: int(subprocess.check_output([sys.executable, "-c", FAULTS, how], text=True))
        for how in ("keep", "default")
    }
    pages = 5 * (48 << 20) // resource.getpagesize()
    assert faults["keep"] < pages / 20 < faults["default"], faults


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


def test_a_large_pull_is_left_alone_while_its_bytes_cannot_be_here():
    """Each look of the polling thread takes time from the threads that copy (docs/performance.md)."""
    puller = Puller(
        ServerPool(host_address("127.0.0.1"), 4, jax.local_devices()[0]), jax.local_devices()[0], "off"
    )
    assert puller._soonest_s() == 0.0
    parts = plan_parts([PoolTransferSpec("kv", "kv", "float32", (512, 16, 384), 30, 24576)], 256)
    pull = _Pull(1, "p", parts, sum(p.nbytes for p in parts), 0.0, [None] * len(parts), set())
    puller._watched = [pull]
    assert puller._soonest_s() == POLL_MAX_S
    pull.rest_bytes = 4 << 20
    soon = puller._soonest_s()
    assert POLL_MIN_S < soon < (4 << 20) / 2e9, "less than such a transfer takes"
    pull.rest_bytes = 0
    assert puller._soonest_s() == 0.0
