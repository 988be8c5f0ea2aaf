"""Whether recorded event logs are runs that the table and the properties allow (protocol §10, as far as logs show).

The lines of several processes may be mixed in any order, as long as each process's own are in order: nothing is
concluded from comparing two clocks (S15). A log with a line removed, changed or repeated is refused. Must never
guess: what it cannot decide from the lines it does not report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdjax.core import transitions as t

NUMBERS = {name: value for value, name in t.STATE_NAMES.items()}
Life = tuple[str, str]  # (node, epoch)


@dataclass(frozen=True)
class Finding:
    """One breach. rule: a property of protocol §10, or "log" for a file that is no log."""

    rule: str
    text: str
    line: int = 0  # 1-based, in the order given; 0: about the whole

    def __str__(self) -> str:
        return f"{self.rule}{f' line {self.line}' if self.line else ''}: {self.text}"


@dataclass
class Line:
    """A decoded line with its place."""

    number: int
    raw: dict[str, Any]

    @property
    def life(self) -> Life:
        return str(self.raw["node"]), str(self.raw["epoch"])

    @property
    def room(self) -> int | None:
        return int(self.raw["room"]) if "room" in self.raw else None

    @property
    def event(self) -> str:
        return str(self.raw["event"])

    def get(self, name: str) -> Any:
        return self.raw.get(name)


def read(data: Iterable[bytes]) -> tuple[list[Line], list[Finding]]:
    """NDJSON lines → Lines; whatever is not a line of an event log is a finding."""
    lines: list[Line] = []
    wrong: list[Finding] = []
    for number, text in enumerate(data, 1):
        if not text.strip():
            continue
        try:
            raw = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong.append(Finding("log", f"not JSON: {error}", number))
            continue
        if not _is_line(raw):
            wrong.append(
                Finding("log", "a line has n, t, node, epoch and event, and rooms are exact integers", number)
            )
            continue
        lines.append(Line(number, raw))
    return lines, wrong


def _is_line(raw: Any) -> bool:
    if not isinstance(raw, dict) or not {"n", "t", "node", "epoch", "event"} <= raw.keys():
        return False
    room, token, pages = raw.get("room", 0), raw.get("token", 0), raw.get("pages", [])
    return (
        type(raw["n"]) is int
        and str(raw["epoch"]).isdecimal()
        and (type(room) is int or (isinstance(room, str) and room.isdecimal()))
        and isinstance(pages, list)
        and (not pages or ("token" in raw and str(token).isdecimal()))
        and all(type(page) is int for page in pages)
    )


def check(data: Iterable[bytes], *, complete: bool = False) -> list[Finding]:
    """Every breach in the merged logs. complete: the processes were quiet at the end, so nothing may be open."""
    lines, findings = read(data)
    for rule in RULES:
        findings += rule(lines)
    if complete:
        findings += all_closed(lines)
    return findings


# ---------------------------------------------------------------- the log itself


def numbered(lines: list[Line]) -> list[Finding]:
    """Each process numbers its lines from 0: none is missing, repeated or out of order."""
    expected: dict[Life, int] = {}
    found = []
    for line in lines:
        want = expected.get(line.life, 0)
        if line.get("n") != want:
            found.append(
                Finding("log", f"{line.life[0]}: line n={line.get('n')} where n={want} belongs", line.number)
            )
        expected[line.life] = int(line.get("n")) + 1
    return found


def transitions_of(lines: list[Line]) -> Iterable[Line]:
    return (line for line in lines if line.get("role") in (t.SENDER, t.RECEIVER))


def follows_table(lines: list[Line]) -> list[Finding]:
    """S6: each decision is a row of the table, and each room's states join end to start."""
    at: dict[tuple[Life, str, int], tuple[int, str]] = {}
    found = []
    for line in transitions_of(lines):
        role, room, event = str(line.get("role")), line.room, line.event
        source, target = NUMBERS.get(line.get("from")), NUMBERS.get(line.get("to"))
        cell = t.COMPILED[role].get(source if source is not None else -1, {}).get(event)
        if room is None or target is None or source is None or cell is None:
            found.append(Finding("S6", f"no such event or state: {event}", line.number))
            continue
        effects = tuple(line.get("effects") or ())
        if not any(c.effects == effects and (c.to if c.to >= 0 else source) == target for c in cell.choices):
            found.append(
                Finding(
                    "S6",
                    f"no row of {role} does {line.get('from')} {event} → {line.get('to')} {effects}",
                    line.number,
                )
            )
        key = (line.life, role, room)
        state, attempt = at.get(key, (t.ABSENT, ""))
        stranger = source == target == t.ABSENT  # a message of another attempt meets the table as no record
        if not stranger and source != state:
            text = f"{role} room {room} was {t.STATE_NAMES[state]}, this line starts in {line.get('from')}"
            found.append(Finding("S6", text, line.number))
        if not stranger:
            at[key] = (target, attempt)
    return found


