"""Whether recorded event logs are runs that the table and the properties allow (protocol §10, as far as logs show).

The lines of several processes may be mixed in any order, as long as each process's own are in order: nothing is
concluded from comparing two clocks (S15). A log with a line removed, changed or repeated is refused. Must never
guess: what it cannot decide from the lines it does not report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdjax.core import transitions as t
from pdjax.core.log_lines import Finding, Life, Line, Log, read
from pdjax.core.trace import CACHE_TOKEN

NUMBERS = {name: value for value, name in t.STATE_NAMES.items()}


def check(data: Iterable[bytes], *, complete: bool = False) -> list[Finding]:
    """Every breach in the merged logs. complete: the processes were quiet at the end, so nothing may be open."""
    lines, findings = read(data)
    findings += broken(lines)
    if complete:
        findings += all_closed(lines)
    return findings


# ---------------------------------------------------------------- the log itself


def numbered(log: Log) -> list[Finding]:
    """Each process numbers its lines from 0: none is missing, repeated or out of order."""
    expected: dict[Life, int] = {}
    found = []
    for line in log.lines:
        n, want = line.raw["n"], expected.get(line.life, 0)
        if n != want:
            found.append(Finding("log", f"{line.life[0]}: line n={n} where n={want} belongs", line.number))
        expected[line.life] = n + 1
    return found


def follows_table(log: Log) -> list[Finding]:
    """S6: each decision is a row of the table, and each room's states join end to start."""
    return _follows(t.SENDER, log.sender) + _follows(t.RECEIVER, log.receiver)


def _follows(role: str, lines: list[Line]) -> list[Finding]:
    table = t.COMPILED[role]
    at: dict[tuple[Life, int], int] = {}
    found = []
    for line in lines:
        raw, room = line.raw, line.room
        source, target = NUMBERS.get(str(raw.get("from"))), NUMBERS.get(str(raw.get("to")))
        cell = table.get(source if source is not None else -1, {}).get(line.event)
        if room is None or target is None or source is None or cell is None:
            found.append(Finding("S6", f"no such event or state: {line.event}", line.number))
            continue
        effects = tuple(raw.get("effects") or ())
        for c in cell.choices:
            if c.effects == effects and (c.to if c.to >= 0 else source) == target:
                break
        else:
            text = f"no row of {role} does {raw['from']} {line.event} → {raw['to']} {effects}"
            found.append(Finding("S6", text, line.number))
        if source == target == t.ABSENT:
            continue  # a message of another attempt meets the table as no record
        key = (line.life, room)
        state = at.get(key, t.ABSENT)
        if source != state:
            text = f"{role} room {room} was {t.STATE_NAMES[state]}, this line starts in {raw['from']}"
            found.append(Finding("S6", text, line.number))
        at[key] = target
    return found


# ---------------------------------------------------------------- properties


def pages_have_one_owner(log: Log) -> list[Finding]:
    """S1: a page is taken when nobody holds it, shared while somebody does, and freed by each token that holds it."""
    holders: dict[tuple[Life, int], set[int]] = {}
    found = []
    for line in log.of("pages_taken", "pages_shared", "pages_freed"):
        token = int(line.get("token"))
        for page in line.get("pages") or ():
            held = holders.setdefault((line.life, int(page)), set())
            wrong = ""
            if line.event == "pages_taken":
                wrong = "taken twice" if held else ""
                held.clear()
                held.add(token)
            elif line.event == "pages_shared":
                wrong = "" if held and token not in held else "shared by one that has it, or by none"
                held.add(token)
            elif token in held:
                held.remove(token)
            else:
                wrong = "freed by one that does not own it"
            if wrong:
                found.append(Finding("S1", f"page {page} of {line.life[0]} is {wrong}", line.number))
    return found


