"""Safety: who owns pages, bytes and budget (S1, S3, S4, S16, S17 of protocol §10).

Must never be derived from the table: the rules are written a second time.
"""

from __future__ import annotations

from typing import Any

from pdjax.core.trace import CACHE_TOKEN
from pdjax.sim.properties.base import ENDED, WIRE, Context, Decision, Property, Track, digest_of

PAGES = ("pages_taken", "pages_shared", "pages_freed")
SLOTS = ("slot_taken", "slot_freed")
CACHE = str(CACHE_TOKEN)
RELEASES = frozenset({"reserve", "free_budget", "to_limbo"})


class S1(Property):
    name = "S1"
    sentence = "a page, a packed byte or a host slot belongs to one owner, and leaves a transfer only when the transfer is quiescent"
    hears = (*PAGES, *SLOTS, "transition")

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        # (node, epoch, page) → what the page held when the prefix cache took it: nobody may write it from then on
        self.cached: dict[tuple[str, str, int], bytes] = {}

    @staticmethod
    def wants(d: Decision) -> bool:
        if d.event == "limbo_timer":
            return False  # the bound: after it the bytes are not charged, whatever a stopped peer does
        bytes_back = "free_budget" in d.effects and d.source == "Transferring"
        return bytes_back or ("free_limbo" in d.effects and d.event in WIRE)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] in PAGES:
            self._pages(line)
            return
        if line["event"] in SLOTS:
            self._slots(line)
            return
        effects = line["effects"]
        if track is None:
            return
        if "free_budget" in effects and track.before == "Transferring":
            self._bytes(track.uuid, line, track)
        elif "free_limbo" in effects and line["event"] in WIRE:
            message, peer, attempt, room = self.ctx.lives[line["node"], line["epoch"]].delivered
            if (message, peer, room) != (line["event"], line["peer"], track.room):
                return
            for uuid, offer in self.ctx.offers.items():
                if (offer.room, offer.node, offer.epoch) != (track.room, track.node, track.epoch):
                    continue
                if offer.attempt == attempt:
                    self._bytes(str(uuid), line, track)

    def _pages(self, line: dict[str, Any]) -> None:
        """A page is taken when nobody holds it, shared while somebody does, freed by each that holds it."""
        life = self.ctx.lives[line["node"], line["epoch"]]
        event, token, pages = line["event"], line["token"], line["pages"]
        for page in pages:
            held = life.holders.setdefault(page, set())
            if event == "pages_taken":
                if held:
                    self.breach(
                        f"page {page} of {life.name} is taken by {token} while {_names(held)} owns it"
                    )
                    held.clear()
                held.add(token)
            elif event == "pages_shared":
                if not held or token in held:
                    self.breach(f"page {page} of {life.name} is shared with {token}, held by {_names(held)}")
                held.add(token)
            elif token in held:
                held.remove(token)
            else:
                self.breach(f"page {page} of {life.name} is freed by {token}, which does not own it")
        mine = life.pages.setdefault(token, set())
        if event == "pages_freed":
            mine.difference_update(pages)
        else:
            mine.update(pages)
        if not mine:
            del life.pages[token]
        if event == "pages_shared" or (event == "pages_freed" and token == CACHE):
            self._unchanged(line)

    def _unchanged(self, line: dict[str, Any]) -> None:
        """What the cache holds is as it was when the cache took it: its readers would decode what was written since."""
        node = self.ctx.node(line["node"], line["epoch"])
        if node is None:
            return
        for page in line["pages"]:
            key = (line["node"], line["epoch"], page)
            now = b"".join(pool[:, page].tobytes() for pool in node.runner.arrays)
            if self.cached.setdefault(key, now) != now:
                self.breach(f"page {page} of {line['node']} was written while the prefix cache held it")
            if line["event"] == "pages_freed":
                del self.cached[key]

    def _slots(self, line: dict[str, Any]) -> None:
        """A slot is taken when no room has it and nobody reads there, and given back by the room that has it."""
        life = self.ctx.lives[line["node"], line["epoch"]]
        room, slot = int(line["room"]), line["slot"]
        held_by = life.slots.pop(slot, None)
        if line["event"] == "slot_freed":
            if held_by != room:
                self.breach(
                    f"slot {slot} of {life.name} is given back by room {room}, which does not hold it", line
                )
            return
        life.slots[slot] = room
        if held_by is not None:
            self.breach(
                f"slot {slot} of {life.name} is taken by room {room} while room {held_by} holds it", line
            )
        for uuid, offer in self.ctx.offers.items():
            if (offer.node, offer.epoch, offer.slot) != (life.name, life.epoch, slot):
                continue
            for node in self.ctx.nodes("decode"):
                pull = self.ctx.pulls.get((f"{node.name}@{node.manager.epoch}", uuid))
                if pull is not None and pull.done is None:
                    self.breach(
                        f"slot {slot} of {life.name} is taken while {node.name} still pulls room {offer.room}",
                        line,
                    )

    def _bytes(self, uuid: str, line: dict[str, Any], track: Track) -> None:
        """No living D has a pull of these bytes that has not ended."""
        if not uuid:
            return
        for node in self.ctx.nodes("decode"):
            pull = self.ctx.pulls.get((f"{node.name}@{node.manager.epoch}", int(uuid)))
            if pull is not None and pull.done is None and line.get("peer", node.name) == node.name:
                if line["event"] == "peer_reborn":
                    continue  # the life that pulled is over
                self.breach(f"{track}: {line['event']} frees bytes that {node.name} is still pulling", line)


