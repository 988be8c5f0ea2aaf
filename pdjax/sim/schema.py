"""Just as much of JSON Schema as trace.schema.json uses, with errors that name the key. Must never guess.

Numbers are as they stand in the file: 7.0 is no integer, true is no number, NaN and infinity are nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

Schema = Mapping[str, Any]


class TraceError(ValueError):
    """The file is wrong. path: the key, with its step; text: why."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}" if path else text)
        self.path, self.text = path, text


class SchemaError(ValueError):
    """path: where in the document; text: what is wrong there."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path or 'the file'}: {text}")
        self.path, self.text = path, text


@cache
def trace_schema() -> Schema:
    """The contract of pdjax.trace/1."""
    loaded: Schema = json.loads(resources.files("pdjax.sim").joinpath("trace.schema.json").read_text("utf-8"))
    return loaded


def validate(value: Any, schema: Schema, root: Schema, path: str = "") -> None:
    """Raises SchemaError at the first difference."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    for keyword, rule in schema.items():
        check = _CHECKS.get(keyword)
        if check is not None:
            check(value, rule, schema, root, path)


def _join(path: str, key: str | int) -> str:
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else key


def show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def _is(value: Any, kind: str) -> bool:
    if kind == "object":
        return isinstance(value, dict)
    if kind == "array":
        return isinstance(value, list)
    if kind == "string":
        return isinstance(value, str)
    if kind == "integer":
        return type(value) is int
    if kind == "number":
        return type(value) is int or (type(value) is float and math.isfinite(value))
    if kind == "boolean":
        return isinstance(value, bool)
    return kind == "null" and value is None


def _type(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    kinds = [rule] if isinstance(rule, str) else rule
    if not any(_is(value, kind) for kind in kinds):
        raise SchemaError(path, f"{' or '.join(kinds)} expected, {show(value)} found")


def _properties(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in rule:
                validate(item, rule[key], root, _join(path, key))


def _additional(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if not isinstance(value, dict):
        return
    known = schema.get("properties", {})
    for key, item in value.items():
        if key in known:
            continue
        if rule is False:
            raise SchemaError(_join(path, key), f"unknown key; known are {', '.join(known)}")
        if isinstance(rule, dict):
            validate(item, rule, root, _join(path, key))


def _required(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, dict):
        for key in rule:
            if key not in value:
                raise SchemaError(_join(path, key), "is missing")


def _items(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, list):
        for i, item in enumerate(value):
            validate(item, rule, root, _join(path, i))


def _const(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if value != rule:
        raise SchemaError(path, f"{show(rule)} expected, {show(value)} found")


def _enum(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if value not in rule:
        raise SchemaError(path, f"{show(value)} is unknown; one of {', '.join(map(str, rule))}")


def _pattern(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, str) and not re.fullmatch(rule, value):
        raise SchemaError(path, f"{show(value)} does not have the form {rule}")


def _bounds(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if type(value) not in (int, float):
        return
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and value < low:
        raise SchemaError(path, f"at least {low} expected, {show(value)} found")
    if high is not None and value > high:
        raise SchemaError(path, f"at most {high} expected, {show(value)} found")


def _length(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, str) and len(value) < rule:
        raise SchemaError(path, "must not be empty")


def _min_items(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, list) and len(value) < rule:
        raise SchemaError(path, f"at least {rule} of them expected")


def _max_items(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, list) and len(value) > rule:
        raise SchemaError(path, f"at most {rule} of them expected")


def _unique(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if isinstance(value, list) and len({json.dumps(v, sort_keys=True) for v in value}) < len(value):
        raise SchemaError(path, "one of them stands there twice")


def _holds(value: Any, schema: Schema, root: Schema) -> bool:
    try:
        validate(value, schema, root)
        return True
    except SchemaError:
        return False


def _one_of(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    n = sum(_holds(value, option, root) for option in rule)
    if n == 1:
        return
    if all(list(option) == ["required"] for option in rule):
        choices = ", ".join(key for option in rule for key in option["required"])
        raise SchemaError(path, f"exactly one of {choices} expected")
    for option in rule:  # the error of the option that is meant: the one of the value's own type
        target = root["$defs"][option["$ref"].removeprefix("#/$defs/")] if "$ref" in option else option
        kind = target.get("type")
        if n == 0 and (kind is None or _is(value, kind)):
            validate(value, option, root, path)
    raise SchemaError(path, f"{show(value)} is not of a form that is known here")


def _all_of(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    for option in rule:
        validate(value, option, root, path)


def _not(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if _holds(value, rule, root):
        keys = rule.get("required") or [k for o in rule.get("anyOf", ()) for k in o.get("required", ())]
        raise SchemaError(path, f"{', '.join(keys)} cannot stand here (together)")


def _any_of(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if not any(_holds(value, option, root) for option in rule):
        raise SchemaError(path, f"{show(value)} is not of a form that is known here")


def _if(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if _holds(value, rule, root) and "then" in schema:
        validate(value, schema["then"], root, path)


_CHECKS = {
    "type": _type,
    "properties": _properties,
    "additionalProperties": _additional,
    "required": _required,
    "items": _items,
    "const": _const,
    "enum": _enum,
    "pattern": _pattern,
    "minimum": _bounds,
    "maximum": _bounds,
    "minLength": _length,
    "minItems": _min_items,
    "maxItems": _max_items,
    "uniqueItems": _unique,
    "oneOf": _one_of,
    "allOf": _all_of,
    "anyOf": _any_of,
    "not": _not,
    "if": _if,
}
