"""What must happen in some world: interesting moments, and rows of the table that were reached.

A checker that never meets the hard schedules proves nothing. Must never be a reason for a violation: counts only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdjax.core import transitions as t
from pdjax.core.trace import CACHE_TOKEN
from pdjax.sim.properties.base import ENDED, Context, LifeTrack, Track

MOMENTS: dict[str, str] = {
    "lease_expired_under_a_pull": "P's lease ended while a pull of its bytes was in flight",
    "limbo_freed_by_quiet": "D said that it is quiet, and P gave the bytes back",
    "limbo_freed_by_timer": "nobody said quiet before the limbo timer",
    "limbo_freed_by_rebirth": "D's new life spoke while bytes of the old one were in limbo",
    "done_lost_and_repeated": "a done notice was sent more than once",
    "abort_lost_and_repeated": "an abort notice was sent more than once",
    "abort_raced_a_landing": "P heard an abort whose pull had landed, or a landing came to an ended room",
    "late_done": "D was done with a room that P had given up",
    "pull_settled_after_the_end": "an abandoned pull ended by itself",
    "graveyard_emptied_by_timer": "an abandoned pull cost its peer's server",
    "page_queue_waited": "a ready room waited for pages",
    "start_waited_for_an_answer": "pages were there, but P owed an answer",
    "budget_refused_the_head": "a room waited for P's budget",
    "early_hello_used": "D's hello came before P's leg and bound it",
    "early_abort_used": "D's abort came before P's leg and refused it",
    "unbound_at_kv_ready": "P was ready before any hello",
    "notice_ended_by_its_life": "a notice was given up after its life G",
    "peer_refused": "nobody listened at P's address",
    "peer_silent": "P owed an answer for longer than the silence",
    "pull_after_withdraw": "a pull was issued after the withdraw and failed",
    "hello_of_an_older_attempt": "P heard an attempt that is over",
    "superseded": "a newer attempt took the room over",
    **{
        f"reborn_in_{s}": f"a peer's new life spoke while the room was in {s}"
        for s in ("B", "W", "T", "S", "F")
    },
    "client_abort": "a client ended its own request",
    "second_leg_refused": "a duplicate leg was refused",
    "drained": "a node left",
    "recomputed": "D computed a request whose P was lost",
    "prefix_shared": "a prompt read pages that the prefill of another one wrote",
    "prefix_evicted": "the prefix cache gave pages up for a prompt",
    "slot_used_again": "KV was staged in a host slot that had held another room's",
    "slot_replaced": "a host slot was given up, since a D might still be reading it",
}
LETTER = {name: letter for letter, n in t.LETTERS.items() for name in (t.STATE_NAMES[n],)}
SENT_ONCE = 1
CACHE = str(CACHE_TOKEN)


class Sometimes:
    """Counts of moments and of rows in one world."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.moments: dict[str, int] = {}
        self.rows: dict[int, int] = {}
        self._sent: dict[tuple[str, str, int, str], int] = {}
        self._slots: set[tuple[str, str, int]] = set()
        # Event of the table → what looks at its decisions.
        self.looks: dict[str, Callable[[dict[str, Any], Track], None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in _LOOKS
        }

    def _met(self, name: str) -> None:
        self.moments[name] = self.moments.get(name, 0) + 1

    def count_row(self, line: dict[str, Any], track: Track) -> None:
        row = line["row"]
        if row >= 0:
            self.rows[row] = self.rows.get(row, 0) + 1

    def sent(self, life: LifeTrack, line: dict[str, Any]) -> None:
        if line["message"] in ("done", "abort"):
            key = (line["node"], line["epoch"], int(line["room"]), line["message"])
            n = self._sent[key] = self._sent.get(key, 0) + 1
            if n == SENT_ONCE + 1:
                self._met(f"{line['message']}_lost_and_repeated")

    def evicted(self, life: LifeTrack, line: dict[str, Any]) -> None:
        node = self.ctx.world.nodes.get(line.get("instance", ""))
        if node is not None and node.manager.draining:
            self._met("drained")

    def recomputed(self, life: LifeTrack, line: dict[str, Any]) -> None:
        self._met("recomputed")

    def shared(self, life: LifeTrack, line: dict[str, Any]) -> None:
        if line["token"] != CACHE:
            self._met("prefix_shared")

    def freed(self, life: LifeTrack, line: dict[str, Any]) -> None:
        if line["token"] == CACHE:
            self._met("prefix_evicted")

    def slot_taken(self, life: LifeTrack, line: dict[str, Any]) -> None:
        slot = (line["node"], line["epoch"], line["slot"])
        if slot in self._slots:
            self._met("slot_used_again")
        self._slots.add(slot)

    def slot_freed(self, line: dict[str, Any]) -> None:
        if not line["quiet"]:
            self._met("slot_replaced")

    # ---------------------------------------------------------------- events of the table

    def _on_expire_lease(self, line: dict[str, Any], track: Track) -> None:
        if track.before == "Transferring" and track.uuid:
            pulls = (p for (_, uuid), p in self.ctx.pulls.items() if uuid == int(track.uuid))
            if any(p.done is None for p in pulls):
                self._met("lease_expired_under_a_pull")

    def _on_abort(self, line: dict[str, Any], track: Track) -> None:
        if "free_limbo" in line["effects"] and track.seen.get("to_limbo"):
            self._met("limbo_freed_by_quiet")
        if track.before == "Transferring" and track.state == "Failed":
            there = self.ctx.other_side(track)
            if there is not None and there.stage in ("landed", "scattered"):
                self._met("abort_raced_a_landing")

    def _on_limbo_timer(self, line: dict[str, Any], track: Track) -> None:
        self._met("limbo_freed_by_timer")

    def _on_peer_reborn(self, line: dict[str, Any], track: Track) -> None:
        if track.before in LETTER and line["from"] != "Absent":
            self._met(f"reborn_in_{LETTER[line['from']]}")
        if "free_limbo" in line["effects"] and track.seen.get("to_limbo"):
            self._met("limbo_freed_by_rebirth")

    def _on_done(self, line: dict[str, Any], track: Track) -> None:
        if "count_late_done" in line["effects"]:
            self._met("late_done")

    def _on_pull_settled(self, line: dict[str, Any], track: Track) -> None:
        node = self.ctx.node(track.node, track.epoch)
        if node is not None and "servers_replaced" in node.manager.counters.counts:
            timeout_ms = node.manager.settings.graveyard_timeout_s * 1000
            if line["t"] - track.ended_ms >= timeout_ms:
                self._met("graveyard_emptied_by_timer")
                return
        self._met("pull_settled_after_the_end")

    def _on_start(self, line: dict[str, Any], track: Track) -> None:
        if line["to"] == "WaitingForInput":
            self._met("start_waited_for_an_answer")
        elif track.ready_ms >= 0 and line["t"] - track.ready_ms > 1.0:
            self._met("page_queue_waited")

    def _on_ready(self, line: dict[str, Any], track: Track) -> None:
        if "note_ready" in line["effects"]:
            track.ready_ms = line["t"]

    def _on_admit(self, line: dict[str, Any], track: Track) -> None:
        if line["to"] == "Bootstrapping":
            self._met("budget_refused_the_head")

    def _on_leg(self, line: dict[str, Any], track: Track) -> None:
        if "bind_early" in line["effects"]:
            self._met("early_hello_used")
        elif "answer_refused" in line["effects"] and track.role == "sender":
            self._met("early_abort_used")
        elif "answer_duplicate" in line["effects"]:
            self._met("second_leg_refused")

    def _on_kv_ready(self, line: dict[str, Any], track: Track) -> None:
        if "register" not in line["effects"] and line["to"] == "Transferring":
            self._met("unbound_at_kv_ready")

    def _on_notice_timer(self, line: dict[str, Any], track: Track) -> None:
        if track.ended_ms and line["t"] - track.ended_ms > self.ctx.settings(track.node).notice_life_s * 1000:
            node = self.ctx.node(track.node, track.epoch)
            record = node.manager.rooms.get(track.room) if node is not None else None
            if record is not None and not record.notices:
                self._met("notice_ended_by_its_life")

    def _on_refused(self, line: dict[str, Any], track: Track) -> None:
        self._met("peer_refused")

    def _on_peer_silence(self, line: dict[str, Any], track: Track) -> None:
        self._met("peer_silent")

    def _on_peer_failed(self, line: dict[str, Any], track: Track) -> None:
        node = self.ctx.node(track.node, track.epoch)
        record = node.manager.receiver.rooms.get(track.room) if node is not None else None
        if record is not None and record.manifest is not None:
            pull = self.ctx.pulls.get((f"{track.node}@{track.epoch}", record.manifest.uuid))
            if pull is not None and pull.late:
                self._met("pull_after_withdraw")

    def _on_hello(self, line: dict[str, Any], track: Track) -> None:
        if line.get("reason") == "superseded" and line["from"] not in ENDED:
            self._met("superseded")
        elif line.get("kind") == "stale" and line["from"] != "Absent":
            self._met("hello_of_an_older_attempt")

    def _on_abort_local(self, line: dict[str, Any], track: Track) -> None:
        self._met("client_abort")


_LOOKS = tuple(name for name in vars(Sometimes) if name.startswith("_on_"))
