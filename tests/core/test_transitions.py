"""The table is total, its two forms agree everywhere, and every row can be reached."""

import itertools

import pytest
from statemachine.exceptions import TransitionNotAllowed

from pdjax.core import transitions as t
from pdjax.core.machines import ReceiverMachine, SenderMachine

MACHINES = {t.SENDER: SenderMachine, t.RECEIVER: ReceiverMachine}
ALL_CELLS = [
    (role, state, event)
    for role in (t.SENDER, t.RECEIVER)
    for state in t.LETTERS.values()
    for event in sorted(t.WIRE_EVENTS[role] | t.LOCAL_EVENTS[role])
]


def assignments(cell):
    """Every truth assignment of the cell's conditions, as the frozenset of those that hold."""
    for values in itertools.product((False, True), repeat=len(cell.conditions)):
        yield frozenset(c for c, v in zip(cell.conditions, values, strict=True) if v)


def test_total_over_every_role_state_event_and_condition():
    for role, state, event in ALL_CELLS:
        cell = t.COMPILED[role][state][event]
        for flags in assignments(cell):
            choice = t.step(role, state, event, flags.__contains__)
            assert choice.kind in ("row", "stale", "illegal")
            assert (choice.kind == "illegal") <= (event in t.LOCAL_EVENTS[role]), "wire input never raises"


def test_defaults_are_stale_for_the_wire_and_illegal_for_the_program():
    assert t.step(t.RECEIVER, t.LETTERS["W"], "done_ack", lambda c: False).kind == "stale"
    assert t.step(t.SENDER, t.LETTERS["T"], "admit", lambda c: True).kind == "illegal"
    assert t.step(t.RECEIVER, t.LETTERS["S"], "scattered", lambda c: True).kind == "illegal"


@pytest.mark.parametrize("role", [t.SENDER, t.RECEIVER])
def test_both_forms_agree_on_every_state_event_and_condition(role):
    compared = 0
    for _, state, event in [c for c in ALL_CELLS if c[0] == role]:
        if state in t.TERMINAL:
            continue  # the library refuses transitions out of final states: see below
        for flags in assignments(t.COMPILED[role][state][event]):
            choice = t.step(role, state, event, flags.__contains__)
            machine = MACHINES[role](start_value=t.STATE_NAMES[state])
            if choice.kind == "illegal" or (choice.kind == "stale" and choice.row < 0):
                with pytest.raises(TransitionNotAllowed):
                    machine.send(event, flags=flags)
            else:
                machine.send(event, flags=flags)
            wanted = state if choice.to < 0 else choice.to
            assert machine.current_state_value == t.STATE_NAMES[wanted], (role, state, event, sorted(flags))
            compared += 1
    assert compared > 150


def test_success_and_failed_absorb():
    for role, state, event in ALL_CELLS:
        if state in t.TERMINAL:
            for choice in t.COMPILED[role][state][event].choices:
                assert choice.to in (-1, t.ABSENT), (role, state, event)
                assert choice.to == -1 or event == "tombstone_timer"


def test_every_row_is_chosen_by_some_assignment():
    chosen = set()
    for role, state, event in ALL_CELLS:
        for flags in assignments(t.COMPILED[role][state][event]):
            chosen.add(t.step(role, state, event, flags.__contains__).row)
    dead = [t.ROWS[i] for i in range(len(t.ROWS)) if i not in chosen]
    assert not dead


def test_an_end_releases_what_the_state_holds():
    """S3, on the rows themselves: leaving W or T of the sender frees or limbos the budget, once."""
    for row in t.ROWS:
        if row.role != t.SENDER or row.to not in ("S", "F") or not set(row.states) & set("WT"):
            continue
        assert row.states in ("W", "T"), f"one state a row, so that its effects fit: {row}"
        releases = [e for e in row.effects if e in ("free_budget", "to_limbo")]
        assert len(releases) == 1, row
        assert row.states != "T" or {"withdraw", "drop_arrays", "release_arrays"} & set(row.effects), row
    for row in t.ROWS:
        if row.role == t.RECEIVER and row.to == "F" and "T" in row.states and row.event != "peer_failed":
            settled = "abandon_pull" in row.effects or "quiet" in row.when
            assert settled, f"a pull in flight must go to the graveyard: {row}"


@pytest.mark.parametrize(
    "row",
    [
        t.Row(t.SENDER, "B", "nonsense", "F", (), (), "x"),
        t.Row(t.SENDER, "B", "leg", "X", (), (), "x"),
        t.Row(t.SENDER, "B", "leg", "F", ("maybe",), (), "x"),
        t.Row(t.SENDER, "B", "leg", "F", (), ("explode",), "x"),
        t.Row(t.SENDER, "B", "leg", "F", (), (), ""),
    ],
)
def test_a_wrong_row_is_refused(row):
    with pytest.raises(ValueError):
        t.compile_rows([row])


def test_a_row_behind_an_unconditional_one_is_refused():
    rows = [t.Row(t.SENDER, "B", "leg", "F", (), (), "x"), t.Row(t.SENDER, "B", "leg", "S", (), (), "x")]
    with pytest.raises(ValueError, match="never be reached"):
        t.compile_rows(rows)


def test_deleting_or_retargeting_a_row_is_seen():
    """The agreement test compares two readings of the same rows; this one shows that they are read."""
    rows = [r for r in t.ROWS if not (r.role == t.SENDER and r.event == "done" and r.to == "S")]
    table = t.compile_rows(rows)
    assert all(c.to != t.LETTERS["S"] for c in table[t.SENDER][t.LETTERS["T"]]["done"].choices)
