"""The import rules of the architecture, read from the source of every module."""

import ast
import importlib.metadata
import itertools
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pdjax"
STDLIB = sys.stdlib_module_names
IMPURE = {
    "threading",
    "socket",
    "time",
    "random",
    "asyncio",
    "os",
    "subprocess",
    "secrets",
    "datetime",
    "selectors",
}
SIM_MAY = ("pdjax.core", "pdjax.sched", "pdjax.sim", "pdjax.engine.base", "pdjax.engine.ports", "pdjax.engine.manager", "pdjax.engine.driver", "pdjax.engine.performer", "pdjax.engine.rooms",
           "pdjax.engine.peers", "pdjax.engine.bootstrap.registry", "pdjax.engine.bootstrap.registration", "pdjax.faults")  # fmt: skip
# ``sim replay --engine jax`` starts real processes: what it needs is imported when it is asked for, not before.
SIM_STARTS = {("pdjax.sim.command", "pdjax.campaign.one"), ("pdjax.sim.command", "pdjax.campaign")}
BENCH_MAY = ("pdjax.core", "pdjax.bench")  # the client runs where only it is installed


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found.add(node.module)
            found |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if (ROOT.parent / Path(*node.module.split("."), f"{alias.name}.py")).exists()
            }
    return found


def breaches(name: str, wanted: set[str]) -> list[str]:
    """Imports of module ``name`` that the rules forbid."""
    bad: list[str] = []
    layer = name.split(".")[1] if "." in name else ""
    for target in wanted:
        top = target.split(".")[0]
        ours = top == "pdjax"
        if layer == "core":
            allowed = (
                (top in STDLIB and top not in IMPURE)
                or top in ("statemachine", "msgspec")
                or target.startswith("pdjax.core")
            )
            bad += [] if allowed or target == "pdjax" else [f"core imports {target}"]
        if layer in ("sched", "sim", "bench", "campaign") and top == "jax":
            bad.append(f"{layer} imports jax")
        if layer == "bench" and ours and target.count(".") >= 1 and not target.startswith(BENCH_MAY):
            bad.append(f"bench imports {target}")
        if layer == "sim" and ours and target.count(".") >= 2 and not target.startswith(SIM_MAY):
            bad += [] if (name, target) in SIM_STARTS else [f"sim imports {target}"]
        if layer not in ("sim", "campaign") and target.startswith("pdjax.sim"):
            bad.append(f"{target} is imported outside sim")
        if layer == "faults" and target.startswith(("pdjax.serve", "pdjax.campaign", "pdjax.sched", "jax")):
            bad.append(f"faults imports {target}")
        if layer != "campaign" and target.startswith("pdjax.campaign"):
            bad += [] if (name, target) in SIM_STARTS else [f"{target} is imported outside campaign"]
        if layer in ("core", "engine", "sched", "model") and target.startswith("pdjax.serve"):
            bad.append(f"{layer} imports serve")
        if (
            layer == "engine"
            and top == "jax"
            and not name.startswith(("pdjax.engine.jax_transfer", "pdjax.engine.kernels"))
        ):
            bad.append(f"{name} imports jax")
        if layer == "engine" and target.startswith(("pdjax.sched", "pdjax.model")):
            bad.append(f"engine imports {target}")
    return bad


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[n for n, _ in modules()])
def test_imports(name, path):
    assert breaches(name, imports(path)) == []


def test_every_package_that_is_imported_is_named_in_pyproject():
    """Not left to what another package happens to bring along."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    known = {re.split(r"[^A-Za-z0-9-]", one)[0].lower() for one in named}
    brought = importlib.metadata.packages_distributions()
    tops = {target.split(".")[0] for _, path in modules() for target in imports(path)} - STDLIB - {"pdjax"}
    assert tops > {"jax", "yaml", "zmq"}, "it finds what is imported"
    for top in sorted(tops):
        names = {name.lower().replace("_", "-") for name in brought[top]}
        assert names & known, f"{top} is imported, and {' or '.join(names)} is not in pyproject.toml"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("pdjax.core.room", "threading"),
        ("pdjax.core.room", "numpy"),
        ("pdjax.core.room", "pdjax.engine.base"),
        ("pdjax.sched.batch", "jax"),
        ("pdjax.sim.world", "pdjax.engine.jax_transfer.channel"),
        ("pdjax.engine.manager", "pdjax.sim.world"),
        ("pdjax.sim.world", "pdjax.campaign.one"),
        ("pdjax.serve.node", "pdjax.campaign.fleet"),
        ("pdjax.faults.port", "pdjax.serve.node"),
        ("pdjax.faults.port", "pdjax.sim.world"),
        ("pdjax.engine.manager", "jax"),
        ("pdjax.model.llama", "pdjax.serve.app"),
        ("pdjax.bench.client", "pdjax.serve.app"),
        ("pdjax.bench.client", "jax"),
    ],
)
def test_a_breach_is_seen(name, target):
    assert breaches(name, {target})
