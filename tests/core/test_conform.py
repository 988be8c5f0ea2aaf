"""A log of a real run passes, and every single deletion, swap or repetition in it is refused."""

import json
import random

import pytest

from pdjax.core import conform
from pdjax.core.settings import PDSettings
from pdjax.sim.world import World


@pytest.fixture(scope="module")
def log():
    world = World(2, 2)
    done = []
    for room in range(6):
        p, d = world.request(room, list(range(1, 10 + room)), 4, p=f"p{room % 2}", d=f"d{room // 2 % 2}")
        done += [p, d]
    assert world.run(lambda: all(c.end is not None for c in done), 60)
    world.nodes["d0"].manager.note("ended")
    world.run(limit_s=100)
    return list(world.lines)


def test_a_run_passes(log):
    assert conform.check(log, complete=True) == []


def test_every_removed_line_is_refused(log):
    """But for the last line of a process, whose loss no number can show while the file goes on."""
    last = {json.loads(x)["node"]: i for i, x in enumerate(log)}
    for i in range(len(log)):
        if i not in last.values():
            assert conform.check(log[:i] + log[i + 1 :]), log[i]


def test_every_repeated_line_is_refused(log):
    for i in range(0, len(log), 7):
        assert conform.check([*log[: i + 1], log[i], *log[i + 1 :]])


def test_the_lines_of_two_processes_may_mix_in_any_order(log):
    by_life: dict[str, list[bytes]] = {}
    for line in log:
        by_life.setdefault(json.loads(line)["node"], []).append(line)
    rng, mixed = random.Random(3), []
    while by_life:
        node = rng.choice(sorted(by_life))
        mixed.append(by_life[node].pop(0))
        if not by_life[node]:
            del by_life[node]
    assert conform.check(mixed, complete=True) == []


def renumber(log):
    counts: dict[str, int] = {}
    for line in log:
        raw = json.loads(line)
        raw["n"] = counts.get(raw["node"], 0)
        counts[raw["node"]] = raw["n"] + 1
        yield json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        ("landed", "S2"),
        ("admit", "S6"),
        ("kv_ready", "S6"),
        ("registered", "S13"),
        ("scattered", "S6"),
        ("start", "S6"),
    ],
)
def test_a_removed_line_is_seen_even_when_the_numbers_are_mended(log, event, rule):
    first = next(i for i, x in enumerate(log) if json.loads(x)["event"] == event)
    found = conform.check(renumber(log[:first] + log[first + 1 :]))
    assert rule in {f.rule for f in found}


def edit(log, event, changes):
    for i, x in enumerate(log):
        raw = json.loads(x)
        if raw["event"] == event:
            return [*log[:i], json.dumps({**raw, **changes}).encode(), *log[i + 1 :]]
    raise AssertionError(event)


@pytest.mark.parametrize(
    ("event", "changes", "rule"),
    [
        ("done", {"effects": ["say_done_ack", "bury"]}, "S3"),
        ("leg", {"to": "Success"}, "S6"),
        ("kv_ready", {"event": "nonsense"}, "S6"),
        ("ready", {"to": "Paradise"}, "S6"),
    ],
)
def test_a_changed_line_is_refused(log, event, changes, rule):
    assert rule in {f.rule for f in conform.check(edit(log, event, changes))}


def test_pages_with_two_owners_are_refused():
    def line(n, event, token, pages):
        return json.dumps(
            {"n": n, "t": 0, "node": "d0", "epoch": "1", "event": event, "token": token, "pages": pages}
        ).encode()

    good = [
        line(0, "pages_taken", 1, [1, 2]),
        line(1, "pages_freed", 1, [1, 2]),
        line(2, "pages_taken", 2, [2]),
    ]
    assert conform.check(good) == []
    assert [f.rule for f in conform.check(good, complete=True)] == ["S3"]
    assert [f.rule for f in conform.check([good[0], line(1, "pages_taken", 2, [2])])] == ["S1"]
    assert [f.rule for f in conform.check([good[0], line(1, "pages_freed", 2, [2])])] == ["S1"]


