"""Options of a command, made from the fields of dataclasses, and where each value came from.

A value comes from the flag, else from the environment (PDJAX_ and the flag's name), else from the file of
``--config``, else it is the field's default; nothing here holds a default of its own. Must never import JAX.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pdjax.core.settings import PDSettings
from pdjax.serve.args import ServeArgs
from pdjax.serve.config_file import Option, Setting, read_config

CONFIG_HELP = "YAML file of `flag: value` lines; a flag or an environment variable goes before it"
NOT_SET = "not set"
OF_ONE_CALL = frozenset({"json"})  # how this one call answers: in no file and no environment
_FILE = "pdjax.config"  # in the context's meta: (path, flag → Setting)

Group = tuple[type, str]  # a dataclass and its panel in --help
SERVE: tuple[Group, ...] = ((ServeArgs, "Node"), (PDSettings, "Hand-off"))


def variable(flag: str) -> str:
    """The environment variable of a flag."""
    return f"PDJAX_{flag.upper().replace('-', '_')}"


# A setting whose variable others use, too, is read from there as well.
_SHARED = {f.metadata["flag"]: f.metadata["variable"] for f in dataclasses.fields(PDSettings)}


def variables(flag: str) -> list[str]:
    """The environment variables that set a flag, first the one that counts when both are there."""
    return [variable(flag), *filter(None, [_SHARED.get(flag)])]


def variable_set(flag: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The environment variable that sets the flag now, if any does."""
    return next((name for name in variables(flag) if environ.get(name)), None)


def options_of(groups: tuple[Group, ...]) -> dict[str, Option]:
    """flag → what it takes."""
    out = {}
    for cls, _ in groups:
        hints = typing.get_type_hints(cls)
        for spec in dataclasses.fields(cls):
            flag = spec.metadata.get("flag")
            if flag is not None:
                choices = tuple(spec.metadata.get("choices") or ())
                out[flag] = Option(flag, spec.name, str if choices else hints[spec.name], choices)
    return out


def _parameters(cls: type, panel: str, may_lack: bool) -> Iterator[inspect.Parameter]:
    """A keyword parameter with a typer option for each field that has a flag."""
    takes = options_of(((cls, panel),))
    for spec in dataclasses.fields(cls):
        flag = spec.metadata.get("flag")
        if flag is None:
            continue
        option = takes[flag]
        text = spec.metadata["doc"] + (f" [{'|'.join(option.choices)}]" if option.choices else "")
        names = f"--{flag}/--no-{flag}" if option.kind is bool else f"--{flag}"
        environment = None if flag in OF_ONE_CALL else variables(flag)
        made = typer.Option(names, help=text, rich_help_panel=panel, envvar=environment, show_envvar=False)
        default = spec.default
        if default is dataclasses.MISSING:
            default = NOT_SET if may_lack else inspect.Parameter.empty
        yield inspect.Parameter(
            spec.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[option.kind, made],
        )


def with_flags(
    *groups: Group, also_in_file: tuple[Group, ...] = (), may_lack: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give ``function(context, **options)`` the options of these dataclasses, and ``--config``.

    also_in_file: further dataclasses whose flags the file may set; ``file_settings`` returns them. may_lack: a flag
    that must be given may be left out all the same; it is then NOT_SET.
    """
    known = {**options_of(also_in_file), **options_of(groups)}
    for flag in OF_ONE_CALL:
        known.pop(flag, None)
    mine = options_of(groups)

    def load(context: typer.Context, path: str) -> str:
        if path:
            found = read_config(path, known)
            context.meta[_FILE] = path, found
            context.default_map = {mine[flag].name: one.value for flag, one in found.items() if flag in mine}
        return path

    config = typer.Option(
        "--config", help=CONFIG_HELP, is_eager=True, callback=load, envvar="PDJAX_CONFIG", show_envvar=False
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(context: typer.Context, config: str, **options: Any) -> None:
            function(context, **options)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("context", keyword, annotation=typer.Context),
            inspect.Parameter("config", keyword, default="", annotation=Annotated[str, config]),
            *(one for cls, panel in groups for one in _parameters(cls, panel, may_lack)),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def file_settings(context: typer.Context) -> dict[str, Setting]:
    """flag → setting of the file that this command was given."""
    return dict(context.meta.get(_FILE, ("", {}))[1])


@dataclass(frozen=True)
class Origin:
    """One effective value. where: "flag", "environment VARIABLE", "file PATH:LINE", "default", or NOT_SET."""

    flag: str
    value: Any
    where: str


def origins(context: typer.Context, groups: tuple[Group, ...], options: dict[str, Any]) -> list[Origin]:
    """Every option of the groups with its value and where that came from."""
    path, found = context.meta.get(_FILE, ("", {}))
    out = []
    for flag, option in options_of(groups).items():
        source = context.get_parameter_source(option.name)
        kind = source.name if source is not None else "DEFAULT"
        value = options[option.name]
        if kind == "DEFAULT_MAP":
            where = f"file {path}:{found[flag].line}"
        elif kind == "ENVIRONMENT":
            where = f"environment {variable_set(flag)}"
        else:
            where = "flag" if kind == "COMMANDLINE" else "default"
        out.append(Origin(flag, value, NOT_SET if value == NOT_SET else where))
    return out


def serve_args(options: dict[str, Any]) -> ServeArgs:
    """ServeArgs of parsed options, checked. Raises ConfigError."""
    timers = {spec.name for spec in dataclasses.fields(PDSettings)}
    settings = PDSettings(**{name: value for name, value in options.items() if name in timers})
    args = ServeArgs(
        **{name: value for name, value in options.items() if name not in timers}, settings=settings
    )
    args.check()
    return args
