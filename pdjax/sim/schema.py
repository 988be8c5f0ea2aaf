"""Just as much of JSON Schema as trace.schema.json uses, with errors that name the key. Must never guess.

Numbers are as they stand in the file: 7.0 is no integer, true is no number, NaN and infinity are nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from pdjax.core.errors import plain

Schema = Mapping[str, Any]


class TraceError(ValueError):
    """The file is wrong. path: the key, with its step; text: why."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(plain(f"{path}: {text}" if path else text))
        self.path, self.text = path, text


class SchemaError(ValueError):
    """path: where in the document; text: what is wrong there."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(plain(f"{path or 'the file'}: {text}"))
        self.path, self.text = path, text


@cache
def trace_schema() -> Schema:
    """The contract of pdjax.trace/1."""
    loaded: Schema = json.loads(resources.files("pdjax.sim").joinpath("trace.schema.json").read_text("utf-8"))
    return loaded


def validate(value: Any, schema: Schema, root: Schema, path: str = "") -> None:
    """Raises SchemaError at the first difference."""
    if not fits(value, schema, root):
        _explain(value, schema, root, path)


def fits(value: Any, schema: Schema, root: Schema) -> bool:
    """As ``validate``, without the reason: nearly every file is right, and a fuzzer reads a million of them."""
    known = _rules.get(id(schema)) or _learn(schema, root)
    for holds, _, rule, meant in known[1]:  # noqa: SIM110 - a generator takes half as long again
        if not holds(value, rule, meant, root):
            return False
    return True


class _Rule(NamedTuple):
    """One keyword of a schema. holds: whether a value keeps to it; differs: raises SchemaError where it does not."""

    holds: Callable[[Any, Any, Schema, Schema], bool]
    differs: Callable[[Any, Any, Schema, Schema, str], None]
    value: Any
    schema: Schema


_rules: dict[
    int, tuple[Schema, tuple[_Rule, ...]]
] = {}  # by identity; the schema beside it keeps that from being reused


def _learn(schema: Schema, root: Schema) -> tuple[Schema, tuple[_Rule, ...]]:
    meant = schema
    if "$ref" in schema:
        meant = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    rules = tuple(_Rule(*_CHECKS[name], rule, meant) for name, rule in meant.items() if name in _CHECKS)
    known = _rules[id(schema)] = (schema, rules)
    return known


def _explain(value: Any, schema: Schema, root: Schema, path: str) -> None:
    """Raise what is wrong first."""
    for holds, differs, rule, meant in _learn(schema, root)[1]:
        if not holds(value, rule, meant, root):
            differs(value, rule, meant, root, path)


def join(path: str, key: str | int) -> str:
    """Where a key or an item stands: steps[3].message.do."""
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


def _type(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    if isinstance(rule, str):
        return _is(value, rule)
    return any(_is(value, kind) for kind in rule)


def _type_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    kinds = [rule] if isinstance(rule, str) else rule
    raise SchemaError(path, f"{' or '.join(kinds)} expected, {show(value)} found")


def _properties(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in rule and not fits(item, rule[key], root):
                return False
    return True


def _properties_differ(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    for key, item in value.items():
        if key in rule:
            validate(item, rule[key], root, join(path, key))


def _additional(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    if not isinstance(value, dict):
        return True
    known = schema.get("properties", {})
    if rule is False:
        return bool(value.keys() <= known.keys())
    return rule is True or all(fits(item, rule, root) for key, item in value.items() if key not in known)


def _additional_differ(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    known = schema.get("properties", {})
    for key, item in value.items():
        if key in known:
            continue
        if rule is False:
            raise SchemaError(join(path, key), f"unknown key; known are {', '.join(known)}")
        validate(item, rule, root, join(path, key))


def _required(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    if isinstance(value, dict):
        for key in rule:
            if key not in value:
                return False
    return True


def _required_differ(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    for key in rule:
        if key not in value:
            raise SchemaError(join(path, key), "is missing")


def _items(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, list) or all(fits(item, rule, root) for item in value)


def _items_differ(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    for i, item in enumerate(value):
        validate(item, rule, root, join(path, i))


def _const(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return bool(value == rule)


def _const_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, f"{show(rule)} expected, {show(value)} found")


def _enum(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return value in rule


def _enum_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, f"{show(value)} is unknown; one of {', '.join(map(str, rule))}")


def _pattern(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, str) or re.fullmatch(rule, value) is not None


def _pattern_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    form = f"{schema['description']} expected, {show(value)} found" if "description" in schema else ""
    raise SchemaError(path, form or f"{show(value)} does not have the form {rule}")


def _minimum(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return type(value) not in (int, float) or value >= rule


def _below(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, f"at least {rule} expected, {show(value)} found")


def _maximum(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return type(value) not in (int, float) or value <= rule


def _above(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, f"at most {rule} expected, {show(value)} found")


def _length(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, str) or len(value) >= rule


def _empty(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, "must not be empty")


def _min_items(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, list) or len(value) >= rule


def _too_few(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, f"at least {rule} of them expected")


def _max_items(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, list) or len(value) <= rule


def _too_many(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, f"at most {rule} of them expected")


def _unique(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, list) or len({json.dumps(v, sort_keys=True) for v in value}) == len(value)


def _twice(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, "one of them stands there twice")


def _one_of(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    n = 0
    for option in rule:
        n += fits(value, option, root)
    return n == 1


def _one_of_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    if all(list(option) == ["required"] for option in rule):
        choices = ", ".join(key for option in rule for key in option["required"])
        raise SchemaError(path, f"exactly one of {choices} expected")
    none = not any(fits(value, option, root) for option in rule)
    for option in rule:  # the error of the option that is meant: the one of the value's own type
        target = root["$defs"][option["$ref"].removeprefix("#/$defs/")] if "$ref" in option else option
        kind = target.get("type")
        if none and (kind is None or _is(value, kind)):
            validate(value, option, root, path)
    form = schema.get("description", "something of a form that is known here")
    raise SchemaError(path, f"{form} expected, {show(value)} found")


def _all_of(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return all(fits(value, option, root) for option in rule)


def _all_of_differ(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    for option in rule:
        validate(value, option, root, path)


def _not(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return not fits(value, rule, root)


def _not_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    keys = rule.get("required") or [k for o in rule.get("anyOf", ()) for k in o.get("required", ())]
    raise SchemaError(path, f"{', '.join(keys)} cannot stand here (together)")


def _any_of(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return any(fits(value, option, root) for option in rule)


def _any_of_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    raise SchemaError(path, f"{show(value)} is not of a form that is known here")


def _if(value: Any, rule: Any, schema: Schema, root: Schema) -> bool:
    return "then" not in schema or not fits(value, rule, root) or fits(value, schema["then"], root)


def _then_differs(value: Any, rule: Any, schema: Schema, root: Schema, path: str) -> None:
    validate(value, schema["then"], root, path)


_CHECKS: dict[str, tuple[Callable[..., bool], Callable[..., None]]] = {
    "type": (_type, _type_differs),
    "properties": (_properties, _properties_differ),
    "additionalProperties": (_additional, _additional_differ),
    "required": (_required, _required_differ),
    "items": (_items, _items_differ),
    "const": (_const, _const_differs),
    "enum": (_enum, _enum_differs),
    "pattern": (_pattern, _pattern_differs),
    "minimum": (_minimum, _below),
    "maximum": (_maximum, _above),
    "minLength": (_length, _empty),
    "minItems": (_min_items, _too_few),
    "maxItems": (_max_items, _too_many),
    "uniqueItems": (_unique, _twice),
    "oneOf": (_one_of, _one_of_differs),
    "allOf": (_all_of, _all_of_differ),
    "anyOf": (_any_of, _any_of_differs),
    "not": (_not, _not_differs),
    "if": (_if, _then_differs),
}