def slots_have_one_owner(log: Log) -> list[Finding]:
    """S1, S3: a host slot is taken when no room has it, filled by what that room offers, and given back by it once.

    One that a D may still be reading (quiet false) is never taken again.
    """
    holders: dict[tuple[Life, int], int | None] = {}
    lost: set[tuple[Life, int]] = set()
    found = []
    for line in log.of("slot_taken", "slot_freed"):
        slot = (line.life, int(line.get("slot")))
        holder, wrong = holders.get(slot), ""
        if line.event == "slot_taken":
            holders[slot] = line.room
            if slot in lost:
                wrong = f"taken by room {line.room} although a pull may still read it"
            elif holder is not None:
                wrong = f"taken by room {line.room} while room {holder} holds it"
        else:
            holders[slot] = None
            if holder != line.room:
                wrong = f"given back by room {line.room}, which does not hold it"
            if not line.get("quiet"):
                lost.add(slot)
        if wrong:
            found.append(Finding("S1", f"slot {slot[1]} of {line.life[0]} is {wrong}", line.number))
    return found


def decode_after_commit(log: Log) -> list[Finding]:
    """S2, S13: a receiver succeeds only after its pull was issued and every part of it has landed."""
    stage: dict[tuple[Life, int], str] = {}
    order = {"start": ("", "start"), "landed": ("start", "landed"), "scattered": ("landed", "scattered")}
    found = []
    for line in log.receiver:
        if line.room is None:
            continue
        if line.event in order and (line.event != "start" or line.get("to") == "Transferring"):
            key = (line.life, line.room)
            before, after = order[line.event]
            if stage.get(key, "") != before:
                text = f"room {line.room}: {line.event} without {before or 'a fresh room'}"
                found.append(Finding("S2", text, line.number))
            stage[key] = after
        elif line.get("to") == "Absent" and line.get("from") != "Absent":
            stage.pop((line.life, line.room), None)
    return found


@dataclass
class _Charge:
    reserved: int = 0
    released: int = 0


def released_once(log: Log) -> list[Finding]:
    """S3, S17: what a sender reserves is given back or put in limbo exactly once, and never before it is reserved."""
    charges: dict[tuple[Life, int], _Charge] = {}
    found = []
    for line in log.sender:
        if line.room is None:
            continue
        key = (line.life, line.room)
        charge = charges.get(key)
        if charge is None:
            charge = charges[key] = _Charge()
        for effect in line.get("effects") or ():
            charge.reserved += effect == "reserve"
            charge.released += effect in ("free_budget", "to_limbo")
        if charge.released > charge.reserved:
            text = f"room {line.room}: budget released {charge.released} times"
            found.append(Finding("S3", text, line.number))
        if line.get("to") in ("Success", "Failed") and charge.released != charge.reserved:
            found.append(Finding("S3", f"room {line.room}: ended with its budget charged", line.number))
            charge.released = charge.reserved
    return found


def uuids_are_unique(log: Log) -> list[Finding]:
    """S4, S8: a uuid is registered once, by one room of one life."""
    seen: dict[str, int] = {}
    found = []
    for line in log.of("registered"):
        uuid = str(line.get("uuid"))
        if uuid in seen:
            text = f"uuid {uuid} was registered on line {seen[uuid]} already"
            found.append(Finding("S8", text, line.number))
        seen[uuid] = line.number
    return found


def attempts_are_fresh(log: Log) -> list[Finding]:
    """S5: no two legs share an attempt."""
    seen: dict[str, int] = {}
    found = []
    for line in log.receiver:
        if "mint_attempt" in (line.get("effects") or ()):
            attempt = str(line.get("attempt"))
            if attempt in seen:
                text = f"attempt {attempt} was minted on line {seen[attempt]} already"
                found.append(Finding("S5", text, line.number))
            seen[attempt] = line.number
    return found


def success_has_both_sides(log: Log) -> list[Finding]:
    """S13: what D scattered was registered by a P for this room; what P calls done, a D scattered."""
    registered = {str(x.get("uuid")): x.room for x in log.of("registered")}
    pulled = {str(x.get("uuid")): x for x in log.of("pull_started")}
    scattered = {(x.life, x.room) for x in log.of("scattered") if x.role}
    found = []
    for uuid, line in pulled.items():
        if registered and registered.get(uuid, -1) != line.room:
            text = f"room {line.room} pulled uuid {uuid}, which no P registered for it"
            found.append(Finding("S13", text, line.number))
    for line in log.of("done"):
        ended = line.get("to") == "Success" != line.get("from")
        if line.role == t.SENDER and ended:
            source = pulled.get(str(line.get("uuid")))
            if pulled and (source is None or (source.life, source.room) not in scattered):
                text = f"room {line.room} is done on P, but no D scattered it"
                found.append(Finding("S13", text, line.number))
    return found


