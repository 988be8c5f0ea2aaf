"""The logs of a fleet that many files share: who is charged with a breach, and that no line is decoded twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from pdjax.campaign.logs import Logs
from pdjax.core import log_lines


def fleet(directory: Path, dead: str = ""):
    return SimpleNamespace(
        instances=["p0", "d0"],
        seats={name: SimpleNamespace(alive=name != dead) for name in ("p0", "d0")},
        log_files=lambda: sorted(directory.glob("*.ndjson")),
    )


class Written:
    """The log of one life, as a process would write it."""

    def __init__(self, directory: Path, node: str, epoch: int = 1) -> None:
        self.path = directory / f"{node}-{epoch}.ndjson"
        self._base = {"node": node, "epoch": str(epoch)}
        self._n = 0
        self.put("started")

    def put(self, event: str, **more) -> None:
        line = {"n": self._n, "t": float(self._n), **self._base, "event": event, **more}
        self._n += 1
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def leg(self, room: int) -> None:
        self.put(
            "leg",
            room=str(room),
            role="sender",
            row=3,
            effects=["arm_request"],
            **between("Absent", "Bootstrapping"),
        )

    def admit(self, room: int) -> None:
        self.put(
            "admit",
            room=str(room),
            role="sender",
            row=55,
            effects=["reserve"],
            **between("Bootstrapping", "WaitingForInput"),
        )

    def aborted(self, room: int) -> None:
        self.put(
            "abort_local",
            room=str(room),
            role="sender",
            row=0,
            effects=[],
            **between("Bootstrapping", "Failed"),
        )


def between(before: str, after: str):
    return {"from": before, "to": after, "attempt": "0"}


def part(logs: Logs) -> list[str]:
    """What the file is charged with that ran since the last call: what is open, not whether the lines are legal."""
    before = logs.more()
    return [what for what in logs.breaches(before) if "still" in what]


def test_what_a_file_leaves_open_is_charged_to_it_and_to_no_later_one(tmp_path):
    p, logs = Written(tmp_path, "p0"), Logs(fleet(tmp_path))
    p.leg(1)
    p.put("pages_taken", token="1", pages=[4])
    p.put("slot_taken", room="1", slot=2)
    assert part(logs) == [
        "V1: sender room 1 of p0 is still Bootstrapping",
        "S3: page 4 of p0 is still taken",
        "S3: slot 2 of p0 is still taken",
    ]
    assert part(logs) == []
    p.admit(1)  # the older file's room lives on
    p.leg(2)
    assert part(logs) == ["V1: sender room 2 of p0 is still Bootstrapping"]


def test_a_room_that_is_used_again_is_charged_to_who_uses_it(tmp_path):
    p, logs = Written(tmp_path, "p0"), Logs(fleet(tmp_path))
    p.leg(1)
    assert len(part(logs)) == 1
    p.aborted(1)
    assert part(logs) == []
    p.leg(1)
    assert part(logs) == ["V1: sender room 1 of p0 is still Bootstrapping"]


def test_a_dead_process_and_a_former_life_owe_nothing(tmp_path):
    Written(tmp_path, "d0").leg(1)
    former, newest = Written(tmp_path, "p0", 1), Written(tmp_path, "p0", 2)
    former.leg(2)
    newest.leg(3)
    assert part(Logs(fleet(tmp_path, dead="d0"))) == ["V1: sender room 3 of p0 is still Bootstrapping"]


def test_lines_keep_their_numbers_and_are_decoded_once(tmp_path, monkeypatch):
    seen: list[bytes] = []
    read = log_lines.read
    monkeypatch.setattr(log_lines, "read", lambda data: read([seen.append(line) or line for line in data]))
    p, logs = Written(tmp_path, "p0"), Logs(fleet(tmp_path))
    p.path.write_bytes(p.path.read_bytes() + b"no line\n")
    assert len([what for what in logs.breaches(logs.more()) if "not JSON" in what]) == 1
    for room in range(3):
        p.leg(room)
        before = logs.more()
        assert [line.room for line in logs.since(before)] == [room]
        assert logs.since(before)[0].number == len(logs.lines) == before + 1
        assert not any("not JSON" in what for what in logs.breaches(before))
    assert seen == logs.lines and len(seen) == 5


def test_half_a_line_waits_for_its_other_half(tmp_path):
    p, logs = Written(tmp_path, "p0"), Logs(fleet(tmp_path))
    whole = p.path.read_bytes()
    p.path.write_bytes(whole[:20])
    assert (logs.more(), logs.lines) == (0, [])
    p.path.write_bytes(whole)
    assert (logs.more(), len(logs.decoded)) == (0, 1)
