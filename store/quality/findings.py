"""Reads gates from the command line and prints their findings: for runs, reports and proofs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import yaml

from store.formatting import format_value
from store.quality.gates import EXIT_UNDECIDED, Direction, Gate, GateFinding, make_gate, parse_gate
from store.terminal import colour_word, create_console, create_table
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject, JsonValue


def read_gates(options: argparse.Namespace) -> tuple[list[Gate], str]:
    """Read the gates of flags and file, and the outcome for undecided ones ("" by default)."""
    gates, undecided = [parse_gate(text) for text in options.gate or ()], ""
    if options.gates is not None:
        more, undecided = read_file(options.gates)
        gates += more
        if not gates:
            raise UserError(f"--gates {options.gates} contains no gate; list at least one")
    directions: dict[str, Direction] = {}
    for text in options.direction or ():
        metric, _, direction = text.rpartition("=")
        if not metric or direction not in get_args(Direction):
            raise UserError(f"--direction must be METRIC=higher or METRIC=lower, got {text!r}")
        directions[metric] = direction
    if unused := directions.keys() - {gate.metric for gate in gates}:
        raise UserError(f"--direction {min(unused)}: no gate is on this metric; add one by --gate")
    gates = [replace(g, direction=directions.get(g.metric, g.direction)) for g in gates]
    return gates, options.undecided or undecided


def read_file(path: Path) -> tuple[list[Gate], str]:
    """Read a YAML file with `gates`, a list of texts or mappings, and optionally `undecided`."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--gates {path} cannot be read: {reason}; give a YAML file") from error
    rows = values.get("gates") if isinstance(values, dict) else None
    if not isinstance(rows, list) or set(values) - {"gates", "undecided"}:
        raise UserError(f"--gates {path} must contain a list `gates`, and at most `undecided` too")
    undecided = values.get("undecided", "")
    if undecided not in ("", "fail", "pass"):
        raise UserError(f"--gates {path}: undecided must be fail or pass, got {undecided!r}")
    return [_make_gate(row) for row in rows], undecided


def publish_findings(findings: Sequence[GateFinding]) -> list[JsonObject]:
    """Return the findings as JSON objects."""
    return [{**asdict(finding), "gate": str(finding.gate)} for finding in findings]


def print_findings(
    findings: Sequence[GateFinding], sides: tuple[str, str], code: int, *, of: str = "seeds"
) -> None:
    """Print a table of the gates and the result; more of `of` may help if it is undecided."""
    console = create_console()
    table = create_table("outcome", "gate", f"{sides[0]}>", f"{sides[1]}>", "why")
    for row in findings:
        numbers = (format_value(row.base), format_value(row.new))
        table.add_row(colour_word(row.outcome), str(row.gate), *numbers, row.reason)
    console.print(table)
    words = {0: "passed", EXIT_FAILED: "failed", EXIT_UNDECIDED: f"undecided: more {of} may tell"}
    style = colour_word(("pass", "fail", "", "undecided")[code]).style
    console.print(f"\n{words[code]}", style=style)


def _make_gate(row: JsonValue) -> Gate:
    if isinstance(row, str):
        return parse_gate(row)
    if not isinstance(row, dict):
        raise UserError(f"gate {row!r} must be a text or a mapping")
    return make_gate(row, str(row.get("metric", row)))
