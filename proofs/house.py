"""Measures the structure of a checkout: sizes, import graph, rooms.

`python -m proofs.house [ROOT]` prints each figure with its bound. `--json` prints the figures
alone, `--rooms` the lines of each folder, `--deferred` the files with imports inside functions,
and `--reach MODULE` what importing a module loads. Exit code 1: a bound is exceeded.

Imports are read from the syntax tree. Importing a module loads what its module level imports, types
(`TYPE_CHECKING`) left out, and the faces (`__init__.py`) of the packages above each of them; faces
that hold a docstring alone are not counted.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx

from utils.errors import EXIT_FAILED, UserError
from utils.programs import create_program_parser, run_program

ROOT = Path(__file__).resolve().parents[1]

# What a checkout's product does not consist of.
OUTSIDE = ("tests", "lab", "proofs", "bill")
_SKIPPED = ("tests", "data", "runs", "docs", "examples")
# Entry file -> how many files importing it may load, itself included.
ENTRIES = {
    "tasks.regress.task": 120,
    "losses.logits.kd": 12,
    "job.entry": 215,
    "main": 30,
    "engine": 40,
    "datasets": 60,
    "optim_factory": 30,
    "models.factory": 60,
    "tasks.protocol": 60,
    "service.web.app": 120,
}
_RUNS = re.compile(r"^if __name__ == ", re.MULTILINE)
_PROTOCOL = ("tasks/protocol.py", "RunTask")
BOUNDS = {
    # 80,000 until TorchTPU became the second stack of a TPU; 500 more for bills by finished runs.
    "product lines": 87_500,
    "tools: lines": 15_000,
    "tools: programs": 30,
    "longest import chain": 22,
    "files loaded by one file, mean": 30,
    "imports inside functions": 60,
    "public members of RunTask": 10,
    "most files in a folder": 20,
    "lines of a package's face": 30,
    "import circles": 0,
    **{f"files loaded by {name}": bound for name, bound in ENTRIES.items()},
}


@dataclass(frozen=True)
class SourceFile:
    """One Python file and the modules of the checkout that it imports."""

    name: str
    lines: int
    loads: frozenset[str]  # at module level
    deferred: tuple[frozenset[str], ...]  # inside functions, a set for each statement
    is_bare_face: bool  # it is a package's face without code


@dataclass
class House:
    """The Python files of a checkout by module name, tests left out."""

    root: Path
    files: dict[str, SourceFile] = field(default_factory=dict)

    @functools.cached_property
    def graph(self) -> nx.DiGraph[str]:
        """Module -> modules that it imports at module level."""
        return self._draw({name: file.loads for name, file in self.files.items()})

    @functools.cached_property
    def whole_graph(self) -> nx.DiGraph[str]:
        """The same with the imports inside functions."""
        return self._draw({n: f.loads.union(*f.deferred) for n, f in self.files.items()})

    def _draw(self, targets: dict[str, frozenset[str]]) -> nx.DiGraph[str]:
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(targets)
        graph.add_edges_from((a, b) for a, imports in targets.items() for b in imports if a != b)
        return graph

    @functools.cached_property
    def _loading(self) -> nx.DiGraph[str]:
        """Module -> what importing it loads directly, faces of packages among them."""
        graph = self.graph.copy()
        for module in self.files:
            graph.add_edges_from(
                (module, above) for above in list_packages(module) if above in self.files
            )
        return graph

    def get_reach(self, module: str) -> set[str]:
        """Return all modules with code that importing one loads, itself included."""
        modules = {module, *nx.descendants(self._loading, module)}
        return {name for name in modules if not self.files[name].is_bare_face}

    def measure(self) -> dict[str, float]:
        """Measure the figures of `BOUNDS` that this checkout has."""
        rooms = count_lines(self)
        circles = [c for c in nx.strongly_connected_components(self.whole_graph) if len(c) > 1]
        folders = Counter(Path(file.name).parent for file in self.files.values())
        faces = [f.lines for f in self.files.values() if f.name.endswith("/__init__.py")]
        figures = {
            "product lines": sum(n for room, n in rooms.items() if room not in OUTSIDE),
            "tools: lines": rooms["tools"],
            "tools: programs": len(list_programs(self.root)),
            "longest import chain": len(find_longest_chain(self)),
            "files loaded by one file, mean": round(
                sum(len(self.get_reach(name)) for name in self.files) / len(self.files), 1
            ),
            "imports inside functions": sum(len(f.deferred) for f in self.files.values()),
            "most files in a folder": max(folders.values()),
            "lines of a package's face": max(faces, default=0),
            "import circles": len(circles),
        }
        path, class_name = _PROTOCOL
        if (self.root / path).is_file():
            figures["public members of RunTask"] = len(
                list_public_members((self.root / path).read_text(encoding="utf-8"), class_name)
            )
        for name in ENTRIES:
            if name in self.files:
                figures[f"files loaded by {name}"] = len(self.get_reach(name))
        return {name: figures[name] for name in BOUNDS if name in figures}


def main(argv: list[str] | None = None) -> int:
    """Parse flags, measure, print; return the exit code."""
    parser = create_program_parser(__doc__, prog="python -m proofs.house")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="of a checkout")
    parser.add_argument("--json", action="store_true", help="print the figures alone")
    parser.add_argument("--rooms", action="store_true", help="print the lines of each folder")
    parser.add_argument("--deferred", action="store_true", help="print imports inside functions")
    parser.add_argument("--reach", metavar="MODULE", help="print what importing a module loads")
    return run_program(lambda: report(parser.parse_args(argv)))


def report(options: argparse.Namespace) -> int:
    """Print what was asked for; return the exit code."""
    house = read_house(options.root)
    if options.reach is not None:
        if options.reach not in house.files:
            raise UserError(f"--reach ({options.reach!r}) is no module of {str(options.root)!r}")
        print("\n".join(sorted(house.get_reach(options.reach))))
        return 0
    if options.rooms:
        for room, lines in count_lines(house).most_common():
            print(f"{lines:>7} {room}")
        return 0
    if options.deferred:
        for file in sorted(house.files.values(), key=lambda file: -len(file.deferred)):
            for targets in file.deferred:
                print(f"{file.name}: {', '.join(sorted(targets))}")
        return 0
    figures = house.measure()
    if options.json:
        print(json.dumps(figures, indent=2))
        return 0
    for name, value in figures.items():
        mark = "" if value <= BOUNDS[name] else "  exceeded"
        print(f"{name:<40} {value:>8,} {'<= ' + format(BOUNDS[name], ','):>10}{mark}")
    return EXIT_FAILED if find_exceeded(figures) else 0


def find_exceeded(figures: dict[str, float]) -> list[str]:
    """List the figures above their bounds, a line each."""
    return [
        f"{name}: {value:,} > {BOUNDS[name]:,}"
        for name, value in figures.items()
        if value > BOUNDS[name]
    ]


def count_lines(house: House) -> Counter[str]:
    """Lines of the Python files in each top-level folder, or of a file at the top."""
    rooms: Counter[str] = Counter()
    for file in house.files.values():
        rooms[file.name.partition("/")[0]] += file.lines
    return rooms


def list_programs(root: Path) -> list[str]:
    """List the programs below tools/ that `python -m tools.NAME` runs."""
    folder = root / "tools"
    files = [p.stem for p in folder.glob("*.py") if _RUNS.search(p.read_text(encoding="utf-8"))]
    return sorted([*files, *(path.parent.name for path in folder.glob("*/__main__.py"))])


def find_longest_chain(house: House) -> list[str]:
    """Modules of the longest way along imports at module level; each circle counts once."""
    return nx.dag_longest_path(nx.condensation(house.graph))


def list_public_members(text: str, class_name: str) -> list[str]:
    """Methods and annotated attributes of a class without a leading underscore, sorted."""
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    bodies = (node.body for node in classes if node.name == class_name)
    body: list[ast.stmt] = next(bodies, [])
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return sorted(name for name in names if not name.startswith("_"))


def list_packages(module: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`."""
    words = module.split(".")
    return [".".join(words[:length]) for length in range(1, len(words))]


