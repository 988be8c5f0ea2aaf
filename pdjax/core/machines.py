"""python-statemachine classes generated from the table: the import-time lint, the diagrams, the shadow.

One class per role. They carry states, guards and order of rows, not effects; the compiled step is what runs (the
library is a thousand times slower: facts/formal). Forgetting a tombstone is no transition of the attempt, and the
final states have no way out, so rows that start in S or F are not in the classes.
"""

from __future__ import annotations

import types
from typing import Any, Final, cast

from statemachine import State, StateMachine

from pdjax.core import transitions as t


def _guard(row: t.Row) -> Any:
    wanted = [(c.lstrip("!"), not c.startswith("!")) for c in row.when]

    def holds(flags: frozenset[str] = frozenset()) -> bool:
        return all((name in flags) is want for name, want in wanted)

    holds.__name__ = "_".join(["when", *(c.replace("!", "not_") for c in row.when)])
    return holds


def make_machine(role: str) -> type[StateMachine]:
    """The class of one role. ``machine.send(event, flags=frozenset of conditions)``; an illegal event raises."""
    letters = {v: k for k, v in t.LETTERS.items()}
    states = {  # named values: the library takes 0 for "no value"
        value: State(
            t.STATE_NAMES[value],
            value=t.STATE_NAMES[value],
            initial=value == t.ABSENT,
            final=value in t.TERMINAL,
        )
        for value in letters
    }
    namespace: dict[str, Any] = {"in_" + t.STATE_NAMES[v].lower(): s for v, s in states.items()}
    events: dict[str, Any] = {}
    for row in t.ROWS:
        if row.role != role:
            continue
        for event in row.event.split():
            for letter in row.states:
                source = t.LETTERS[letter]
                if source in t.TERMINAL:
                    continue
                target = source if row.to == "=" else t.LETTERS[row.to]
                guard = {"cond": _guard(row)} if row.when else {}
                arrow = states[source].to(states[target], internal=row.to == "=", **guard)
                events[event] = events[event] | arrow if event in events else arrow
    namespace.update(events)
    made = types.new_class(
        f"{role.capitalize()}Machine", (StateMachine,), exec_body=lambda ns: ns.update(namespace)
    )
    return cast(type[StateMachine], made)


SenderMachine: Final = make_machine(t.SENDER)
ReceiverMachine: Final = make_machine(t.RECEIVER)
