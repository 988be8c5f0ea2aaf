"""trace.json, version 1: read, checked, written. The schema is the contract; ``trace_reader`` checks what it cannot say.

Every error names the key and the step. Must never accept a file that was not checked, or run anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdjax.sim.limits import MAX_DIGITS, MAX_FILE_BYTES, check_size, sayable, too_deep
from pdjax.sim.schema import SchemaError, TraceError, join, show, trace_schema, validate
from pdjax.sim.trace_reader import Reader
from pdjax.sim.trace_types import FORMAT, Trace


def load(path: Path) -> Trace:
    """Read and check a file. Raises TraceError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise TraceError("", error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise TraceError("", f"not UTF-8: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TraceError("", f"more than {MAX_FILE_BYTES:,} bytes: no trace is as large")
    return parse(loads(text))


@dataclass(frozen=True)
class _Trap:
    """What stands where JSON's own reader would have let something pass, until its place in the file is known."""

    text: str


def loads(text: str) -> Any:
    """JSON without its traps: no key twice, no NaN or Infinity, no endless number, no half of a character. Raises TraceError, which names the key and its step."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            found[key] = value if key not in found else _Trap("stands there twice")
        return found

    def constant(name: str) -> _Trap:
        return _Trap(f"{name} is no number")

    def integer(digits: str) -> int | _Trap:
        return int(digits) if len(digits) <= MAX_DIGITS else _Trap(f"a number of {len(digits)} digits")

    try:
        read = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer)
    except json.JSONDecodeError as error:
        raise TraceError("", f"not JSON: {error}") from None
    except RecursionError:
        raise TraceError("", "not a trace: nested too deep") from None
    if too_deep(read):
        raise TraceError("", "not a trace: nested too deep")
    _refuse_traps(read, "")
    return read


def _refuse_traps(value: Any, path: str) -> None:
    if isinstance(value, _Trap):
        raise TraceError(path, value.text)
    if isinstance(value, str) and not sayable(value):
        raise TraceError(path, f"{show(value)} has half of a character (a lone surrogate)")
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        if isinstance(key, str) and not sayable(key):
            raise TraceError(path, f"the key {show(key)} has half of a character (a lone surrogate)")
        _refuse_traps(item, join(path, key))


def parse(raw: Any) -> Trace:
    """Check a decoded file. Raises TraceError."""
    schema = trace_schema()
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        raise TraceError("format", f'"{FORMAT}" expected, {show(raw.get("format"))} found')
    try:
        validate(raw, schema, schema)
    except SchemaError as error:
        raise TraceError(error.path, error.text) from None
    check_size(raw)
    return Reader(raw).trace()


def dumps(raw: Mapping[str, Any]) -> str:
    """A file as people read it: one line for each step and choice."""
    parts = []
    for key, value in raw.items():
        if key in ("steps", "choices") and value:
            rows = ",\n".join("    " + json.dumps(item) for item in value)
            parts.append(f'  "{key}": [\n{rows}\n  ]')
        elif key == "world" and value:
            rows = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f'  "{key}": {{\n{rows}\n  }}')
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def save(path: Path, raw: Mapping[str, Any]) -> None:
    """Check and write."""
    parse(raw)
    path.write_text(dumps(raw), encoding="utf-8")
