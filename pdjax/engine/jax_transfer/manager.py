"""JaxTransferKVManager: the KVManager of a real process, with the thread that drives it.

The driver answers peers within milliseconds whatever the device is doing (protocol §7): it never computes, never
waits for the device, and holds the manager's lock only while the table runs. Must never touch the pools.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from pdjax.engine.manager import KVManager

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 0.25
ERROR_PAUSE_S = 0.01  # a turn that fails at once must not take the core
STALL_REPORT_S = 0.5  # a turn longer than this is a fault of ours, and is said so


class JaxTransferKVManager(KVManager):
    """KVManager plus its driver thread. ``start`` once, ``stop`` once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._drive, name="kv-driver", daemon=True)
        self.longest_turn_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        """False when the driver has died: the process is not healthy any more."""
        return self._thread.is_alive()

    def _drive(self) -> None:
        clock = self.ports.clock
        while not self._stopping.is_set():
            self._turn_safely()
            wait_s = min(self.next_deadline() - clock(), LONGEST_WAIT_S)
            if wait_s > 0:
                self.ports.channel.wait(wait_s)
        self._turn_safely()  # the last words: peers need not wait for a timer to learn that we have left

    def _turn_safely(self) -> None:
        """S11: whatever one turn met must not stop the answers to all other peers."""
        began = self.ports.clock()
        try:
            self.turn()
        except Exception:
            self.counters.add("driver_errors")
            log.exception("a turn of the driver failed")
            self._stopping.wait(ERROR_PAUSE_S)
        took = self.ports.clock() - began
        self.longest_turn_s = max(self.longest_turn_s, took)
        if took > STALL_REPORT_S:
            self.counters.add("driver_stalls")
            log.warning("a turn of the driver took %.2f s", took)

    def _failed(self, what: str, room: int | None, error: Exception) -> None:
        super()._failed(what, room, error)
        if self.counters.counts[f"effect_failed_{what}"] == 1:
            log.warning("%s failed; from now on that is only counted", what, exc_info=error)

    def stop(self, wait_s: float) -> None:
        """End the driver, then the ports in order: registry, transport (at most wait_s), channel."""
        self._stopping.set()
        self.ports.channel.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self.close(wait_s)
