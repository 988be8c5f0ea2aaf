"""What a violated property means, in words: the property, the row that showed it, the room's last moves, who owned what.

It reads a finished run and nothing else. Must never decide whether something is a violation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pdjax.core import transitions as t
from pdjax.core.trace import CACHE_TOKEN
from pdjax.sim.properties import NOT_SHOWN, SENTENCES, Violation

LAST_MOVES = 8


def meaning(name: str) -> str:
    """A property in words, whether or not anything violates it. KeyError: there is none of that name."""
    if name in NOT_SHOWN:
        return f"{name}: not shown by this simulator. {NOT_SHOWN[name]}"
    sentence, bound = SENTENCES[name]
    return f"{name}: {sentence}. Bound: {bound}."


def row_in_words(index: int) -> str:
    row = t.ROWS[index]
    when = " and ".join(c.replace("!", "not ") for c in row.when) or "always"
    target = "stays" if row.to == "=" else f"→ {row.to}"
    return (
        f"row {index} of the {row.role}: in {', '.join(row.states)} on {row.event}, {when}: {target}, "
        f"{', '.join(row.effects) or 'nothing'} ({row.why})"
    )


def explain(result: Any) -> str:
    """The whole text for a run."""
    lines = [json.loads(line) for line in result.log_lines]
    out: list[str] = []
    for violation in result.violations[:5]:
        out += [*_violation(violation, lines), ""]
    if len(result.violations) > 5:
        out += [f"and {len(result.violations) - 5} more", ""]
    out += [f"not as expected: {text}" for text in result.mismatches]
    if not out:
        return "Nothing to explain: no property is violated and every request ended as expected.\n"
    out.append("steps:")
    out += [f"  {i}: {json.dumps(step)}" for i, step in enumerate(result.trace.raw["steps"])]
    return "\n".join(out) + "\n"


def _violation(v: Violation, lines: list[dict[str, Any]]) -> Iterator[str]:
    yield f"at {v.t:g} ms {v.text}"
    yield f"  {meaning(v.property)}" if v.property in SENTENCES else f"  {v.property}: {v.sentence}"
    if v.row >= 0:
        yield f"  {row_in_words(v.row)}"
    before = [line for line in lines if line["t"] <= v.t + 0.001]
    found = re.search(r"room (\d+)", v.text)
    if found:
        room = int(found[1])
        moves = [x for x in before if "role" in x and int(x["room"]) == room]
        yield f"  room {room} until then:"
        for x in moves[-LAST_MOVES:]:
            who = f" from {x['peer']}" if "peer" in x else ""
            yield f"    {x['t']:>10} {x['node']} {x['event']}{who}: {x['from']} → {x['to']} {' '.join(x['effects'])}"
        yield from _owners(before, room, moves)
    yield "  what the file did until then:"
    for x in [x for x in before if x["node"] == "sim"][-LAST_MOVES:]:
        what = {k: x[k] for k in ("step", "action", "do", "message", "skipped") if k in x}
        yield f"    {x['t']:>10} {json.dumps(what)}"


def _owners(before: list[dict[str, Any]], room: int, moves: list[dict[str, Any]]) -> Iterator[str]:
    """Pages that are taken on the nodes of the room, by token; an attempt's own token is named."""
    nodes = list(dict.fromkeys(x["node"] for x in moves))
    names = {str(CACHE_TOKEN): "the prefix cache"}
    names |= {x["attempt"]: f"room {int(x['room'])}" for x in before if x.get("role") == t.RECEIVER}
    for node in nodes:
        held: dict[str, dict[int, None]] = {}
        for x in before:
            if x["node"] != node:
                continue
            if x["event"] in ("pages_taken", "pages_shared"):
                held.setdefault(x["token"], {}).update(dict.fromkeys(x["pages"]))
            elif x["event"] == "pages_freed":
                for page in x["pages"]:
                    held.get(x["token"], {}).pop(page, None)
        for token, pages in held.items():
            if pages:
                yield f"  pages {list(pages)} of {node} belong to {names.get(token, 'token ' + token)}"