def test_pages_of_a_prefix_cache_are_shared_while_somebody_holds_them():
    def lines(*events):
        return [
            json.dumps(
                {"n": n, "t": 0, "node": "p0", "epoch": "1", "event": event, "token": token, "pages": pages}
            ).encode()
            for n, (event, token, pages) in enumerate(events)
        ]

    first = [("pages_taken", "1", [1, 2]), ("pages_shared", "0", [1])]
    freed = ("pages_freed", "1", [1, 2])
    again = [("pages_taken", "2", [2]), ("pages_shared", "2", [1])]
    assert conform.check(lines(*first, freed), complete=True) == []  # the cache keeps page 1
    whole = [*first, freed, *again, ("pages_freed", "2", [1, 2]), ("pages_freed", "0", [1])]
    assert conform.check(lines(*whole), complete=True) == []
    assert [f.rule for f in conform.check(lines(*first), complete=True)] == ["S3", "S3"]
    for wrong in (
        [*first, freed, ("pages_taken", "2", [1])],  # the cache holds it
        [*first, freed, ("pages_shared", "2", [2])],  # nobody does
        [*first, ("pages_shared", "1", [1])],  # twice
        [*first, freed, ("pages_freed", "1", [1])],  # twice
        [*first, ("pages_freed", "3", [1])],  # never
        [*whole, ("pages_freed", "0", [1])],  # evicted twice
    ):
        assert [f.rule for f in conform.check(lines(*wrong))] == ["S1"], wrong


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"n": 1}',
        b'{"n": "0", "t": 0, "node": "a", "epoch": "1", "event": "x"}',
        b'{"n": 0, "t": 0, "node": "a", "epoch": "one", "event": "x"}',
        b'{"n": 0, "t": 0, "node": "a", "epoch": "1", "event": "x", "room": 1.5}',
        b'{"n": 0, "t": 0, "node": "a", "epoch": "1", "event": "pages_taken", "pages": [1]}',
    ],
)
def test_what_is_no_log_is_said_so(text):
    assert [f.rule for f in conform.check([text])] == ["log"]


# ---------------------------------------------------------------- host slots


@pytest.fixture(scope="module")
def staged_log():
    world = World(settings=PDSettings(host_staging=True))
    done = [client for room in range(3) for client in world.request(room, list(range(1, 10)), 4)]
    assert world.run(lambda: all(c.end is not None for c in done), 60)
    world.run(limit_s=100)
    return list(world.lines)


def test_a_run_with_host_staging_passes(staged_log):
    events = [json.loads(x)["event"] for x in staged_log]
    assert events.count("slot_taken") == events.count("slot_freed") == 3
    assert conform.check(staged_log, complete=True) == []


@pytest.mark.parametrize(
    ("event", "changes", "says"),
    [
        ("slot_freed", {"room": 99}, "given back by room 99, which does not hold it"),
        ("slot_freed", {"slot": 99}, "given back by room"),
        ("slot_freed", {"quiet": False}, "although a pull may still read it"),
        ("slot_freed", {"event": "note"}, "holds it"),
        ("slot_taken", {"event": "note"}, "which does not hold it"),
    ],
)
def test_a_slot_that_two_rooms_use_is_seen(staged_log, event, changes, says):
    """One slot for all: each room takes it after the one before has given it back."""
    one = [x if b'"slot"' not in x else json.dumps({**json.loads(x), "slot": 1}).encode() for x in staged_log]
    lines = in_turn(one)
    assert conform.check(lines, complete=True) == []
    found = [str(f) for f in conform.check(edit(lines, event, changes)) if f.rule == "S1"]
    assert found and says in found[0], found


def in_turn(log):
    """The slot lines of a log as if its rooms had come one after the other: the rest of the log stays as it is."""
    slots = [json.loads(x) for x in log if b'"slot"' in x]
    places = [i for i, x in enumerate(log) if b'"slot"' in x]
    by_room = sorted(slots, key=lambda raw: (raw["room"], raw["event"] == "slot_freed"))
    out = list(log)
    for place, raw in zip(places, by_room, strict=True):
        n = json.loads(log[place])["n"]
        out[place] = json.dumps({**raw, "n": n}).encode()
    return out


def test_a_slot_that_stays_with_its_room_is_seen_at_the_end(staged_log):
    last = [i for i, x in enumerate(staged_log) if json.loads(x)["event"] == "slot_freed"][-1]
    kept = list(renumber(staged_log[:last] + staged_log[last + 1 :]))
    assert [str(f) for f in conform.check(kept, complete=True)] == ["S3: slot 3 of p0 is still taken"]


def test_a_slot_line_without_a_slot_is_no_line(staged_log):
    found = conform.check(edit(staged_log, "slot_taken", {"slot": "x"}))
    assert "log" in {f.rule for f in found}
