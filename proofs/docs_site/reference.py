"""Writes the reference from the code: losses, ops, metrics, programs, the Python interface."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

from big_vision.pp.registry import OPS
from losses.table import EMBEDDING_LOSSES, LOSSES
from store.record.catalogue import METRICS
from tools.__main__ import list_programs
from utils.config.load import create_parser
from utils.programs import CommandLine

ROOT = Path(__file__).resolve().parents[2]
# Programs beside `python -m tools.NAME`.
PROGRAMS = ("bill.compile_for_tpu", "bill.shape_advisor", "train.tpu_vm", "train.xla_dist")
# The modules whose public names own code may import.
INTERFACE = (
    "engine",
    "datasets",
    "optim_factory",
    "job.check",
    "job.build",
    "job.stream",
    "tasks.protocol",
    "models.factory",
    "losses.base",
    "losses.factory",
    "losses.reductions",
    "big_vision.pp.builder",
    "big_vision.pp.registry",
    "big_vision.input.source",
    "store.record.catalogue",
    "utils.config.load",
    "utils.config.devices",
    "utils.runtime.launcher",
    "utils.runtime.base",
    "utils.registry",
    "utils.errors",
)
_COLUMNS = "100"  # of the terminal that a help is made for

_LOSSES_HEAD = """\
# Every loss

Made from `losses/table.py`, the losses' own docstrings and the tables of
[losses](../docs/losses.md), which say what the letters mean and what a cost is relative to.
Arguments are the `args` of a term of `distill.losses`; a loss that needs layers maps module paths
of the student to those of the teacher. Measured: the first set of
[the table of methods](../docs/kd_table.md).
"""
_OPS_HEAD = """\
# Every preprocessing op

Made from `big_vision/pp/`. An op reads and writes the key `image` of an example unless `key`,
`inkey` or `outkey` name others. [Preprocessing](../docs/preprocessing.md) says how a string is
read.
"""
_METRICS_HEAD = """\
# Every metric

