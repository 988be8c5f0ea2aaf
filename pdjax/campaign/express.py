"""What real processes can be made to do: which files they can run, what each needs, and how its plan looks.

Must never run a file in part: what cannot be done is named before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pdjax.campaign.plans import MAX_PEERS, FleetPlan, NodePlan, options
from pdjax.core import wire
from pdjax.core.settings import PDSettings
from pdjax.sim.node import NodeSpec
from pdjax.sim.trace_types import Step, Trace

CONTEXT_TOKENS = 2048  # of the tiny model
LEAST_ROWS = 8  # so that most files share their processes
UNSEEN = ("released", "listed", "evicted")
DRAIN_LINGER_S = 2.0  # the simulator's node goes on refusing; a leg of a file comes within this
_TO_SENDER = frozenset(wire.EVENT_OF[kind] for kind in wire.TO_SENDER)
_SECONDS = {f.name for f in fields(PDSettings) if isinstance(f.default, float)}


def cannot(trace: Trace) -> list[str]:
    """Why real processes cannot run this file; [] when they can."""
    if "model" in trace.raw:
        return ["a way through the model, not a scenario"]
    found = [why for step in trace.steps for why in _step_reasons(trace, step)]
    pools = trace.nodes[0].pools
    if pools != ("main_kv",):
        found.append(f"pools {', '.join(pools)}: the model has main_kv only")
    if any(trace.clock_offset.values()):
        found.append("world.clock_offset: all processes have the clock of this machine")
    if trace.violations:
        found.append("it is known to break a property")
    longest = max(
        (s.value["prompt"] + s.value["output"] for s in trace.steps if s.action == "request"), default=0
    )
    if longest > CONTEXT_TOKENS:
        found.append(f"a request of {longest} tokens: the model's context has {CONTEXT_TOKENS}")
    return list(dict.fromkeys(found))


def _step_reasons(trace: Trace, step: Step) -> list[str]:
    found = []
    if step.on is not None and step.on.event in UNSEEN:
        found.append(f"on {step.on.event}: no process says so")
    if step.action == "drain" and _refuses_unlisted(trace, step):
        found.append(
            "drain of one of several P that then refuses a leg: a process is listed as long as it refuses"
        )
    reason = _REASONS.get(step.action)
    if reason is not None and (why := reason(trace, step.value)):
        found.append(why)
    return found


def _refuses_unlisted(trace: Trace, drain: Step) -> bool:
    """Whether D may look for its room while the drained P has left the registry and answers still, as the simulator's does."""
    name = drain.value["node"]
    if name[0] != "p" or _count(trace, "p") < 2 or drain.at is None:
        return False
    legs = (
        (step.at, step.value.get("legs", {}).get("prefill", {}).get("delay", 0))
        for step in trace.steps
        if step.action == "request" and step.value["prefill"] == name
    )
    return any(at is not None and at + late > drain.at for at, late in legs)


def _why_no_clock(trace: Trace, value: Mapping[str, Any]) -> str:
    return "clock: the wall clock of a process cannot be moved"


def _why_no_partition(trace: Trace, value: Mapping[str, Any]) -> str:
    others = [name for name in value["between"] if name[0] not in "pd"]
    return f"partition from {others[0]}: only P and D can be cut off from each other" if others else ""


def _why_no_transfer(trace: Trace, value: Mapping[str, Any]) -> str:
    if value["match"].get("part", 0):
        return "transfer of a further part: a hand-off of the tiny model has one"
    counted = value.get("nth", 1) > 1 or value.get("times", 1) is not None
    if counted and "from" not in value["match"] and _count(trace, "p") > 1 and "room" not in value["match"]:
        return "transfer rule that counts the pulls of several P: each process counts its own"
    return ""


def _why_no_message(trace: Trace, value: Mapping[str, Any]) -> str:
    match = value["match"]
    counted = value.get("nth", 1) > 1 or value.get("times", 1) is not None
    if counted and "from" not in match and len(senders(trace, match)) > 1:
        return "message rule that counts what several processes send: each counts its own"
    return ""


