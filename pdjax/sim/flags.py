"""Server flags of a trace file → what a simulated node is started with. Must never take a flag that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from functools import lru_cache
from typing import Any, cast, get_args

from pdjax.core.errors import ConfigError
from pdjax.core.settings import PDSettings
from pdjax.sched.config import SchedulerConfig, of_settings
from pdjax.sim.limits import MAX_COUNT, check_pool
from pdjax.sim.node import NodeSpec
from pdjax.sim.runner import SimModel
from pdjax.sim.schema import TraceError, show
from pdjax.sim.transport import Verify

_SETTINGS = {f.metadata["flag"]: f for f in fields(PDSettings)}
_NUMBERS = {
    "context-length": 0,
    "num-pages": 2,
    "page-size": 1,
    "max-running-requests": 1,
    "max-queue": 1,
    "chunked-prefill-size": 1,
}
_TEXTS = ("model", "dtype", "disaggregation-verify")
_SWITCHES = ("disable-radix-cache", "disable-overlap-schedule")


def node_spec(
    name: str, flags: Mapping[tuple[str, str], Any], page_size: int, n_pages: int, pools: Iterable[str]
) -> NodeSpec:
    """A node from its flags, as (flag, where it stands) → value. n_pages does not count the reserved page.

    Raises TraceError for a flag that no server has, a value that it does not take, or settings that cannot work.
    """
    settings: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    texts: dict[str, str] = {}
    switches: dict[str, bool] = {}
    for (flag, path), value in flags.items():
        if flag in _SETTINGS:
            settings[_SETTINGS[flag].name] = _setting(value, _SETTINGS[flag], path)
        elif flag in _NUMBERS:
            if type(value) is not int or not _NUMBERS[flag] <= value <= MAX_COUNT:
                raise TraceError(
                    path,
                    f"an integer of at least {_NUMBERS[flag]} and at most {MAX_COUNT:,} expected, {show(value)} found",
                )
            numbers[flag] = value
        elif flag in _TEXTS:
            if not isinstance(value, str):
                raise TraceError(path, f"a text expected, {show(value)} found")
            texts[flag] = value
        elif flag in _SWITCHES:
            switches[flag] = _switch(value, path)
        else:
            known = ", ".join([*_SETTINGS, *_NUMBERS, *_TEXTS, *_SWITCHES])
            raise TraceError(path, f"the simulated servers have no such flag; they have {known}")
    verify = texts.get("disaggregation-verify", "all")
    if verify not in get_args(Verify):
        raise TraceError("world.flags.disaggregation-verify", f"{verify}: one of off, sampled, all")
    built = PDSettings(**settings)
    broken = _broken(built)
    if broken:
        raise TraceError("world.flags", f"settings that cannot work on {name}: " + "; ".join(broken))
    page_size = numbers.get("page-size", page_size)
    num_pages = numbers.get("num-pages", n_pages + 1)
    check_pool(name, num_pages, page_size)
    max_batch = numbers.get("max-running-requests", 16)
    try:
        config = SchedulerConfig(
            context_length=numbers.get("context-length", 0) or max((num_pages - 1) * page_size, 2),
            max_running=max_batch,
            max_queue=numbers.get("max-queue", 1024),
            chunked_prefill_size=numbers.get("chunked-prefill-size", 512),
            disable_radix_cache=switches.get("disable-radix-cache", False),
            overlap=not switches.get("disable-overlap-schedule", False),
            **of_settings(built),
        )
    except ConfigError as error:
        raise TraceError("world.flags", f"{name}: {error}") from None
    return NodeSpec(
        name, built, config, page_size, num_pages, max_batch, 0, texts.get("model", "sim") + texts.get("dtype", ""),
        tuple(pools), cast(Verify, verify), SIM_MODEL,
    )  # fmt: skip


@lru_cache(maxsize=64)  # all nodes of a world have the same settings, nearly always
def _broken(settings: PDSettings) -> tuple[str, ...]:
    return tuple(settings.check())


# So many tokens that no two of an answer are equal by chance: ``eos`` then names one token only.
SIM_MODEL = SimModel(n_vocab=1 << 20)


def _switch(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise TraceError(path, f"true or false expected, {show(value)} found")
    return value


def _setting(value: Any, spec: Field[Any], path: str) -> Any:
    choices = spec.metadata["choices"]
    if choices:
        if value not in choices:
            raise TraceError(path, f"one of {', '.join(choices)} expected, {show(value)} found")
        return value
    if isinstance(spec.default, bool):
        return _switch(value, path)
    if isinstance(spec.default, int):
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise TraceError(path, f"a whole number up to {MAX_COUNT:,} expected, {show(value)} found")
        return value
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise TraceError(path, f"a number of seconds expected, {show(value)} found")
    return float(value)
