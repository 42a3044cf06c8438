"""Imports within `utils/runtime` are acyclic, and its public interface is small."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from utils.config.execution import RuntimeSection
from utils.runtime.base import Runtime
from utils.runtime.cpu import CpuRuntime
from utils.runtime.cuda import CudaRuntime, _CudaUpdates
from utils.runtime.graph_updates import GraphUpdates
from utils.runtime.processes.ranks import Alone, ProcessRanks, Ranks
from utils.runtime.updates import Updates
from utils.runtime.xla.ranks import ChipRanks, GlooRanks, MeshRanks
from utils.runtime.xla.runtime import XlaRuntime
from utils.runtime.xla.spmd import XlaSpmdRuntime, _MeshUpdates

PACKAGE = "utils.runtime"
FOLDER = Path(__file__).resolve().parents[2] / "utils" / "runtime"
# Each is a word that an author of a runtime, or of the engine, must know: raise them with a reason.
MAX_METHODS = 31  # name_operations, read_profile: where a step's time goes
MAX_ATTRIBUTES = 7
MAX_UPDATES_METHODS = 6  # place_rates: within the program of a step
MAX_RANKS_METHODS = 13


def read_sources() -> dict[str, str]:
    """Text of each module of the package."""
    paths = {path.relative_to(FOLDER).with_suffix(""): path for path in FOLDER.rglob("*.py")}
    return {
        ".".join((PACKAGE, *name.parts)): path.read_text()
        for name, path in paths.items()
        if name.stem != "__init__"
    }


def list_imports(text: str, modules: set[str]) -> set[str]:
    """Modules that a text imports at the top, in a function, for types, or by name in a string."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named & modules or {node.module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & modules


def order_modules(sources: dict[str, str]) -> list[str]:
    """The modules, each behind all that it imports.

    Raises:
      CycleError: there is no such order.
    """
    modules = set(sources)
    graph = {name: list_imports(text, modules) for name, text in sources.items()}
    return list(TopologicalSorter(graph).static_order())


def test_imports_between_runtime_packages_are_acyclic():
    order = order_modules(read_sources())
    names = ("choice", "processes.group", "processes.ranks", "base", "xla.runtime", "xla.spmd")
    ways = [f"{PACKAGE}.{name}" for name in names]
    assert sorted(ways, key=order.index) == ways


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from utils.runtime.xla.spmd import XlaSpmdRuntime\n",
        "def f():\n    import utils.runtime.xla.spmd\n",
        "from utils.runtime.xla.chips import launch_on_chips\n",
        "from utils.runtime.xla import chips\n",
        "LATER = 'utils.runtime.xla.spmd'\n",
    ],
)
def test_an_import_cycle_is_found_even_inside_functions(text):
    sources = read_sources()
    sources[f"{PACKAGE}.xla.runtime"] += text
    with pytest.raises(CycleError):
        order_modules(sources)


def list_public(kind: type) -> set[str]:
    """Public methods and properties that a class defines."""
    found = {name for name, value in vars(kind).items() if _is_method(value)}
    return {name for name in found if not name.startswith("_")}


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def test_a_runtime_has_few_public_members():
    assert len(list_public(Runtime)) <= MAX_METHODS
    assert len(list_public(Ranks)) <= MAX_RANKS_METHODS
    assert len(list_public(Updates)) <= MAX_UPDATES_METHODS
    assert len([name for name in Runtime.__annotations__ if name[0] != "_"]) <= MAX_ATTRIBUTES


def test_a_runtime_declares_all_its_attributes():
    """Attributes of an instance are public members as well."""
    held = {name for name in vars(CpuRuntime(RuntimeSection(device="cpu"))) if name[0] != "_"}
    assert held <= set(Runtime.__annotations__)


def test_no_device_adds_public_members():
    """What is asked of one runtime could not be asked of another."""
    for kind in (CpuRuntime, CudaRuntime, XlaRuntime, XlaSpmdRuntime):
        names = {name for one in kind.__mro__[:-1] for name in vars(one) if name[0] != "_"}
        assert names <= list_public(Runtime) | set(Runtime.__annotations__), kind
    for kind in (Alone, ProcessRanks, ChipRanks, GlooRanks, MeshRanks):
        assert list_public(kind) <= list_public(Ranks), kind
    for kind in (_CudaUpdates, GraphUpdates, _MeshUpdates):
        assert list_public(kind) <= list_public(Updates), kind
