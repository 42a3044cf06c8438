"""`gate`: whether new runs are worse than others by more than is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import yaml
from rich.text import Text

from store.compare import Side
from store.compare.sides import find_entry
from store.gates import (
    Direction,
    Gate,
    GateFinding,
    check_sides,
    make_gate,
    parse_gate,
    settle_direction,
)
from store.wording import format_value
from tools.runs.comparing import read_side
from tools.runs.printing import create_console, create_table, print_json
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject, JsonValue

EXIT_UNDECIDED = 3
_STYLES = {"pass": "green", "fail": "bold red", "undecided": "yellow", "skipped": "dim"}
_UNDECIDED = ("fail", "pass")


def gate_runs(options: argparse.Namespace) -> int:
    """Print what each gate says; gives the exit code: 0, 1 for a regression, 3 for undecided.

    Raises:
      UserError: a gate, a file or a run with a fault.
    """
    gates, undecided = read_gates(options)
    directions = dict(_read_direction(text) for text in options.direction)
    gates = [replace(g, direction=directions.get(g.metric, g.direction)) for g in gates]
    base, new = (read_side(options, text) for text in (options.base, options.new))
    _check_known(gates, (base, new))
    gates = [settle_direction(gate) for gate in gates]
    findings = [check_sides(gate, base, new) for gate in gates]
    code = get_code(findings, options.undecided or undecided)
    if options.json:
        rows: list[JsonObject] = [{**asdict(one), "gate": str(one.gate)} for one in findings]
        print_json({"base": base.name, "new": new.name, "findings": rows, "exit_code": code})
    else:
        print_findings(findings, (base, new), code)
    return code


def read_gates(options: argparse.Namespace) -> tuple[list[Gate], str]:
    """The gates of flags and file, and what the file says of undecided ones.

    Raises:
      UserError: none at all, or one with a fault.
    """
    gates, undecided = [parse_gate(text) for text in options.gate], ""
    if options.gates is not None:
        found, undecided = read_file(options.gates)
        gates += found
    if not gates:
        raise UserError("gate: nothing to hold the runs against; give --gate or --gates FILE")
    return gates, undecided


def read_file(path: Path) -> tuple[list[Gate], str]:
    """The gates of a YAML file: `gates`, a list of texts or mappings, and `undecided`.

    Raises:
      UserError: it cannot be read, or says something else.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--gates {path} cannot be read: {reason}; give a YAML file") from error
    rows = values.get("gates") if isinstance(values, dict) else None
    if not isinstance(rows, list) or set(values) - {"gates", "undecided"}:
        raise UserError(f"--gates {path} holds no list `gates` alone, with `undecided` beside it")
    undecided = values.get("undecided", "")
    if undecided not in ("", *_UNDECIDED):
        raise UserError(f"--gates {path}: undecided ({undecided!r}) is neither fail nor pass")
    return [_make(row) for row in rows], undecided


def get_code(findings: Sequence[GateFinding], undecided: str) -> int:
    """The exit code of some findings; minor ones change nothing."""
    grave = {one.outcome for one in findings if one.is_grave}
    if "fail" in grave or ("undecided" in grave and undecided == "fail"):
        return EXIT_FAILED
    return EXIT_UNDECIDED if "undecided" in grave and undecided != "pass" else 0


def print_findings(findings: Sequence[GateFinding], sides: tuple[Side, Side], code: int) -> None:
    """Each gate's verdict with its numbers, for a person."""
    console = create_console()
    table = create_table("outcome", "gate", f"{sides[0].name}>", f"{sides[1].name}>", "why")
    for one in findings:
        style = _STYLES[one.outcome]
        numbers = (format_value(one.base), format_value(one.new))
        table.add_row(Text(one.outcome, style=style), str(one.gate), *numbers, one.reason)
    console.print(table)
    words = {0: "passed", EXIT_FAILED: "failed", EXIT_UNDECIDED: "undecided: more seeds may tell"}
    console.print(f"\n{words[code]}", style=_STYLES[("pass", "fail", "", "undecided")[code]])


def _make(row: JsonValue) -> Gate:
    if isinstance(row, str):
        return parse_gate(row)
    if not isinstance(row, dict):
        raise UserError(f"gate {row!r} is neither a text nor a mapping")
    return make_gate(row, str(row.get("metric", row)))


def _read_direction(text: str) -> tuple[str, Direction]:
    metric, _, direction = text.rpartition("=")
    if not metric or direction not in get_args(Direction):
        raise UserError(f"--direction {text!r} has another form; write METRIC=higher or =lower")
    return metric, direction


def _check_known(gates: Sequence[Gate], sides: Sequence[Side]) -> None:
    """A number of the catalogue may be missing, which is a finding; what nobody knows is a typo."""
    from store.filters import check_keys

    known = {name for side in sides for one in side.records for name in one.values}
    check_keys([g.metric for g in gates if find_entry(g.metric) is None], known, "--gate")
