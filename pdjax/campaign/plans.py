"""What a campaign starts: the registry, the instances and the router of a fleet, and their flags.

Must never start anything itself, nor name an address: ``fleet`` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_PEERS = 16  # of a P: bounds the ports that a restart on the same side channel may take


def role_of(name: str) -> str:
    return "prefill" if name.startswith("p") else "decode"


@dataclass(frozen=True)
class NodePlan:
    """How one instance is started. options: flags of ``pdjax serve`` with their values."""

    name: str
    options: tuple[str, ...] = ()
    host: str = "127.0.0.1"

    @property
    def role(self) -> str:
        return role_of(self.name)

    @property
    def model(self) -> str:
        """Its own, "" for that of the fleet."""
        return dict(itertools.pairwise(self.options)).get("--model", "")


@dataclass(frozen=True)
class FleetPlan:
    """What is started once and used for all that has the same plan. bootstrap: flags of ``pdjax bootstrap``.

    router: "mini" or "rust", in front of all instances; "": whoever posts is his own router. secret: they share one,
    so that the registry asks for it and the side channel is encrypted.
    """

    model: str
    nodes: tuple[NodePlan, ...]
    bootstrap: tuple[str, ...] = ()
    router: str = ""
    secret: bool = False

    def can_meet(self, name: str) -> bool:
        """Whether an instance of the other role runs the same model."""
        (mine,) = (node for node in self.nodes if node.name == name)
        return any(
            node.role != mine.role and (node.model or self.model) == (mine.model or self.model)
            for node in self.nodes
        )


def options(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags of a file as options of a command line."""
    out: list[str] = []
    for flag, value in flags.items():
        if isinstance(value, bool):
            out += [f"--{flag}"] if value else []
        else:
            out += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    return tuple(out)
