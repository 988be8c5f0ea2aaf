"""The command ``pdjax``: serve, bootstrap, up, fetch, bench, config. Options are made from the dataclasses of args.py.

An operator's mistake is one line on standard error and exit code 2, never a traceback. Must never hold a default of
its own, nor import JAX before the flags are checked.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pdjax.core.errors import ConfigError
from pdjax.core.kvpoll import KVPoll
from pdjax.engine.descriptors import raise_descriptor_limit
from pdjax.serve.args import BootstrapArgs, DoctorArgs, ShowArgs, UpArgs
from pdjax.serve.bench import BenchArgs, run_bench
from pdjax.serve.end_request import ALIVE_POLL_S, EndRequest
from pdjax.serve.local import Plan, from_file, up
from pdjax.serve.options import (
    NOT_SET,
    SERVE,
    file_settings,
    origins,
    serve_args,
    variable_set,
    with_flags,
)
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


@app.command()
@with_flags(*SERVE)
def serve(context: typer.Context, **options: Any) -> None:
    """Serve a model: alone, or as the prefill or decode half of a pair."""
    args = serve_args(options)
    from pdjax.serve.process import run_server  # JAX comes with it

    run_server(args)


@app.command()
@with_flags((BootstrapArgs, "Registry"))
def bootstrap(context: typer.Context, **options: Any) -> None:
    """Run the registry where prefill and decode instances find each other."""
    args = BootstrapArgs(**options)
    args.check()
    from pdjax.engine.bootstrap.server import HTTPBootstrapServer  # FastAPI comes with it

    raise_descriptor_limit()
    request = EndRequest()
    request.listen()
    server = HTTPBootstrapServer(
        args.host, args.port, args.heartbeat_ttl_s, door=args.door, token=args.token()
    )
    server.start()
    print_ready(url=server.url, role="bootstrap")
    while not request.wait(ALIVE_POLL_S):
        if server.poll() == KVPoll.Failed:
            print(f"pdjax: the registry ends: its HTTP server has died ({server.death})", file=sys.stderr)
            raise typer.Exit(1)
    server.stop()


@app.command()
@with_flags(*SERVE, (DoctorArgs, "Output"), may_lack=True)
def doctor(context: typer.Context, **options: Any) -> None:
    """Say what would keep `pdjax serve` with these flags from starting, being found, or fitting its peers."""
    as_json = options.pop("as_json")
    from pdjax.serve.doctor import examine, report  # the HTTP client comes with it

    findings = examine(serve_args(options), model_known=options["model"] != NOT_SET)
    raise typer.Exit(report(findings, as_json=as_json))


config_app = typer.Typer(help="The effective configuration of a server.", rich_markup_mode=None)
app.add_typer(config_app, name="config")


@config_app.callback()
def config_root() -> None:
    pass


@config_app.command()
@with_flags(*SERVE, (ShowArgs, "Output"), may_lack=True)
def show(context: typer.Context, **options: Any) -> None:
    """Print what `pdjax serve` with these flags, this environment and this file would use, and where each value is from."""
    as_json = options.pop("as_json")
    found = origins(context, SERVE, options)
    if as_json:
        print(json.dumps({one.flag: {"value": one.value, "origin": one.where} for one in found}))
    else:
        width = max(len(one.flag) for one in found)
        for one in found:
            print(f"{one.flag:{width}}  {one.value!s:24}  {one.where}")
    if options["model"] != NOT_SET:
        serve_args(options)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Download and convert a model that the examples use, once."""
    from pdjax.model.fetch import fetch_smollm2

    if name != "smollm2":
        raise ConfigError(f"fetch {name}: only smollm2 is known")
    print(fetch_smollm2(progress=lambda text: print(text, file=sys.stderr)))


@app.command(name="up", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_flags((UpArgs, "Deployment"), also_in_file=SERVE)
def up_command(context: typer.Context, **options: Any) -> None:
    """Start registry, prefill and decode instances and the router on this machine; options it does not know go to serve."""
    as_json = options.pop("as_json")
    entries = {name: str(options.pop(name)).split(";") for name in ("prefill_chips", "decode_chips")}
    chips: dict[str, Any] = {name: tuple(filter(None, found)) for name, found in entries.items()}
    plan = Plan(**options, **chips, extra=(*from_file(file_settings(context)), *context.args))
    raise typer.Exit(up(plan, as_json=as_json))


@app.command(context_settings={"allow_extra_args": True})
@with_flags((BenchArgs, "Run"))
def bench(context: typer.Context, **options: Any) -> None:
    """Send requests to a server or router and measure latency, throughput and goodput."""
    raise typer.Exit(run_bench(BenchArgs(**options), context.args))


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


def _from_environment(error: Any) -> str:
    """Which variable a wrong value came from: the message names the flag, which nobody wrote."""
    context, option = error.ctx, getattr(error, "param", None)
    if context is None or option is None:
        return ""
    source = context.get_parameter_source(option.name)
    if source is None or source.name != "ENVIRONMENT":
        return ""
    flag = option.opts[0].removeprefix("--")
    return f" (of the environment variable {variable_set(flag)})"


def run(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line."""
    try:
        code = app(args=None if argv is None else list(argv), prog_name="pdjax", standalone_mode=False)
    except ConfigError as error:
        print(f"pdjax: {error}", file=sys.stderr)
        return 2
    except UsageError as error:
        print(f"pdjax: {error.format_message()}{_from_environment(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    if sys.argv[1:2] in (["serve"], ["bootstrap"]):
        _end_at_the_first_signal()
    sys.exit(run())


def _end_at_the_first_signal() -> None:
    """Until the command listens itself: what it imports takes seconds, and a supervisor may change its mind in them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


if __name__ == "__main__":
    main()
