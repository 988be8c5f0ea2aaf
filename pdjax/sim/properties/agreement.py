"""Safety: what the two sides must agree on before a token is shown (S2, S7, S8, S10, S13 of protocol §10).

Must never be derived from the table: the rules are written a second time.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pdjax.sim.properties.base import Context, Decision, Property, Track


class S2(Property):
    name = "S2"
    sentence = (
        "D decodes a room only after every expected part of this attempt is scattered into this attempt's pages, or"
        " after the room has failed, from pages that it has filled itself"
    )
    hears = ("transition", "first_token", "recompute")
    AFTER: ClassVar[dict[str, str]] = {"start": "", "landed": "start", "scattered": "landed"}

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.recomputed: set[tuple[str, str, str]] = set()  # life, token
        self.failed: set[tuple[str, str, str]] = set()  # life, attempt

    @staticmethod
    def wants(d: Decision) -> bool:
        return d.role == "receiver" and (d.event in S2.AFTER or (d.target == "Failed" != d.source))

    def on_line(self, line: dict[str, Any], track: Track | None) -> None:
        if track is None or track.role != "receiver":
            return
        event = line["event"]
        if event == "recompute":
            self.recomputed.add((track.node, track.epoch, line["token"]))
            # By its attempt: a scheduler that was stopped hears of the end when the room is forgotten, or used again.
            if (track.node, track.epoch, line["attempt"]) not in self.failed:
                self.breach(f"{track}: attempt {line['attempt']} is computed anew and has not failed", line)
        elif event == "first_token" and "token" in line:
            self._by_itself(line, track)
        elif event == "first_token":
            if track.stage != "scattered":
                self.breach(f"{track}: a token before the commit", line)
        elif line["to"] == "Failed":
            self.failed.add((track.node, track.epoch, line["attempt"]))
        elif event != "start" or line["to"] == "Transferring":
            if track.stage != self.AFTER[event]:
                self.breach(f"{track}: {event} when the last stage was {track.stage or 'none'}", line)
            track.stage = event
            if event == "scattered":
                life = self.ctx.lives[track.node, track.epoch]
                if not life.pages.get(track.attempt):
                    self.breach(f"{track}: scattered into pages that the attempt does not own", line)

    def _by_itself(self, line: dict[str, Any], track: Track) -> None:
        """A first token of a request that D has computed, under a token of its own."""
        life, token = self.ctx.lives[track.node, track.epoch], line["token"]
        if (track.node, track.epoch, token) not in self.recomputed:
            self.breach(f"{track}: a token that nothing was computed for", line)
        if not life.pages.get(token):
            self.breach(f"{track}: a token of pages that {token} does not own", line)


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
        if self.ctx.world.requests and track.room not in self.ctx.world.posted:
            self.breach(f"{track}: no request has this room", line)
        if line["from"] != "Absent" and (
            line["to"] != line["from"] or list(line["effects"]) != ["answer_duplicate"]
        ):
            self.breach(f"{track}: a second leg was not simply refused", line)


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
