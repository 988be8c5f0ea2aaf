"""A model as a node is given it: weights and tokenizer read, pools made, and what peers and clients are told of it.

Must never start a thread or compile a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Fingerprint
from pdjax.core.wire import PROTOCOL_VERSION
from pdjax.engine.jax_transfer.servers import TRANSFER_SIZE, TRANSPORT_ADDRESSES
from pdjax.model.checkpoint import LoadedModel, fingerprint, load_model
from pdjax.model.fetch import cache_root, resolve_model, tokenizer_directory
from pdjax.model.runner import JaxRunner
from pdjax.model.settings import RunnerSettings
from pdjax.model.sizes import Sizes, host_bytes, resolve_dtype
from pdjax.model.tokenizer import Tokenizer
from pdjax.serve.args import ServeArgs


@dataclass
class Model:
    """What is loaded once: the runner, and what peers and clients are told of it."""

    name: str
    runner: JaxRunner
    tokenizer: Tokenizer
    info: dict[str, Any]


def _settings(args: ServeArgs) -> RunnerSettings:
    return RunnerSettings(
        num_pages=args.num_pages,
        page_size=args.page_size,
        max_batch=args.max_running_requests,
        chunk_tokens=args.chunked_prefill_size,
        context_tokens=args.context_length,
        dtype=args.dtype,
        verify=args.verify,
        compilation_cache=str(cache_root() / "compiled"),
    )


def _runner(args: ServeArgs, loaded: LoadedModel) -> JaxRunner:
    budget = args.settings.unpulled_budget_bytes
    if args.settings.host_staging and budget > host_bytes():
        raise ConfigError(
            f"--disaggregation-unpulled-budget {budget}: with --disaggregation-host-staging so much memory is taken, and "
            f"this machine has {host_bytes()} bytes"
        )
    try:
        return JaxRunner(loaded, _settings(args))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"--num-pages {args.num_pages}: the pool does not fit in the device's memory beside the weights; lower it"
        ) from error


def load(args: ServeArgs) -> Model:
    """Read model and tokenizer, make the pools. Raises ConfigError."""
    path = resolve_model(args.model)
    tokenizer = Tokenizer(path)
    loaded = load_model(path, dtype=resolve_dtype(args.dtype))
    runner = _runner(args, loaded)
    name = args.served_model_name or args.model
    directory = tokenizer_directory(path, loaded.digest)
    info = {
        # The directory, not the name: the rust router looks for the tokenizer there, and else far away.
        "model_path": str(directory),
        "tokenizer_path": str(directory),
        "model_type": loaded.config.model_type,
        "architectures": [loaded.config.architecture],
        "page_size": args.page_size,
        "weights_digest": loaded.digest,
    }
    return Model(name, runner, tokenizer, info)


# What both sides must agree on besides the model and its pools.
WIRE = {
    "protocol": PROTOCOL_VERSION,
    "transfer_size": TRANSFER_SIZE,
    "transport_addresses": TRANSPORT_ADDRESSES,
}


def fingerprint_of(runner: JaxRunner) -> Fingerprint:
    """What its peers compare with their own."""
    return runner.fingerprint(**WIRE)


def own_fingerprint(args: ServeArgs) -> Fingerprint:
    """What a server with these flags would tell its peers. Raises ConfigError, as ``load`` does.

    It reads the weights and makes no pools: the memory may be a running server's.
    """
    path = resolve_model(args.model)
    Tokenizer(path)
    loaded = load_model(path, dtype=resolve_dtype(args.dtype))
    sizes = Sizes.of(loaded.config, _settings(args))
    return fingerprint(loaded.config, loaded.digest, sizes.pool, **WIRE)
