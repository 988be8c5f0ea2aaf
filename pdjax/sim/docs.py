"""docs/protocol.md, made from the table and the settings; a test compares, so the page cannot grow stale.

Must never state a rule that is not in the rows: prose around them says how to read, not what happens.
"""

from __future__ import annotations

import dataclasses

from pdjax.core import transitions as t
from pdjax.core import wire
from pdjax.core.reasons import REASONS
from pdjax.core.settings import PDSettings
from pdjax.sim.explore.diagrams import arrows

SIDES = {t.SENDER: "P (sender)", t.RECEIVER: "D (receiver)"}

INTRO = """# The hand-off protocol

<!-- Generated from pdjax/core by `sim docs --write`. Do not edit. -->

One prefill instance **P** computes the KV cache of a prompt, one decode instance **D** pulls it and continues. Every
request is one *room* (`bootstrap_room`, drawn by the router); each side keeps one record of it and runs it through
the table below. The same rows drive the serving processes, the simulator and the checker of event logs.

Identity, messages and timers, in short:

- An instance has an **epoch**, which grows with each life of the process. A message of an older life is dropped; the
  first message of a newer one ends what belonged to the old one.
- D mints an **attempt** for each leg and puts it into every message; it is also the token that owns D's pages.
- P mints a **uuid** for each registration, once: bytes are never offered twice under one name.
- A **digest** of the prompt and of the settings that decide the first token keeps two requests that share a room apart.
- A message proves its age by an echo of the receiver's own stamp. Older than the lease, or without proof, it is dropped
  and answered by a bare stamp; the sender repeats what it said before the first proof at once.
- P sends to a D over the connection of that D's newest frame; an older one, or one that is sent again, moves nothing.
- A **notice** (done or abort) repeats at 20 ms, doubling up to the hello interval, until its answer comes.
- After a failure on P the room's bytes stay charged in **limbo** until D says that it is quiet, or has died, or the
  limbo timer ends.
"""


def protocol_page() -> str:
    """The whole text of docs/protocol.md."""
    parts = [INTRO, _states(), _messages()]
    for role in (t.SENDER, t.RECEIVER):
        parts += [f"## {SIDES[role]}\n", diagram(role), _rows(role)]
    parts += [
        _glossary("Conditions", t.CONDITIONS),
        _glossary("Effects", t.EFFECTS),
        _glossary("Reasons", REASONS),
    ]
    parts.append(
        settings_table(
            "## Timers and limits\n\nChecked at start; a broken inequality is printed with its numbers.\n"
        )
    )
    return "\n".join(parts).rstrip() + "\n"


def _states() -> str:
    meaning = {
        "N": ("there is no record", "there is no record"),
        "B": ("accepted; the budget is not reserved yet", "looking for the P that has the room"),
        "W": ("the prompt may be prefilled", "bound to P; waits for ready, then for pages"),
        "T": (
            "packed KV waits under its uuid; the lease runs",
            "the pull is in flight, or landed and not scattered",
        ),
        "S": ("D said done", "every part is scattered into this attempt's pages"),
        "F": ("anything else, with a reason", "likewise"),
    }
    lines = ["## States\n", "| | name | KVPoll | P | D |", "|---|---|---|---|---|"]
    for letter, (p, d) in meaning.items():
        value = t.LETTERS[letter]
        number = "" if value == t.ABSENT else str(value)
        lines.append(f"| {letter} | {t.STATE_NAMES[value]} | {number} | {p} | {d} |")
    lines.append(
        "\nThe state of a group of ranks is the smallest of its members. Success and Failed absorb.\n"
    )
    return "\n".join(lines)


def _messages() -> str:
    lines = ["## Messages\n", "| message | way | carries |", "|---|---|---|"]
    for kind, name in wire.EVENT_OF.items():
        way = "D → P" if kind in wire.TO_SENDER else "P → D"
        fields = [f for f in kind.__struct_fields__ if f not in ("room", "attempt")]
        lines.append(f"| `{name}` | {way} | {', '.join(fields) or '–'} |")
    lines.append(
        "\nEach also carries room and attempt; the frame carries instance, epoch, stamp, echo and how long it was held.\n"
    )
    return "\n".join(lines)


def diagram(role: str) -> str:
    """States and the events that change them."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for (a, b), events in arrows(role).items():
        text = ", ".join(events[:6]) + (", …" if len(events) > 6 else "")
        lines.append(f"    {t.STATE_NAMES[t.LETTERS[a]]} --> {t.STATE_NAMES[t.LETTERS[b]]}: {text}")
    return "\n".join([*lines, "```\n"])


def _rows(role: str) -> str:
    lines = [
        "Rows of one state and event are tried from top to bottom. Where none applies, a message is STALE (counted,",
        "nothing changes) and a local event is ILLEGAL (the program never raises it there).\n",
        "| state | event | when | next | effects | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in t.ROWS:
        if row.role != role:
            continue
        when = " and ".join(c.replace("!", "not ") for c in row.when) or "–"
        target = "–" if row.to == "=" else row.to
        effects = ", ".join(row.effects) or "–"
        reason = f" (`{row.reason}`)" if row.reason else ""
        stale = "STALE; " if row.stale else ""
        events = ", ".join(f"`{e}`" for e in row.event.split())
        lines.append(
            f"| {', '.join(row.states)} | {events} | {when} | {target}{reason} | {stale}{effects} | {row.why} |"
        )
    return "\n".join([*lines, ""])


def _glossary(title: str, words: dict[str, str]) -> str:
    return "\n".join(
        [
            f"## {title}\n",
            "| name | meaning |",
            "|---|---|",
            *[f"| {k} | {v} |" for k, v in words.items()],
            "",
        ]
    )


def settings_table(title: str) -> str:
    """Every setting of the hand-off with its default."""
    lines = [title, "| flag | default | meaning |", "|---|---|---|"]
    for f in dataclasses.fields(PDSettings):
        default = f.default
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        lines.append(f"| `--{f.metadata['flag']}` | {shown} | {f.metadata['doc']} |")
    return "\n".join([*lines, ""])
