"""The YAML file of ``--config``: one mapping from flag names, without their dashes, to values.

Every value is read as the text that stands there and then as what its flag takes, so that YAML's own ideas (``off``,
``null``, ``010``) cannot change it. Must never accept a key that no flag has, twice the same key, or another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdjax.core.errors import ConfigError

MAX_BYTES = 1 << 20
TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True)
class Option:
    """What a flag takes. kind: str, int, float or bool. name: of the field that it fills."""

    flag: str
    name: str
    kind: type
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A value of the file and where it stands (the first line is 1)."""

    value: Any
    line: int


def read_config(path: str, options: Mapping[str, Option]) -> dict[str, Setting]:
    """flag → its setting. options: flag → what it takes. Raises ConfigError with one line that names file and key."""
    out: dict[str, Setting] = {}
    for key, value in _pairs(path):
        flag, line = key.value, key.start_mark.line + 1
        if not flag.isprintable():  # the message must stay one line
            raise ConfigError(f"--config {path}: line {line}: the key {flag!r:.100} is no flag's name")
        where = f"--config {path}: line {line}: {flag}"
        option = options.get(flag)
        if option is None:
            hint = " (write it without dashes in front)" if flag.lstrip("-") in options else ""
            raise ConfigError(f"{where}: no such key; the keys are this command's flags{hint}")
        if flag in out:
            raise ConfigError(f"{where}: is there twice, first in line {out[flag].line}; keep one")
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{where}: must be a single value, not a list or a mapping")
        out[flag] = Setting(_value(where, option, value.value), line)
    return out


def _pairs(path: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    try:
        content = Path(path).read_bytes()
        if len(content) > MAX_BYTES:
            raise ConfigError(f"--config {path}: is longer than {MAX_BYTES} bytes; this is no configuration")
        root = yaml.compose(content.decode(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"--config {path}: {line}is not YAML: {why}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: is nested too deeply; write one `flag: value` a line") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path}: must be a mapping, one `flag: value` a line")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"--config {path}: line {key.start_mark.line + 1}: a key must be a flag's name")
    return list(root.value)


def _value(where: str, option: Option, text: str) -> Any:
    if not text.isprintable():  # no name, address or path of ours holds such a character
        raise ConfigError(f"{where}: holds a line break or a control character, is {text!r:.100}")
    if option.choices and text not in option.choices:
        raise ConfigError(f"{where}: is {text!r:.100}, choose one of {', '.join(option.choices)}")
    if option.kind is bool:
        if text.lower() not in TRUTHS:
            raise ConfigError(f"{where}: must be true or false, is {text!r:.100}")
        return TRUTHS[text.lower()]
    if option.kind is str:
        return text
    try:
        return option.kind(text)
    except ValueError:
        what = "a whole number" if option.kind is int else "a number"
        raise ConfigError(f"{where}: must be {what}, is {text!r:.100}") from None