# ---------------------------------------------------------------- properties


def pages_have_one_owner(lines: list[Line]) -> list[Finding]:
    """S1: a page is taken by one token at a time, and freed by that token."""
    owner: dict[tuple[Life, int], int] = {}
    found = []
    for line in lines:
        if line.event not in ("pages_taken", "pages_freed"):
            continue
        token = int(line.get("token"))
        for page in line.get("pages") or ():
            key = (line.life, int(page))
            if line.event == "pages_taken":
                if key in owner:
                    found.append(Finding("S1", f"page {page} of {line.life[0]} is taken twice", line.number))
                owner[key] = token
            elif owner.pop(key, None) != token:
                found.append(
                    Finding(
                        "S1",
                        f"page {page} of {line.life[0]} is freed by one that does not own it",
                        line.number,
                    )
                )
    return found


def decode_after_commit(lines: list[Line]) -> list[Finding]:
    """S2, S13: a receiver succeeds only after its pull was issued and every part of it has landed."""
    stage: dict[tuple[Life, int], str] = {}
    order = {"start": ("", "start"), "landed": ("start", "landed"), "scattered": ("landed", "scattered")}
    found = []
    for line in transitions_of(lines):
        if line.get("role") != t.RECEIVER or line.room is None:
            continue
        key = (line.life, line.room)
        if line.event in order and (line.event != "start" or line.get("to") == "Transferring"):
            before, after = order[line.event]
            if stage.get(key, "") != before:
                found.append(
                    Finding(
                        "S2",
                        f"room {line.room}: {line.event} without {before or 'a fresh room'}",
                        line.number,
                    )
                )
            stage[key] = after
        elif line.get("to") == "Absent" and line.get("from") != "Absent":
            stage.pop(key, None)
    return found


@dataclass
class _Charge:
    reserved: int = 0
    released: int = 0


def released_once(lines: list[Line]) -> list[Finding]:
    """S3, S17: what a sender reserves is given back or put in limbo exactly once, and never before it is reserved."""
    charges: dict[tuple[Life, int], _Charge] = {}
    found = []
    for line in transitions_of(lines):
        if line.get("role") != t.SENDER or line.room is None:
            continue
        charge = charges.setdefault((line.life, line.room), _Charge())
        for effect in line.get("effects") or ():
            charge.reserved += effect == "reserve"
            charge.released += effect in ("free_budget", "to_limbo")
        if charge.released > charge.reserved:
            found.append(
                Finding("S3", f"room {line.room}: budget released {charge.released} times", line.number)
            )
        if line.get("to") in ("Success", "Failed") and charge.released != charge.reserved:
            found.append(Finding("S3", f"room {line.room}: ended with its budget charged", line.number))
            charge.released = charge.reserved
    return found


def uuids_are_unique(lines: list[Line]) -> list[Finding]:
    """S4, S8: a uuid is registered once, by one room of one life."""
    seen: dict[str, int] = {}
    found = []
    for line in lines:
        if line.event == "registered":
            uuid = str(line.get("uuid"))
            if uuid in seen:
                found.append(
                    Finding("S8", f"uuid {uuid} was registered on line {seen[uuid]} already", line.number)
                )
            seen[uuid] = line.number
    return found


def attempts_are_fresh(lines: list[Line]) -> list[Finding]:
    """S5: no two legs share an attempt."""
    seen: dict[str, int] = {}
    found = []
    for line in transitions_of(lines):
        if line.get("role") == t.RECEIVER and "mint_attempt" in (line.get("effects") or ()):
            attempt = str(line.get("attempt"))
            if attempt in seen:
                found.append(
                    Finding(
                        "S5", f"attempt {attempt} was minted on line {seen[attempt]} already", line.number
                    )
                )
            seen[attempt] = line.number
    return found