def read_house(root: Path) -> House:
    """Parse every Python file of a checkout but its tests.

    Raises:
      UserError: the folder holds no such file.
    """
    paths = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] not in _SKIPPED and not any(part.startswith(".") for part in parts):
            words = [*parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
            paths[".".join(words)] = path
    if not paths:
        raise UserError(f"{str(root)!r} holds no Python file; name the root of a checkout")
    house = House(root)
    for module, path in paths.items():
        text = path.read_text(encoding="utf-8")
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        reader = ImportReader(package, set(paths))
        tree = ast.parse(text, filename=str(path))
        reader.visit(tree)
        house.files[module] = SourceFile(
            path.relative_to(root).as_posix(),
            len(text.splitlines()),
            frozenset(reader.loads - {module}),
            tuple(reader.deferred),
            path.stem == "__init__" and all(isinstance(node, ast.Expr) for node in tree.body),
        )
    return house


class ImportReader(ast.NodeVisitor):
    """Collects the imports of one file that name modules of its checkout.

    Args:
      package: of the file, for relative imports.
      modules: of the checkout.
    """

    def __init__(self, package: str, modules: set[str]) -> None:
        self.loads: set[str] = set()
        self.deferred: list[frozenset[str]] = []
        self._package = package
        self._modules = modules
        self._functions = 0

    def visit_FunctionDef(self, node: ast.AST) -> None:
        """Count what stands inside a function as deferred."""
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        """Leave out what only type checkers run."""
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """Note `import a.b`."""
        self._note(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Note `from a import b`: the submodule `a.b` if there is one, else `a`."""
        base = node.module or ""
        if node.level:
            words = self._package.split(".")
            words = words[: len(words) - node.level + 1]
            base = ".".join([*words, *([base] if base else [])])
        inner = (f"{base}.{alias.name}" for alias in node.names)
        self._note(name if name in self._modules else base for name in inner)

    def _note(self, names: Iterator[str]) -> None:
        targets = frozenset(names) & self._modules
        if self._functions and targets:
            self.deferred.append(targets)
        elif not self._functions:
            self.loads |= targets


if __name__ == "__main__":
    sys.exit(main())