Made from `store/record/catalogue.py`. `*` stands for any text. *Better*: which way is. *Nature*:
equal in runs that are equal bit for bit (deterministic), a measured time (clock), or what the
machine spent (resource). [Metrics of a run](../docs/checkpoints.md#metrics) says which line has
which.

| metric | unit | better | nature | what |
|---|---|---|---|---|
"""
_COMMANDS_HEAD = """\
# Every command

Made from each program's `--help`. `python main.py` trains; its flags are
[the keys](../docs/keys.md)
and these:
"""
_INTERFACE_HEAD = """\
# The Python interface

Made from the docstrings. [Own code](../docs/own_code.md) shows what to do with it,
[the architecture](../docs/explain/architecture.md) how it hangs together.
"""


def format_losses() -> str:
    """Return the page of losses: each registered name, its arguments, what documents say of it."""
    rows = read_rows(ROOT / "docs" / "losses.md")
    gains = read_rows(ROOT / "docs" / "kd_table.md")
    parts = [_LOSSES_HEAD]
    for name in LOSSES:
        parts.append(f"\n## {name}\n{_describe(LOSSES.get(name))}")
        facts = {"arguments": _format_arguments(LOSSES.get(name)), **rows.get(name, {})}
        facts["layers"] = "needed" if "layers" in _get_parameters(LOSSES.get(name)) else "none"
        facts["measured"] = "; ".join(
            f"{gains[name][key]}" for key in ("top-1", "gain []") if name in gains
        )
        parts += _format_facts(facts)
        if name in gains:
            parts.append("- row in [the table of methods](../docs/kd_table.md)\n")
    parts.append("\n## Losses of features without labels\n")
    for name in EMBEDDING_LOSSES:
        factory = EMBEDDING_LOSSES.get(name)
        parts.append(f"\n### {name}: without labels\n{_describe(factory)}")
        parts += _format_facts({"arguments": _format_arguments(factory)})
    return "".join(parts)


def read_rows(path: Path) -> dict[str, dict[str, str]]:
    """Return the first row of a document's tables for each name in its first cell, by column."""
    rows: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not head:
            head = cells
        for name in re.findall(r"`(\w+)`", cells[0]):
            rows.setdefault(name, dict(zip(head[1:], cells[1:], strict=False)))
    return rows


def format_ops() -> str:
    """Return the page of preprocessing ops: signature and docstring of each."""
    parts = [_OPS_HEAD]
    for name in OPS:
        factory = OPS.get(name)
        signature = inspect.signature(factory)
        arguments = str(signature.replace(return_annotation=signature.empty)).replace("'", "")
        parts.append(f"\n## {name}\n\n```python\n{name}{arguments}\n```\n{_describe(factory)}")
    return "".join(parts)


def format_metrics() -> str:
    """Return the page of metrics: the catalogue as a table."""
    rows = [
        (f"`{metric.name}`", metric.unit, metric.direction, metric.nature, metric.text)
        for metric in METRICS
    ]
    return _METRICS_HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def format_commands() -> str:
    """Return the page of programs: the help of each, and of each of its commands."""
    names = [f"tools.{name}" for name in list_programs()] + list(PROGRAMS)
    parts = [_COMMANDS_HEAD, _format_help(create_parser())]
    for name in names:
        parts.append(f"\n## python -m {name}\n")
        parts.append(_format_help(load_parser(name)))
        for command, parser in list_commands(load_parser(name)):
            parts.append(f"\n### {name} {command}\n" + _format_help(parser))
    return "".join(parts)


def load_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m NAME`."""
    folder = (ROOT / name.replace(".", "/")).is_dir()
    program: CommandLine = importlib.import_module(f"{name}.__main__" if folder else name).main
    return program.create_parser()


def format_interface() -> str:
    """Return the page of the Python interface: signatures and docstrings of its modules."""
    parts = [_INTERFACE_HEAD]
    for module in INTERFACE:
        path = ROOT / (module.replace(".", "/") + ".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts.append(f"\n## {module}\n\n{ast.get_docstring(tree) or ''}\n")
        for node in list_public(tree):
            parts.append(
                f"\n### {module}.{node.name}\n\n```python\n{_format_signature(node)}\n```\n"
            )
            parts.append(_quote(ast.get_docstring(node) or ""))
    return "".join(parts)


def list_public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield the public functions and classes of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def _format_signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"def {node.name}({ast.unparse(node.args)}){returns}"
    bases = ", ".join(map(ast.unparse, node.bases))
    methods = [
        f"    {_format_signature(part)}"
        for part in node.body
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")
    ]
    return "\n".join([f"class {node.name}({bases})" if bases else f"class {node.name}", *methods])


def _quote(text: str) -> str:
    return f"\n```text\n{text}\n```\n" if text else ""


def _format_help(parser: argparse.ArgumentParser) -> str:
    with mock.patch.dict(os.environ, {"COLUMNS": _COLUMNS}):
        return _quote(parser.format_help().rstrip())


def list_commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands of a program with their parsers, if it has commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _describe(factory: Callable[..., object]) -> str:
    return _quote(inspect.getdoc(factory) or "")


def _get_parameters(factory: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(factory).parameters


def _format_arguments(factory: Callable[..., object]) -> str:
    names = [
        parameter.name
        if parameter.default is parameter.empty
        else f"{parameter.name}={parameter.default!r}"
        for parameter in _get_parameters(factory).values()
    ]
    return ", ".join(f"`{name}`" for name in names)


def _format_facts(facts: Mapping[str, str]) -> Iterable[str]:
    return ["\n", *(f"- {name}: {value}\n" for name, value in facts.items() if value)]


PAGES: dict[str, Callable[[], str]] = {
    "reference/losses.md": format_losses,
    "reference/ops.md": format_ops,
    "reference/metrics.md": format_metrics,
    "reference/commands.md": format_commands,
    "reference/interface.md": format_interface,
}