def first_token_after_success(log: Log) -> list[Finding]:
    """S2, S13: D shows a token of a room once the room is a success, or has failed and D computes it under another token."""
    good: set[tuple[Life, int | None]] = set()
    failed: set[tuple[Life, int | None]] = set()
    recomputed: set[tuple[Life, str]] = set()
    receivers = {x.life for x in log.receiver}
    found = []
    for line in sorted([*log.receiver, *log.of("first_token", "recompute")], key=lambda x: x.number):
        key, own = (line.life, line.room), (line.life, str(line.get("token")))
        if line.role:
            if line.get("to") in ("Success", "Failed"):
                (good if line.get("to") == "Success" else failed).add(key)
        elif line.event == "recompute":
            recomputed.add(own)
            if key not in failed:
                text = f"room {line.room}: computed anew, but its hand-off has not failed"
                found.append(Finding("S2", text, line.number))
        elif line.life in receivers and own not in recomputed and key not in good:
            found.append(Finding("S2", f"room {line.room}: a token before the commit", line.number))
    return found


def never_illegal(log: Log) -> list[Finding]:
    """S6: the program raises no event where the table has none."""
    return [Finding("S6", f"illegal: {x.get('detail')}", x.number) for x in log.of("illegal")]


def unexpected_effects(log: Log) -> list[Finding]:
    """S11: no port failed under the driver."""
    return [
        Finding("S11", f"{x.get('effect')}: {x.get('detail')}", x.number) for x in log.of("effect_failed")
    ]


RULES: list[Callable[[Log], list[Finding]]] = [
    numbered,
    follows_table,
    pages_have_one_owner,
    slots_have_one_owner,
    decode_after_commit,
    released_once,
    uuids_are_unique,
    attempts_are_fresh,
    success_has_both_sides,
    first_token_after_success,
    never_illegal,
    unexpected_effects,
]


def broken(lines: list[Line]) -> list[Finding]:
    """Every breach that lines show, whatever is still open at their end."""
    log = Log(lines)
    return [finding for rule in RULES for finding in rule(log)]


@dataclass
class _Open:
    rooms: dict[tuple[Life, str, int], str] = field(default_factory=dict)
    pages: set[tuple[Life, int, int]] = field(default_factory=set)
    slots: set[tuple[Life, int]] = field(default_factory=set)


def all_closed(lines: list[Line]) -> list[Finding]:
    """S3, V1, V2: at the end no room is live, no page is taken, except by a prefix cache, and no host slot is.

    Lives that were killed are not held to it.
    """
    newest: dict[str, int] = {}
    for line in lines:
        node, epoch = line.life
        newest[node] = max(newest.get(node, 0), int(epoch))
    state = _Open()
    for line in lines:
        if int(line.life[1]) != newest[line.life[0]]:
            continue
        if line.role in (t.SENDER, t.RECEIVER) and line.room is not None:
            key = (line.life, line.role, line.room)
            if not (line.get("from") == line.get("to") == "Absent"):
                state.rooms[key] = str(line.get("to"))
        if pages := line.get("pages"):
            token = int(line.get("token"))
            held = {(line.life, int(page), token) for page in pages if token != CACHE_TOKEN}
            state.pages = state.pages - held if line.event == "pages_freed" else state.pages | held
        if line.event == "slot_taken":
            state.slots.add((line.life, int(line.get("slot"))))
        elif line.event == "slot_freed":
            state.slots.discard((line.life, int(line.get("slot"))))
    live = {t.STATE_NAMES[s] for s in t.LIVE}
    found = [
        Finding("V1", f"{role} room {room} of {life[0]} is still {s}")
        for (life, role, room), s in state.rooms.items()
        if s in live
    ]
    found += [
        Finding("S3", f"page {page} of {life[0]} is still taken") for life, page, _ in sorted(state.pages)
    ]
    found += [Finding("S3", f"slot {slot} of {life[0]} is still taken") for life, slot in sorted(state.slots)]
    return found