def success_has_both_sides(lines: list[Line]) -> list[Finding]:
    """S13: what D scattered was registered by a P for this room; what P calls done, a D scattered."""
    registered = {str(x.get("uuid")): x.room for x in lines if x.event == "registered"}
    pulled = {str(x.get("uuid")): x for x in lines if x.event == "pull_started"}
    scattered = {(x.life, x.room) for x in transitions_of(lines) if x.event == "scattered"}
    found = []
    for uuid, line in pulled.items():
        if registered and registered.get(uuid, -1) != line.room:
            found.append(
                Finding(
                    "S13", f"room {line.room} pulled uuid {uuid}, which no P registered for it", line.number
                )
            )
    for line in transitions_of(lines):
        ended = line.get("to") == "Success" != line.get("from")
        if line.get("role") == t.SENDER and line.event == "done" and ended:
            source = pulled.get(str(line.get("uuid")))
            if pulled and (source is None or (source.life, source.room) not in scattered):
                found.append(
                    Finding("S13", f"room {line.room} is done on P, but no D scattered it", line.number)
                )
    return found


def first_token_after_success(lines: list[Line]) -> list[Finding]:
    """S2, S13: D shows a token of a room only once the room is a success."""
    good: set[tuple[Life, int | None]] = set()
    receivers = {x.life for x in lines if x.get("role") == t.RECEIVER}
    found = []
    for line in lines:
        if line.event == "scattered" and line.get("to") == "Success":
            good.add((line.life, line.room))
        if line.event == "first_token" and line.life in receivers and (line.life, line.room) not in good:
            found.append(Finding("S2", f"room {line.room}: a token before the commit", line.number))
    return found


def never_illegal(lines: list[Line]) -> list[Finding]:
    """S6: the program raises no event where the table has none."""
    return [Finding("S6", f"illegal: {x.get('detail')}", x.number) for x in lines if x.event == "illegal"]


def unexpected_effects(lines: list[Line]) -> list[Finding]:
    """S11: no port failed under the driver."""
    return [
        Finding("S11", f"{x.get('effect')}: {x.get('detail')}", x.number)
        for x in lines
        if x.event == "effect_failed"
    ]


RULES: list[Callable[[list[Line]], list[Finding]]] = [
    numbered,
    follows_table,
    pages_have_one_owner,
    decode_after_commit,
    released_once,
    uuids_are_unique,
    attempts_are_fresh,
    success_has_both_sides,
    first_token_after_success,
    never_illegal,
    unexpected_effects,
]


@dataclass
class _Open:
    rooms: dict[tuple[Life, str, int], str] = field(default_factory=dict)
    pages: dict[tuple[Life, int], int] = field(default_factory=dict)


def all_closed(lines: list[Line]) -> list[Finding]:
    """S3, V1, V2: at the end no room is live and no page is taken. Lives that were killed are not held to it."""
    newest: dict[str, int] = {}
    for line in lines:
        node, epoch = line.life
        newest[node] = max(newest.get(node, 0), int(epoch))
    state = _Open()
    for line in lines:
        if int(line.life[1]) != newest[line.life[0]]:
            continue
        if line.get("role") in (t.SENDER, t.RECEIVER) and line.room is not None:
            key = (line.life, str(line.get("role")), line.room)
            if not (line.get("from") == line.get("to") == "Absent"):
                state.rooms[key] = str(line.get("to"))
        for page in line.get("pages") or ():
            if line.event == "pages_taken":
                state.pages[line.life, int(page)] = line.number
            elif line.event == "pages_freed":
                state.pages.pop((line.life, int(page)), None)
    live = {t.STATE_NAMES[s] for s in t.LIVE}
    found = [
        Finding("V1", f"{role} room {room} of {life[0]} is still {s}")
        for (life, role, room), s in state.rooms.items()
        if s in live
    ]
    found += [Finding("S3", f"page {page} of {life[0]} is still taken") for life, page in state.pages]
    return found