def _count(trace: Trace, letter: str) -> int:
    return sum(spec.name[0] == letter for spec in trace.nodes)


_REASONS: dict[str, Callable[[Trace, Mapping[str, Any]], str]] = {
    "clock": _why_no_clock,
    "partition": _why_no_partition,
    "transfer": _why_no_transfer,
    "message": _why_no_message,
}


def senders(trace: Trace, match: Mapping[str, Any]) -> list[str]:
    """The nodes that could send what a message rule matches."""
    names = [spec.name for spec in trace.nodes]
    if "from" in match:
        return [match["from"]]
    if "type" in match:
        letter = "d" if match["type"] in _TO_SENDER else "p"
        return [name for name in names if name[0] == letter]
    if "to" in match:
        return [name for name in names if name[0] != match["to"][0]]
    return names


# ---------------------------------------------------------------- plans


def plan_of(trace: Trace, slower: float, directory: Path) -> FleetPlan:
    """The processes that this file needs, with every timer slower times as long. directory: for other models."""
    p_names = [spec.name for spec in trace.nodes if spec.name[0] == "p"]
    nodes = []
    for spec in trace.nodes:
        # A look-up filters by the host that the router injects: with several P, each has one (protocol §3).
        host = (
            f"127.0.0.{2 + p_names.index(spec.name)}"
            if len(p_names) > 1 and spec.name in p_names
            else "127.0.0.1"
        )
        nodes.append(NodePlan(spec.name, options(_flags(trace, spec, slower, directory)), host))
    ttl_s = trace.nodes[0].settings.heartbeat_ttl_s * slower
    return FleetPlan("tiny", tuple(nodes), ("--disaggregation-bootstrap-heartbeat-ttl", f"{ttl_s:g}"))


def _flags(trace: Trace, spec: NodeSpec, slower: float, directory: Path) -> dict[str, Any]:
    flags = flags_of(slowed(spec.settings, slower))
    config = spec.config
    flags |= {
        "disaggregation-max-peers": MAX_PEERS,
        "page-size": spec.page_size,
        "num-pages": spec.num_pages,
        "context-length": min(config.context_length, CONTEXT_TOKENS),
        "max-running-requests": min(spec.max_batch, _rows(trace)),
        "max-queue": config.max_queue,
        "chunked-prefill-size": config.chunked_prefill_size,
        "disable-radix-cache": config.disable_radix_cache,
        "disable-overlap-schedule": not config.overlap,
    }
    if any(step.action == "drain" for step in trace.steps):
        flags["drain-linger"] = DRAIN_LINGER_S
    if spec.verify != "all":
        flags["disaggregation-verify"] = spec.verify
    if spec.weights != "sim":
        flags["model"] = str(directory / "other")
    return flags


def flags_of(settings: PDSettings) -> dict[str, Any]:
    """Those that are not as by default."""
    return {
        f.metadata["flag"]: getattr(settings, f.name)
        for f in fields(settings)
        if getattr(settings, f.name) != f.default
    }


def _rows(trace: Trace) -> int:
    """Rows of the largest decode step that the file can meet: a power of two, because each is compiled."""
    n: int = sum(step.value.get("n", 1) for step in trace.steps if step.action == "request")
    return max(LEAST_ROWS, 1 << (n - 1).bit_length())


def slowed(settings: PDSettings, slower: float) -> PDSettings:
    """Every timer slower times as long: their inequalities stay as they are."""
    timers = {name: getattr(settings, name) * slower for name in _SECONDS}
    return replace(settings, **timers)


def make_models(directory: Path) -> None:
    """The other weights that a file may ask for."""
    from pdjax.model.tiny import make_tiny_model  # it brings JAX, which nothing else here needs

    make_tiny_model(directory / "other", seed=7)