def _names(tokens: set[str]) -> str:
    return " and ".join(sorted(tokens)) or "nobody"


class S3(Property):
    name = "S3"
    sentence = "each resource is released exactly once, whatever ends the room"
    hears = ("transition",)

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.ends or not RELEASES.isdisjoint(d.effects)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None or track.role != "sender" or track.state == track.before == "Absent":
            return
        if track.released > track.reserved:
            self.breach(f"{track}: budget released {track.released} times, reserved {track.reserved}", line)
        if track.state in ENDED and track.before not in ENDED and track.released != track.reserved:
            self.breach(f"{track}: ended with its budget charged", line)

    def at_end(self) -> None:
        for node in self.ctx.nodes():
            held = node.held()
            if held:
                self.breach(f"{node.name} still holds {held}")
            try:
                node.scheduler.cache.check()
            except RuntimeError as error:
                self.breach(f"{node.name}: {error}")


class S4(Property):
    name = "S4"
    sentence = "registered bytes do not change until done or withdraw, and a pull issued after the withdraw never gets any"
    hears = ("landed", "withdrawn")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "withdrawn":
            offer = self.ctx.offers.get(int(line["uuid"]))
            if offer is None or offer.slot_is_back:
                return  # a withdraw that is repeated: its slot holds another room's bytes by now
            if digest_of(offer.packed) != offer.hashes:
                self.breach(
                    f"room {line['room']}: its bytes on {line['node']} changed while registered", line
                )
            return
        if track is None:
            return
        node = self.ctx.node(track.node, track.epoch)
        record = node.manager.receiver.rooms.get(track.room) if node is not None else None
        if record is None or record.manifest is None:
            return
        pull = self.ctx.pulls.get((f"{track.node}@{track.epoch}", record.manifest.uuid))
        if pull is not None and pull.late:
            self.breach(f"{track}: a pull of a withdrawn registration brought bytes", line)


class S16(Property):
    name = "S16"
    sentence = "one writer for each slot: first token, parts and pages of an attempt are written once"
    hears = ("transition",)
    ONCE = ("note_ready", "deliver", "keep_arrays", "register", "mint_attempt", "start_pull")

    @staticmethod
    def wants(d: Decision) -> bool:
        return any(effect in d.effects for effect in S16.ONCE)

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        for effect in self.ONCE:
            if effect in line["effects"] and track.seen.get(effect, 0) > 1:
                self.breach(f"{track}: {effect} for the second time", line)


class S17(Property):
    name = "S17"
    sentence = "a limit is acquired before the resource that it limits"
    hears = ("kv_ready", "start", "admit")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        event = line["event"]
        node = self.ctx.node(track.node, track.epoch)
        if node is None:
            return
        if event == "admit":
            budget = node.manager.sender.budget
            record = node.manager.sender.rooms.get(track.room)
            alone = record is not None and budget.charged_bytes == record.charged_bytes
            if budget.charged_bytes > budget.limit_bytes and "reserve" in line["effects"] and not alone:
                self.breach(
                    f"{track}: {budget.charged_bytes} bytes are charged to a budget of {budget.limit_bytes}",
                    line,
                )
        elif event == "kv_ready":
            record = node.manager.sender.rooms.get(track.room)
            parts = sum(p.nbytes for p in record.offer.parts) if record and record.offer else 0
            if record is not None and record.charged_bytes < parts:
                self.breach(f"{track}: {parts} bytes offered, {record.charged_bytes} reserved", line)
            if record is not None and node.manager.host_slots is not None:
                slot = record.slot
                if (
                    slot is None
                    or slot.n_bytes != parts
                    or node.manager.host_slots.held.get(slot.number) is not slot
                ):
                    self.breach(f"{track}: {parts} bytes staged in a slot that it does not hold", line)
        elif "start_pull" in line["effects"]:
            life = self.ctx.lives[track.node, track.epoch]
            if not life.pages.get(track.attempt):
                self.breach(f"{track}: a pull without pages", line)
