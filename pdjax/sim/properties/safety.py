"""Safety properties S1–S18 of protocol §10 (S9 and S14 need several ranks: see monitor.NOT_SHOWN).

Each is one class with its sentence. Must never be derived from the table: the rules are written a second time.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pdjax.sim.properties.base import ENDED, WIRE, Property, Track, digest_of

ORDER = {"Bootstrapping": 0, "WaitingForInput": 1, "Transferring": 2}
PAGES = ("pages_taken", "pages_freed")
STORM_MS, STORM_MESSAGES = 100.0, 60  # docs/decisions/0002, 0004: two sides that answer each other for ever


class S1(Property):
    name = "S1"
    sentence = "a page or a packed byte belongs to one owner, and leaves a transfer only when the transfer is quiescent"
    hears = (*PAGES, "transition")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] in PAGES:
            self._pages(line)
            return
        effects = line["effects"]
        if line["event"] == "limbo_timer" or track is None:
            return  # the bound: after it the bytes are not charged, whatever a stopped peer does
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
        life = self.ctx.lives[line["node"], line["epoch"]]
        token, pages = line["token"], line["pages"]
        if line["event"] == "pages_taken":
            for page in pages:
                if page in life.owner:
                    self.breach(
                        f"page {page} of {life.name} is taken by {token} while {life.owner[page]} owns it"
                    )
                life.owner[page] = token
            life.pages.setdefault(token, []).extend(pages)
            return
        for page in pages:
            if life.owner.pop(page, None) != token:
                self.breach(f"page {page} of {life.name} is freed by {token}, which does not own it")
        life.pages.pop(token, None)

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


class S2(Property):
    name = "S2"
    sentence = "D decodes a room only after every expected part of this attempt is scattered into this attempt's pages"
    hears = ("start", "landed", "scattered", "first_token")
    AFTER: ClassVar[dict[str, str]] = {"start": "", "landed": "start", "scattered": "landed"}

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None or track.role != "receiver":
            return
        event = line["event"]
        if event == "first_token":
            if track.stage != "scattered":
                self.breach(f"{track}: a token before the commit", line)
        elif event != "start" or line["to"] == "Transferring":
            if track.stage != self.AFTER[event]:
                self.breach(f"{track}: {event} when the last stage was {track.stage or 'none'}", line)
            track.stage = event
            if event == "scattered":
                life = self.ctx.lives[track.node, track.epoch]
                if not life.pages.get(track.attempt):
                    self.breach(f"{track}: scattered into pages that the attempt does not own", line)


class S3(Property):
    name = "S3"
    sentence = "each resource is released exactly once, whatever ends the room"
    hears = ("transition",)

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
            allocator = getattr(node.scheduler.cache, "allocator", None)
            if allocator is not None:
                try:
                    allocator.check()
                except RuntimeError as error:
                    self.breach(f"{node.name}: {error}")


class S4(Property):
    name = "S4"
    sentence = "registered bytes do not change until done or withdraw, and a pull issued after the withdraw never gets any"
    hears = ("landed", "withdrawn")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "withdrawn":
            offer = self.ctx.offers.get(int(line["uuid"]))
            if offer is not None and digest_of(offer.packed) != offer.hashes:
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


class S5(Property):
    name = "S5"
    sentence = "a message of another epoch or attempt changes nothing, and a retired room is remembered"
    bound = "tombstone ≥ notice life + message life"
    hears = ("transition",)

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.minted: set[str] = set()

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        event = line["event"]
        if track is None:
            return
        if event in WIRE:
            self._wire(line, track)
        elif event == "tombstone_timer" and line["to"] == "Absent":
            settings = self.ctx.settings(track.node)
            least_ms = (settings.notice_life_s + settings.message_life_s) * 1000
            if line["t"] - track.ended_ms < least_ms - 1:
                self.breach(
                    f"{track}: forgotten {line['t'] - track.ended_ms:g} ms after its end, messages live {least_ms:g}",
                    line,
                )
        elif event == "leg" and "mint_attempt" in line["effects"]:
            if line["attempt"] in self.minted:
                self.breach(f"{track}: attempt {line['attempt']} was minted before", line)
            self.minted.add(line["attempt"])

    def _wire(self, line: dict[str, Any], track: Track) -> None:
        life = self.ctx.lives[line["node"], line["epoch"]]
        peer = line.get("peer", "")
        birth = self.ctx.births.get((peer, line.get("peer_epoch", "0")), 0)
        newest = life.newest.get(peer, 0)
        if birth < newest:
            self.breach(f"{track}: {line['event']} of a past life of {peer} was acted on", line)
        life.newest[peer] = max(newest, birth)
        if line["from"] == "Absent" and line["to"] != "Absent":
            self.breach(f"{track}: {line['event']} created a record", line)
        message, _, attempt, room = life.delivered
        if message != line["event"] or room != track.room or line["from"] == line["to"]:
            return
        stranger = attempt != line["attempt"] and line["attempt"] != "0"
        if stranger and (track.role == "receiver" or int(attempt) < int(line["attempt"])):
            self.breach(
                f"{track}: {line['event']} of attempt {attempt} moved attempt {line['attempt']}", line
            )


class S6(Property):
    name = "S6"
    sentence = (
        "states move forward only; Success and Failed absorb; one end for each attempt and side; one copy"
    )
    hears = ("transition", "illegal")
    instants = True

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "illegal":
            self.breach(f"{line['node']} room {line.get('room')}: {line.get('detail')}", line)
            return
        if track is None:
            return
        source, target = line["from"], line["to"]
        if source == target:
            return
        if source != track.before:
            self.breach(f"{track}: was {track.before}, {line['event']} starts from {source}", line)
        if source in ENDED and (target != "Absent" or line["event"] != "tombstone_timer"):
            self.breach(f"{track}: {line['event']} moved it from {source} to {target}", line)
        if source in ORDER and target in ORDER and ORDER[target] <= ORDER[source]:
            self.breach(f"{track}: {line['event']} moved it back from {source} to {target}", line)
        if target == "Success" and source != "Transferring":
            self.breach(f"{track}: {line['event']} made it a success from {source}", line)
        if source in ORDER and target == "Absent":
            self.breach(f"{track}: {line['event']} forgot a live room", line)

    def on_instant(self) -> None:
        for (name, epoch, room), track in self.ctx.touched.items():
            node = self.ctx.node(name, epoch)
            if node is None:
                continue
            record = node.manager.rooms.get(room)
            state = "Absent" if record is None else _STATE[record.state]
            if state != track.state:
                self.breach(f"{track}: the log says {track.state}, the manager {state}")


_STATE = {0: "Failed", 1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring", 4: "Success", 5: "Absent"}


class S7(Property):
    name = "S7"
    sentence = "P states the parts once; D completes by that very set, and each part ends exactly once"
    hears = ("start", "landed")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None or line["to"] != "Transferring":
            return
        node = self.ctx.node(track.node, track.epoch)
        record = node.manager.receiver.rooms.get(track.room) if node is not None else None
        if record is None or record.manifest is None:
            return
        uuid, parts = record.manifest.uuid, record.manifest.parts
        if line["event"] == "start":
            offer = self.ctx.offers.get(uuid)
            if offer is not None and set(offer.packed.parts) != set(parts):
                self.breach(f"{track}: D expects other parts than P registered", line)
            return
        pull = self.ctx.pulls.get((f"{track.node}@{track.epoch}", uuid))
        done = pull.done if pull is not None else None
        if done is None or not hasattr(done, "errors"):
            self.breach(f"{track}: landed, but the pull has not ended", line)
        elif len(done.arrays) != len(parts) or any(e is not None for e in done.errors):
            bad = sum(e is not None for e in done.errors)
            self.breach(
                f"{track}: landed with {bad} of {len(parts)} parts failed, {len(done.arrays)} here", line
            )


class S8(Property):
    name = "S8"
    sentence = "ids survive every hop and are unique among live and retired attempts; a duplicate is refused"
    hears = ("offer", "registered", "leg")

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.registered: set[str] = set()

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        event = line["event"]
        if event == "offer":
            if line["uuid"] in self.registered:
                self.breach(f"uuid {line['uuid']} was registered twice", line)
            self.registered.add(line["uuid"])
            return
        if event == "registered":
            if track is not None:
                track.uuid = line["uuid"]
            return
        if track is None:
            return
        if self.ctx.world.requests and not self._posted(track.room):
            self.breach(f"{track}: no request has this room", line)
        if line["from"] != "Absent" and (
            line["to"] != line["from"] or list(line["effects"]) != ["answer_duplicate"]
        ):
            self.breach(f"{track}: a second leg was not simply refused", line)

    def _posted(self, room: int) -> bool:
        """The router has posted a leg with this very room."""
        return any(
            0 <= room - first < r.value.get("n", 1)
            for r in self.ctx.world.requests.values()
            for first in r.rooms
        )


class S10(Property):
    name = "S10"
    sentence = "sizes, types, layout and settings match, or the pair is rejected before anything is taken"
    hears = ("start", "hello")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        node = self.ctx.node(track.node, track.epoch)
        peer = self.ctx.node(line.get("peer") or track.peer)
        if node is None or peer is None:
            return
        ours, theirs = node.args.fingerprint, peer.args.fingerprint
        if line["event"] == "hello":
            if "bind" in line["effects"] and ours.hash != theirs.hash:
                self.breach(f"{track}: bound a peer with another fingerprint", line)
        elif line["to"] == "Transferring":
            record = node.manager.receiver.rooms.get(track.room)
            m = record.manifest if record is not None else None
            if m is None:
                return
            wrong = [
                name
                for name, a, b in (
                    ("fingerprint", m.fingerprint, ours.hash),
                    ("page_size", m.page_size, node.runner.page_size),
                    ("n_tokens", m.n_tokens, record.n_tokens),
                    ("digest", m.digest, record.digest),
                    ("n_pages", m.n_pages, -(-record.n_tokens // node.runner.page_size)),
                )
                if a != b
            ]
            if wrong:
                self.breach(f"{track}: pulls with another {', '.join(wrong)} than its request's", line)


class S11(Property):
    name = "S11"
    sentence = "no request, message or peer stops a thread, a scheduler, or another request"
    hears = ("effect_failed", "finished", "step")

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.injected = False  # some work was told to raise

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "step":
            self.injected |= line["action"] == "error"
            return
        if line["event"] == "finished":
            if line.get("reason") == "engine_error" and not self.injected:
                self.breach(f"request {line['rid']}: a server failed by itself", line)
            return
        if "injected" not in str(line.get("detail", "")):
            self.breach(f"{line['node']}: {line.get('effect')} failed: {line.get('detail')}", line)

    def at_end(self) -> None:
        for node in self.ctx.nodes():
            n = node.scheduler.counts["engine_errors"]
            if n and not self.injected:
                self.breach(f"{node.name}: its scheduler met {n} errors that nobody injected")


class S12(Property):
    name = "S12"
    sentence = "what peers can make a process remember is bounded, and nothing is allocated for an unknown id"
    bound = (
        "records ≤ legs accepted and not forgotten; early entries, peers ≤ their settings; "
        "60 messages about one room in 100 ms"
    )
    hears = ("leg", "leg_bad", "leg_refused", "sent")
    instants = True

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.sent: dict[tuple[str, int], tuple[float, int]] = {}

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if line["event"] == "sent":
            key = (line["node"], int(line["room"]))
            since, n = self.sent.get(key, (line["t"], 0))
            if line["t"] - since > STORM_MS:
                since, n = line["t"], 0
            self.sent[key] = since, n + 1
            if n + 1 == STORM_MESSAGES + 1:
                self.breach(f"room {key[1]}: {key[0]} sends more than {n} messages in {STORM_MS:g} ms", line)
            return
        if line["from"] == "Absent" and line["to"] != "Absent":
            self.ctx.lives[line["node"], line["epoch"]].legs += 1

    def on_instant(self) -> None:
        for (name, epoch), life in self.ctx.dirty.items():
            node = self.ctx.node(name, epoch)
            if node is None:
                continue
            manager, settings = node.manager, node.manager.settings
            if len(manager.rooms) > life.legs:
                self.breach(f"{name}: {len(manager.rooms)} records for {life.legs} legs")
            side = manager.sender
            if side.n_early > settings.max_early or side.n_early != sum(map(len, side.early.values())):
                self.breach(f"{name}: {side.n_early} early entries counted, {len(side.early)} rooms of them")
            if len(manager.peers.links) > settings.max_peers:
                self.breach(f"{name}: {len(manager.peers.links)} peers remembered")


class S13(Property):
    name = "S13"
    sentence = "a client never gets tokens that come from KV that failed, expired or was not verified"
    hears = ("finished", "scattered", "done")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        event = line["event"]
        if event == "finished":
            wrong = line.get("wrong")
            if wrong:
                self.breach(f"request {line.get('rid')}: {wrong}", line)
        elif event == "scattered" and track is not None and track.state == "Success":
            there = self.ctx.other_side(track)
            if there is not None and there.stage == "" and "keep_arrays" not in there.seen:
                self.breach(f"{track}: a success of KV that P never offered", line)
        elif event == "done" and track is not None and track.state == "Success" and track.before != "Success":
            there = self.ctx.other_side(track)
            if there is not None and there.attempt == track.attempt and there.stage != "scattered":
                self.breach(f"{track}: done, but {there} has not scattered it", line)


class S15(Property):
    name = "S15"
    sentence = "deadlines are durations on the wire, compared with one process's own clock"
    hears = ()
    instants = True

    def on_instant(self) -> None:
        for (name, epoch, room), track in self.ctx.touched.items():
            node = self.ctx.node(name, epoch)
            if node is None or (record := node.manager.rooms.get(room)) is None:
                continue
            s = record.settings
            longest = max(s.request_timeout_s, s.tombstone_life_s) + 1e-6
            for kind, at in record.timers.items():
                if not at - node.manager.ports.clock() <= longest:
                    self.breach(f"{track}: its {kind} deadline lies beyond every setting")


class S16(Property):
    name = "S16"
    sentence = "one writer for each slot: first token, parts and pages of an attempt are written once"
    hears = ("transition", "registered")
    ONCE = ("note_ready", "deliver", "keep_arrays", "register", "mint_attempt", "start_pull")

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None or line["event"] == "registered":
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
        elif "start_pull" in line["effects"]:
            life = self.ctx.lives[track.node, track.epoch]
            if not life.pages.get(track.attempt):
                self.breach(f"{track}: a pull without pages", line)


class S18(Property):
    name = "S18"
    sentence = "a message handled twice changes what it changes once"
    hears = ("transition",)
    ONCE = frozenset(
        [
            "reserve",
            "free_budget",
            "to_limbo",
            "register",
            "note_ready",
            "start_pull",
            "deliver",
            "bind_peer",
        ]
    )

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None:
            return
        if line["event"] not in WIRE:
            track.last_wire = ()
            return
        life = self.ctx.lives[line["node"], line["epoch"]]
        message, peer, attempt, room = life.delivered
        key = (message, peer, attempt, room, line.get("uuid", ""), line.get("peer_epoch"))
        if key == track.last_wire and message == line["event"]:
            again = self.ONCE.intersection(line["effects"])
            if line["from"] != line["to"] or again:
                self.breach(
                    f"{track}: {message} once more moved it to {line['to']} {sorted(again)}".rstrip(" []"),
                    line,
                )
        track.last_wire = key


PROPERTIES: tuple[type[Property], ...] = (
    S1, S2, S3, S4, S5, S6, S7, S8, S10, S11, S12, S13, S15, S16, S17, S18,
)  # fmt: skip
