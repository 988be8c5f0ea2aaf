"""The command ``pdjax``: serve, bootstrap, up, fetch. The options of serve are generated from ServeArgs and PDSettings.

An operator's mistake is one line on standard error and exit code 2, never a traceback. Must never hold a default of
its own, nor import JAX before the flags are checked.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.engine.bootstrap.registry import DEFAULT_PORT
from pdjax.serve.args import ServeArgs
from pdjax.serve.local import Plan, up
from pdjax.serve.ready import print_ready

# typer carries its own copy of click in some versions and imports it in others: this is its base of usage errors.
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="pdjax",
    help="Prefill/decode disaggregation for JAX LLM serving.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _flags(cls: type, panel: str) -> Iterator[tuple[str, inspect.Parameter]]:
    """A keyword parameter with a typer option for each field that has a flag."""
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        flag = spec.metadata.get("flag")
        if flag is None:
            continue
        choices = spec.metadata.get("choices") or ()
        kind = str if choices else hints[spec.name]
        text = spec.metadata["doc"] + (f" [{'|'.join(choices)}]" if choices else "")
        option = typer.Option(f"--{flag}", help=text, rich_help_panel=panel)
        default = inspect.Parameter.empty if spec.default is dataclasses.MISSING else spec.default
        yield (
            spec.name,
            inspect.Parameter(
                spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            ),
        )


def _with_flags(*groups: tuple[type, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function that takes **options the signature that these dataclasses describe."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = {name: one for cls, panel in groups for name, one in _flags(cls, panel)}
        function.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        function.__annotations__ = {name: one.annotation for name, one in parameters.items()}
        return function

    return decorate


def serve_args(options: dict[str, Any]) -> ServeArgs:
    """ServeArgs of parsed options, checked. Raises ConfigError."""
    timers = {spec.name for spec in dataclasses.fields(PDSettings)}
    settings = PDSettings(**{name: value for name, value in options.items() if name in timers})
    args = ServeArgs(
        **{name: value for name, value in options.items() if name not in timers}, settings=settings
    )
    args.check()
    return args


@app.command()
@_with_flags((ServeArgs, "Node"), (PDSettings, "Hand-off"))
def serve(**options: Any) -> None:
    """Serve a model: alone, or as the prefill or decode half of a pair."""
    args = serve_args(options)
    from pdjax.serve.process import run_server  # JAX comes with it

    raise typer.Exit(run_server(args))


@app.command()
def bootstrap(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="port; 0 lets the kernel choose", min=0, max=65535)
    ] = DEFAULT_PORT,
    ttl: Annotated[
        float,
        typer.Option(
            "--disaggregation-bootstrap-heartbeat-ttl", help="seconds of silence after which a seat is empty"
        ),
    ] = PDSettings().heartbeat_ttl_s,
) -> None:
    """Run the registry where prefill and decode instances find each other."""
    if not ttl > 0:
        raise ConfigError(
            f"--disaggregation-bootstrap-heartbeat-ttl {ttl:g}: must be a positive number of seconds"
        )
    from pdjax.engine.bootstrap.server import HTTPBootstrapServer  # FastAPI comes with it

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = HTTPBootstrapServer(host, port, ttl)
    server.start()
    print_ready(url=server.url, role="bootstrap")
    while not stop.wait(1.0):
        if server.poll() == 0:
            raise ConfigError("the registry's server has ended: see the log above")
    server.stop()


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Download and convert a model that the examples use, once."""
    from pdjax.model.fetch import fetch_smollm2

    if name != "smollm2":
        raise ConfigError(f"fetch {name}: only smollm2 is known")
    print(fetch_smollm2(progress=lambda text: print(text, file=sys.stderr)))


@app.command(name="up", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up_command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="as for serve")],
    prefill: Annotated[int, typer.Option(help="number of prefill instances", min=0)] = Plan.prefill,
    decode: Annotated[int, typer.Option(help="number of decode instances", min=0)] = Plan.decode,
    plain: Annotated[int, typer.Option(help="number of servers without PD", min=0)] = Plan.plain,
    router: Annotated[str, typer.Option(help="rust, mini or none")] = Plan.router,
    host: Annotated[str, typer.Option(help="address that everything listens on")] = Plan.host,
    prefill_chips: Annotated[
        str, typer.Option(help="TPU_VISIBLE_CHIPS, one entry an instance: 0,1;2,3")
    ] = "",
    decode_chips: Annotated[str, typer.Option(help="the same for decode instances")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the addresses as one JSON object")] = False,
) -> None:
    """Start registry, prefill and decode instances and the router on this machine; options it does not know go to serve."""
    plan = Plan(
        model=model,
        prefill=prefill,
        decode=decode,
        plain=plain,
        router=router,
        host=host,
        prefill_chips=tuple(filter(None, prefill_chips.split(";"))),
        decode_chips=tuple(filter(None, decode_chips.split(";"))),
        extra=tuple(context.args),
    )
    raise typer.Exit(up(plan, as_json=as_json))


def _version(value: bool) -> None:
    if value:
        print(f"pdjax {importlib.metadata.version('pdjax')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line."""
    try:
        code = app(args=None if argv is None else list(argv), prog_name="pdjax", standalone_mode=False)
    except ConfigError as error:
        print(f"pdjax: {error}", file=sys.stderr)
        return 2
    except UsageError as error:
        print(f"pdjax: {error.format_message()}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
